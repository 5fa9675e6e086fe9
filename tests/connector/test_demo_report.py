"""What counts as a demo that went well, and what its table and file show."""

import json
from io import StringIO
from pathlib import Path
from typing import Any

from dfirst.connector.demo_client import Answer
from dfirst.connector.demo_prompts import SHARED_FIRST, SHARED_SECOND, DemoRequest
from dfirst.connector.demo_report import DemoReport, Exchange, make_report, match_transfers
from dfirst.connector.demo_table import print_report
from dfirst.connector.trace_reader import Traces
from dfirst.protocol.trace_lines import CopyLine, StepLine
from dfirst.spec.conform import Conformance
from dfirst.spec.conformance.violation import Violation
from rich.console import Console


def exchange(name: str = "one", sent: float = 10.0, **answer: Any) -> Exchange:
    whole: dict[str, Any] = {"answered": sent + 1, "text": "hi", "token_ids": (1, 2), "prompt_tokens": 5}
    return Exchange(
        DemoRequest(mode="blockwise", name=name, prompt="hello"),
        Answer(sent=sent, **{**whole, **answer}),
        Answer(sent=0, **whole),
    )


def traces(*transfers: str, moved: int = 1000, start: float = 10.2) -> Traces:
    steps, copies = [], []
    for number, name in enumerate(transfers):
        time = start + number / 10
        for side in ("prefill", "decode"):
            steps.append(
                StepLine(
                    time=time,
                    process="rank-1",
                    engine=side,
                    rank=0,
                    machine=f"{side}_blockwise",
                    transfer=name,
                    attempt=0,
                    peer="",
                    row="R",
                    event="e",
                    source="NEW",
                    target="METADATA_QUERY",
                )
            )
        copies.append(
            CopyLine(
                time=time,
                process="rank-1",
                engine="decode",
                rank=0,
                phase="ended",
                transfer=name,
                attempt=0,
                peer="prefill/0/1",
                bytes=moved,
                seconds=0.001,
                ok=True,
            )
        )
    return Traces(tuple(steps), tuple(copies))


def conformance(violation: Violation | None = None) -> Conformance:
    return Conformance(
        files=2, lines=9, transfers=1, messages=4, violation=violation, running=[], unfinished=[]
    )


def report(exchanges: list[Exchange], seen: Traces, found: Conformance | None = None) -> DemoReport:
    return make_report(
        exchanges, seen, model="m", prefill="TP 1", decode="TP 1", conformance=found or conformance()
    )


def test_traces_that_break_a_rule_fail_the_demo_and_say_which() -> None:
    violation = Violation(
        file="p.jsonl", line=7, time=1.0, rule="S3", transfer="t1", text="it is released twice"
    )
    made = report([exchange(transfers=("t1",))], traces("t1"), conformance(violation))
    assert (made.mismatches, made.problems) == (0, 1)
    output = StringIO()
    print_report(Console(file=output, width=300), made)
    assert "traces do not conform to the spec: p.jsonl, line 7: it is released twice" in output.getvalue()


def test_traces_that_conform_are_counted() -> None:
    output = StringIO()
    print_report(Console(file=output, width=300), report([exchange(transfers=("t1",))], traces("t1")))
    seen = "traces conform to the spec: 2 files, 9 lines, 1 transfer, 4 messages"
    assert seen in output.getvalue()


def test_an_equal_answer_whose_cache_moved_is_well() -> None:
    made = report([exchange(transfers=("t1",))], traces("t1"))
    assert (made.mismatches, made.problems) == (0, 0)
    row = made.requests[0]
    assert (row.bytes, row.megabytes_per_second, row.transfer) == (1000, 1.0, "t1")
    assert row.prefill_states[0].state == "METADATA_QUERY"


def test_a_different_token_is_a_mismatch() -> None:
    made = report([exchange(transfers=("t1",), token_ids=(1, 3))], traces("t1"))
    assert (made.mismatches, made.problems) == (1, 1)
    assert not made.requests[0].equal


def test_an_error_is_a_mismatch_that_says_why() -> None:
    made = report([exchange(error="HTTP 500: out of blocks")], traces())
    assert made.mismatches == 1
    assert made.requests[0].problem == "HTTP 500: out of blocks"


def test_an_equal_answer_without_a_transfer_is_a_failure_all_the_same() -> None:
    made = report([exchange()], traces())
    assert (made.mismatches, made.problems) == (0, 1)
    assert "no transfer" in (made.requests[0].problem or "")


def test_a_transfer_that_moved_nothing_is_a_failure() -> None:
    made = report([exchange(transfers=("t1",))], traces("t1", moved=0))
    assert "moved no bytes" in (made.requests[0].problem or "")


def test_the_second_of_two_with_one_prefix_must_move_less() -> None:
    pair = [exchange(SHARED_FIRST, transfers=("t1",)), exchange(SHARED_SECOND, transfers=("t2",))]
    same = report(pair, traces("t1", "t2"))
    assert "no fewer than the first" in (same.requests[1].problem or "")
    first, second = traces("t1"), traces("t2", moved=100)
    less = Traces(first.transitions + second.transitions, first.copies + second.copies)
    assert report(pair, less).problems == 0


def test_transfers_that_the_router_did_not_name_are_matched_by_time_and_order() -> None:
    first, second, third = exchange(sent=10.0), exchange(sent=10.0), exchange(sent=20.0)
    assert match_transfers([first, second, third], traces("a", "b")) == ["a", "b", None]


def test_a_named_transfer_is_not_given_to_another() -> None:
    named, unnamed = exchange(sent=10.0, transfers=("a",)), exchange(sent=10.0)
    assert match_transfers([unnamed, named], traces("a", "b")) == ["b", "a"]


def test_the_file_holds_what_readers_look_for(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "demo.json"
    report([exchange(transfers=("t1",))], traces("t1")).write(path)
    content = json.loads(path.read_text())
    assert content["mismatches"] == 0
    entry = content["requests"][0]
    assert (entry["mode"], entry["equal"], entry["bytes"]) == ("blockwise", True, 1000)
    assert entry["decode_states"][0] == {
        "state": "METADATA_QUERY",
        "seconds": 0.0,
        "machine": "decode_blockwise",
    }


def printed(made: DemoReport) -> str:
    output = StringIO()
    print_report(Console(file=output, width=170), made)
    return output.getvalue()


def test_the_table_has_a_row_a_request_and_a_verdict() -> None:
    shown = printed(report([exchange(transfers=("t1",))], traces("t1")))
    assert "METADATA_QUERY 0" in shown
    assert "1 requests, 1 kB moved: every answer equals the single engine's" in shown


def test_the_table_names_what_went_wrong() -> None:
    shown = printed(report([exchange(error="HTTP 500: [bad] engine")], traces()))
    assert "blockwise, one: HTTP 500: [bad] engine" in shown
    assert "1 answers differ" in shown
