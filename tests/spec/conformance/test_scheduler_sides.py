"""The scheduler sides' traces beside the ranks': what they heard is what the ranks reported (rule S6)."""

import json
from pathlib import Path

from dfirst.connector.trace_file import TraceFile
from dfirst.protocol.commands import remote_of
from dfirst.protocol.scheduler import Allocation, Finish, SchedulerCore, TransferRequest
from dfirst.spec.conform import conform

from tests.protocol.world import BLOCKS, KEY, PROMPT, RecordingObserver

from .traced_world import TracedWorld, TracingObserver


class Scheduler:
    """A scheduler side that tells its engine's ranks what its core says."""

    def __init__(self, world: TracedWorld, engine: str) -> None:
        path = world.directory / f"{engine}-scheduler.jsonl"
        self.trace = TraceFile(path, "scheduler-1", engine, -1, world._clock)
        self.trace.started("", None)
        self.core = SchedulerCore(TracingObserver(RecordingObserver(), self.trace))
        self._world = world
        self._engine = engine

    def tell(self) -> None:
        for command in self.core.take_commands():
            for rank in self._world.ranks(self._engine):
                self._world.give(rank, command)


def request(world: TracedWorld, name: str) -> TransferRequest:
    other = remote_of(world.engines["P"]) if name == "d-req" else None
    return TransferRequest(
        key=KEY, mode="blockwise", request_id=name, prompt_tokens=PROMPT, remote=other, metaserver=""
    )


def record(directory: Path, fails: bool = False) -> None:
    """Write a block-wise transfer of one prefill and two decode ranks, with both scheduler sides."""
    world = TracedWorld(directory, 1, 2, met=True)
    prefill, decode = Scheduler(world, "P"), Scheduler(world, "D")
    prefill.core.seen(request(world, "p-req"), decodes=False)
    prefill.core.finished("p-req", Finish(block_ids=BLOCKS, prompt_computed=True))
    prefill.tell()
    decode.core.seen(request(world, "d-req"), decodes=True)
    decode.core.allocated("d-req", Allocation(block_ids=BLOCKS, cached_tokens=0, external_tokens=PROMPT))
    decode.tell()
    world.deliver()
    world.finish_copies("D0")
    world.finish_copies("D1", ok=not fails)
    world.advance(1.0)
    decode.core.reported("d-req", "failed" if fails else "received")
    prefill.core.reported("p-req", "sent")
    decode.core.finished("d-req", Finish(block_ids=BLOCKS, prompt_computed=True))
    world.end()
    prefill.trace.ended()
    decode.trace.ended()


def change(path: Path, old: str, new: str) -> None:
    lines = path.read_text().splitlines()
    (path).write_text("".join(line.replace(old, new) + "\n" for line in lines))


def broken(directory: Path) -> str:
    violation = conform([directory]).violation
    return violation.rule if violation else ""


def test_both_outcomes_conform(tmp_path: Path) -> None:
    record(tmp_path / "well")
    record(tmp_path / "badly", fails=True)
    assert broken(tmp_path / "well") == ""
    assert broken(tmp_path / "badly") == ""
    assert conform([tmp_path / "well"]).files == 5


def test_a_rank_that_has_not_reported_makes_no_outcome(tmp_path: Path) -> None:
    record(tmp_path)
    path = tmp_path / "D-rank1-D1.1.jsonl"
    lines = path.read_text().splitlines()
    place = next(number for number, line in enumerate(lines) if json.loads(line)["line"] == "report")
    path.write_text("\n".join(lines[:place]) + "\n")
    violation = conform([tmp_path]).violation
    assert violation is not None
    assert violation.rule == "S6"
    assert "hears 'received' of request d-req, and rank 1 has not reported" in violation.text


def test_one_failure_fails(tmp_path: Path) -> None:
    record(tmp_path, fails=True)
    path = tmp_path / "D-scheduler.jsonl"
    change(path, '"row":"DR7","event":"failed"', '"row":"DR6","event":"received"')
    change(path, '"target":"LOAD_FAILED"', '"target":"LOADED"')
    change(path, '"row":"DR13"', '"row":"DR12"')
    change(path, '"source":"LOAD_FAILED"', '"source":"LOADED"')
    violation = conform([tmp_path]).violation
    assert violation is not None
    assert violation.rule == "S6"
    assert "the ranks have reported failed, received" in violation.text


def test_a_request_that_never_ends_is_named(tmp_path: Path) -> None:
    record(tmp_path)
    path = tmp_path / "P-scheduler.jsonl"
    lines = [line for line in path.read_text().splitlines() if '"row":"PR7"' not in line]
    path.write_text("\n".join(lines) + "\n")
    violation = conform([tmp_path]).violation
    assert violation is not None
    assert violation.rule == "L1"
    assert "prefill_request of request p-req is still HELD" in violation.text
