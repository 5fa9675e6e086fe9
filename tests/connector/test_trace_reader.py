"""What engines write to their trace files, read back as the story of each transfer."""

import json
from pathlib import Path
from typing import Any

import pytest
from dfirst.connector.trace_reader import read_traces


def step(time: float, machine: str, source: str, target: str, **more: Any) -> dict[str, Any]:
    return {
        "line": "step",
        "time": time,
        "process": "worker-1",
        "engine": machine.split("_")[0],
        "rank": 0,
        "machine": machine,
        "transfer": "t1",
        "attempt": 0,
        "peer": "",
        "row": "R1",
        "event": "something",
        "source": source,
        "target": target,
        **more,
    }


def copy(time: float, number: int, seconds: float, **more: Any) -> dict[str, Any]:
    return {
        "line": "copy",
        "time": time,
        "process": "worker-2",
        "engine": "decode",
        "rank": 0,
        "phase": "ended",
        "transfer": "t1",
        "attempt": 0,
        "peer": "prefill/0/1",
        "bytes": number,
        "seconds": seconds,
        "ok": True,
        **more,
    }


def write(directory: Path, name: str, *records: dict[str, Any], end: str = "\n") -> None:
    (directory / name).write_text("\n".join(json.dumps(record) for record in records) + end)


def test_no_directory_is_no_traces(tmp_path: Path) -> None:
    assert read_traces(tmp_path / "none").transfers() == []


def test_lines_of_several_processes_become_one_story_in_order_of_time(tmp_path: Path) -> None:
    write(tmp_path, "d.jsonl", step(11.0, "decode_blockwise", "NEW", "METADATA_QUERY"))
    write(tmp_path, "p.jsonl", step(10.0, "prefill_blockwise", "NEW", "METADATA_QUERY"))
    trace = read_traces(tmp_path).of("t1")
    assert trace.started == 10.0
    assert [(one.state, one.seconds) for one in trace.states("decode")] == [("METADATA_QUERY", 1.0)]


def test_transfers_are_listed_by_their_first_sign_of_life(tmp_path: Path) -> None:
    write(
        tmp_path,
        "d.jsonl",
        step(12.0, "decode_blockwise", "NEW", "METADATA_QUERY", transfer="late"),
        step(11.0, "decode_blockwise", "NEW", "METADATA_QUERY", transfer="early"),
    )
    assert read_traces(tmp_path).transfers() == ["early", "late"]


def test_a_step_that_stays_where_it_was_is_no_state_passed(tmp_path: Path) -> None:
    write(
        tmp_path,
        "d.jsonl",
        step(10.0, "decode_blockwise", "NEW", "PULLS_PENDING"),
        step(10.1, "decode_blockwise", "PULLS_PENDING", "PULLS_PENDING"),
    )
    assert [one.state for one in read_traces(tmp_path).of("t1").states("decode")] == ["PULLS_PENDING"]


def test_legs_belong_to_no_side_and_other_ranks_repeat_the_first(tmp_path: Path) -> None:
    write(
        tmp_path,
        "d.jsonl",
        step(10.0, "mover_leg", "NEW", "COPYING"),
        step(10.1, "decode_blockwise", "NEW", "PULLS_PENDING", rank=1),
        step(10.2, "decode_blockwise", "NEW", "PULLS_PENDING", rank=0),
        step(10.3, "decode_request", "NEW", "LOADING"),
    )
    states = read_traces(tmp_path).of("t1").states("decode")
    assert [(one.state, one.machine) for one in states] == [
        ("PULLS_PENDING", "decode_blockwise"),
        ("LOADING", "decode_request"),
    ]


def test_bytes_are_those_that_arrived(tmp_path: Path) -> None:
    write(tmp_path, "d.jsonl", copy(10.0, 700, 0.1), copy(11.0, 300, 0.1), copy(12.0, 50, 0.1, ok=False))
    assert read_traces(tmp_path).of("t1").bytes == 1000


def test_a_copy_that_has_only_started_is_none(tmp_path: Path) -> None:
    write(tmp_path, "d.jsonl", copy(10.0, 0, 0.0, phase="started"))
    assert read_traces(tmp_path).copies == ()


def test_speed_counts_time_in_which_two_copies_overlap_once(tmp_path: Path) -> None:
    # From 10 to 12 and from 11 to 13, then a pause, and from 20 to 21: four seconds with a copy under way.
    write(tmp_path, "d.jsonl", *(copy(end, 4_000_000, long) for end, long in ((12, 2), (13, 2), (21, 1))))
    assert read_traces(tmp_path).of("t1").megabytes_per_second == pytest.approx(3.0)


def test_no_copy_has_no_speed(tmp_path: Path) -> None:
    write(tmp_path, "d.jsonl", step(10.0, "decode_blockwise", "NEW", "PULLS_PENDING"))
    assert read_traces(tmp_path).of("t1").megabytes_per_second is None


def test_a_transfer_is_over_when_every_rank_of_both_sides_is_freed(tmp_path: Path) -> None:
    freed = [
        step(10.0, "decode_blockwise", "DONE_RECEIVING", "FREED"),
        step(10.0, "prefill_blockwise", "DONE_SENDING", "FREED"),
    ]
    write(tmp_path, "a.jsonl", *freed)
    assert read_traces(tmp_path).of("t1").is_over
    write(tmp_path, "b.jsonl", step(11.0, "prefill_blockwise", "METADATA_QUERY", "PULLS_PENDING", rank=1))
    assert not read_traces(tmp_path).of("t1").is_over


def test_one_side_alone_is_not_the_end(tmp_path: Path) -> None:
    write(tmp_path, "a.jsonl", step(10.0, "decode_blockwise", "DONE_RECEIVING", "FREED"))
    assert not read_traces(tmp_path).of("t1").is_over


def test_a_line_that_is_still_being_written_is_left_for_later(tmp_path: Path) -> None:
    whole = step(10.0, "decode_blockwise", "NEW", "PULLS_PENDING")
    write(tmp_path, "d.jsonl", whole, end='\n{"time": 11.0, "mach')
    assert len(read_traces(tmp_path).transitions) == 1


def test_a_wrong_line_is_named_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"line": "copy", "bytes": "many"}\n')
    with pytest.raises(ValueError, match=r"line 1 of .*d\.jsonl is no line of a trace"):
        read_traces(tmp_path)
