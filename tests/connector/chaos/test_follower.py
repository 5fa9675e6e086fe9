"""The follower of traces knows where a client's transfer is while the engines write."""

import os
from pathlib import Path

import msgspec
import pytest
from dfirst.connector.chaos.follower import TraceFollower
from dfirst.protocol.trace_lines import StepLine

CLIENT = "chaos-12"


def step(machine: str, target: str, peer: str = "", transfer: str = "t") -> bytes:
    line = StepLine(
        time=1.0,
        process="rank-1",
        engine="prefill",
        rank=0,
        machine=machine,
        transfer=transfer,
        attempt=0,
        peer=peer,
        row="X1",
        event="e",
        source="NEW",
        target=target,
    )
    return msgspec.json.encode(line) + b"\n"


@pytest.fixture
def follower(tmp_path: Path) -> TraceFollower:
    return TraceFollower(tmp_path)


def write(directory: Path, name: str, text: bytes) -> None:
    with (directory / name).open("ab") as file:
        file.write(text)


RANK = f"prefill-rank0-{os.getpid()}.jsonl"
SCHEDULER = f"prefill-scheduler-{os.getpid()}.jsonl"
DEAD = "decode-rank0-999999999.jsonl"


def test_a_state_is_known_by_the_clients_name_in_whatever_order_files_are_read(
    follower: TraceFollower, tmp_path: Path
) -> None:
    write(tmp_path, RANK, step("prefill_blockwise", "METADATA_QUERY"))
    follower.poll()
    assert not follower.entered(CLIENT, "prefill_blockwise", "METADATA_QUERY")
    write(tmp_path, SCHEDULER, step("prefill_request", "QUEUED", f"cmpl-{CLIENT}-t-0-abcd"))
    follower.poll()
    assert follower.entered(CLIENT, "prefill_blockwise", "METADATA_QUERY")
    assert not follower.entered(CLIENT, "prefill_blockwise", "FREED")
    assert not follower.entered("chaos-1", "prefill_blockwise", "METADATA_QUERY")
    assert follower.engine_request(CLIENT, "prefill") == f"cmpl-{CLIENT}-t-0-abcd"
    assert follower.engine_request(CLIENT, "decode") is None


def test_half_a_line_waits_for_its_end(follower: TraceFollower, tmp_path: Path) -> None:
    line = step("prefill_layerwise", "PUSHES_PENDING")
    write(tmp_path, RANK, line[:20])
    follower.poll()
    assert follower.pushes() == set()
    write(tmp_path, RANK, line[20:])
    follower.poll()
    assert follower.pushes() == {"t"}
    write(tmp_path, RANK, step("prefill_layerwise", "FREED"))
    follower.poll()
    assert follower.pushes() == set()


def test_the_dead_push_nothing(follower: TraceFollower, tmp_path: Path) -> None:
    write(tmp_path, DEAD, step("decode_layerwise", "PUSHES_PENDING"))
    write(tmp_path, RANK, step("prefill_blockwise", "PULLS_PENDING"))
    follower.poll()
    assert follower.pushes() == set()
    assert follower.workers("decode") == []
    assert follower.workers("prefill") == [os.getpid()]
