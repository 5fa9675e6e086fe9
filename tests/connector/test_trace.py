"""The trace: one JSON line an event, and never in anybody's way."""

import json
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from dfirst.connector import trace, trace_file
from dfirst.connector.extra_config import ExtraConfig
from dfirst.connector.trace import Tracer
from dfirst.protocol.commands import LegKey
from dfirst.protocol.messages import Renew, Renewed, Sender, TransferKey
from dfirst.protocol.timing import Timing

KEY = TransferKey("t", 1)
LEG = LegKey(KEY, "P", 3, "i")
ROW = SimpleNamespace(id="DB1", event="start")


def entity(state: str = "METADATA_QUERY") -> Any:
    machine = SimpleNamespace(spec=SimpleNamespace(name="decode_blockwise"))
    return SimpleNamespace(state=state, machine=machine, key=KEY, peer_name="P/3")


def lines(directory: Path) -> list[dict]:
    (file,) = directory.iterdir()
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_every_step_and_every_copy_is_a_line(tmp_path: Path) -> None:
    tracer = Tracer(str(tmp_path / "new"), "D", 2, "rank")
    tracer.stepped(entity(), ROW, "NEW")
    tracer.copied(LEG, 4096, 0.5, ok=True)
    step, copy = lines(tmp_path / "new")
    assert (step["machine"], step["row"], step["event"]) == ("decode_blockwise", "DB1", "start")
    assert (step["source"], step["target"]) == ("NEW", "METADATA_QUERY")
    assert (step["engine"], step["rank"], step["transfer"], step["attempt"]) == ("D", 2, "t", 1)
    assert (copy["line"], copy["phase"], copy["peer"]) == ("copy", "ended", "P/3/i")
    assert (copy["bytes"], copy["ok"]) == (4096, True)
    assert step["process"] == copy["process"] == f"rank-{os.getpid()}"
    tracer.close()


def test_lines_are_there_at_once_for_who_reads_along(tmp_path: Path) -> None:
    tracer = Tracer(str(tmp_path), "D", 0, "rank")
    for number in range(3):
        tracer.stepped(entity(), ROW, "NEW")
        assert len(lines(tmp_path)) == number + 1
    tracer.close()


def test_a_trace_begins_with_who_writes_and_ends_in_good_order(tmp_path: Path) -> None:
    tracer = Tracer(str(tmp_path), "D", 2, "rank")
    tracer.started("i", Timing(lease_seconds=7.0))
    tracer.close()
    start, end = lines(tmp_path)
    assert (start["line"], start["engine"], start["rank"], start["incarnation"]) == ("start", "D", 2, "i")
    assert start["timers"]["lease_seconds"] == 7.0
    assert end["line"] == "end"
    assert start["time"] <= end["time"]


def test_of_a_connectors_settings_only_the_timers_are_written(tmp_path: Path) -> None:
    tracer = Tracer(str(tmp_path), "D", 2, "rank")
    tracer.started("i", ExtraConfig(host="h", lease_seconds=9))
    start = lines(tmp_path)[0]
    assert start["timers"] == {**msgspec.structs.asdict(Timing()), "lease_seconds": 9.0}
    tracer.close()


def test_a_scheduler_side_is_no_rank(tmp_path: Path) -> None:
    tracer = Tracer(str(tmp_path), "D", -1, "scheduler")
    tracer.started("")
    tracer.close()
    assert [file.name for file in tmp_path.iterdir()] == [f"D-scheduler-{os.getpid()}.jsonl"]
    assert (lines(tmp_path)[0]["rank"], lines(tmp_path)[0]["timers"]) == (-1, {})


def test_a_message_is_a_line_for_each_transfer_that_it_names(tmp_path: Path) -> None:
    tracer = Tracer(str(tmp_path), "D", 2, "rank")
    tracer.started("i", Timing())
    mover = Sender("P", 3, "j")
    other = TransferKey("u", 0)
    tracer.received(Renew(mover, 4, "i", "layerwise", [KEY, other]), b"route")
    tracer.sent(Renewed(Sender("D", 2, "i"), 4, 20.0, [KEY], [other]), b"route")
    _, first, second, extended, gone = lines(tmp_path)
    assert [first["transfer"], second["transfer"]] == ["t", "u"]
    assert (first["way"], first["message"], first["sequence"]) == ("received", "RENEW", 4)
    assert (first["sender"], first["receiver"]) == ("P/3/j", "D/2/i")
    assert (extended["way"], extended["answer"], extended["lease_seconds"]) == ("sent", "extended", 20.0)
    assert (extended["sender"], extended["receiver"]) == ("D/2/i", "P/3/j")
    assert (gone["answer"], gone["lease_seconds"]) == ("gone", 0.0)
    tracer.close()


def test_without_a_directory_steps_are_only_counted() -> None:
    tracer = Tracer("", "D", 0, "rank")
    tracer.stepped(entity(), ROW, "NEW")
    tracer.copied(LEG, 1, 0.1, ok=False)
    assert tracer.rows == {"DB1": 1}
    tracer.close()


def test_an_engine_may_have_any_name(tmp_path: Path) -> None:
    Tracer(str(tmp_path), "team/D_dp0", 0, "rank").close()
    assert [file.name for file in tmp_path.iterdir()] == [f"team_D_dp0-rank0-{os.getpid()}.jsonl"]


def test_a_directory_that_cannot_be_made_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"trace_path .* cannot be written"):
        Tracer(str(tmp_path / "file" / "below"), "D", 0, "rank")


def test_a_full_disk_ends_the_trace_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / f"D-rank0-{os.getpid()}.jsonl").symlink_to("/dev/full")
    tracer = Tracer(str(tmp_path), "D", 0, "rank")
    with caplog.at_level(logging.ERROR, trace_file.logger.name):
        tracer.stepped(entity(), ROW, "NEW")
        tracer.stepped(entity(), ROW, "NEW")
    assert [record.message.partition(",")[0] for record in caplog.records] == ["the trace ends here"]
    assert tracer.rows == {"DB1": 2}


def test_an_event_that_no_row_wanted_is_counted_and_logged_if_the_spec_does_not_know_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tracer = Tracer("", "D", 0, "rank")
    with caplog.at_level(logging.WARNING, trace.logger.name):
        tracer.unheard(entity("FREED"), "ack", expected=True)
        tracer.unheard(entity("FREED"), "accept", expected=False)
    assert tracer.unexpected == {"decode_blockwise.FREED.accept": 1}
    assert [record.message for record in caplog.records] == ["t: decode_blockwise got accept in state FREED"]


def test_a_closed_trace_stays_closed(tmp_path: Path) -> None:
    tracer = Tracer(str(tmp_path), "D", 0, "rank")
    tracer.close()
    tracer.close()
    tracer.stepped(entity(), ROW, "NEW")
    assert lines(tmp_path) == []
