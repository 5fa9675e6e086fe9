"""Only what the plan did excuses an error, and nothing excuses a wrong answer or silence."""

import msgspec
import pytest
from dfirst.connector.chaos.accounts import sums_of, told
from dfirst.connector.chaos.answers import Asked, Verdict
from dfirst.connector.chaos.load import Question
from dfirst.connector.chaos.outages import GRACE_SECONDS, Outage, Outages
from dfirst.connector.chaos.plan import ServerName
from dfirst.connector.engine_spec import Mode

from .reports import CLEAN

AWAY = Outages([Outage("prefill", 100.0, 200.0), Outage("router", 300.0, 310.0), Outage("decode", 500.0)])


def asked(verdict: Verdict, sent: float, ended: float, mode: Mode = "blockwise", number: int = 1) -> Asked:
    question = Question(number, mode, 0, False, "s")
    return Asked(question=question, sent=sent, ended=ended, verdict=verdict, detail="why")


@pytest.mark.parametrize(
    ("verdict", "sent", "ended", "mode", "excused"),
    [
        ("error", 90.0, 101.0, "blockwise", True),
        ("error", 150.0, 151.0, "blockwise-d-first", True),
        ("error", 200.0 + GRACE_SECONDS, 260.0, "blockwise", True),
        ("error", 210.0, 260.0, "blockwise", False),
        ("error", 90.0, 99.0, "blockwise", False),
        ("error", 150.0, 151.0, "layerwise", False),  # D computes it
        ("cut", 150.0, 151.0, "blockwise", False),  # the router is there to say what happened
        ("cut", 299.0, 301.0, "layerwise", True),
        ("formless", 150.0, 151.0, "blockwise", False),
        ("error", 600.0, 601.0, "layerwise", True),  # still away
    ],
)
def test_what_excuses_an_error(
    verdict: Verdict, sent: float, ended: float, mode: Mode, excused: bool
) -> None:
    sums = sums_of([asked(verdict, sent, ended, mode)], AWAY, frozenset())
    assert (len(sums.unexcused), sums.excused) == ((0, 1) if excused else (1, 0))


@pytest.mark.parametrize(("server", "excused"), [("prefill", 1), ("decode", 0)])
def test_a_killed_engine_cuts_off_whom_it_was_asked_by(server: ServerName, excused: int) -> None:
    one = msgspec.structs.replace(asked("cut", 150.0, 151.0), server=server)
    assert sums_of([one], AWAY, frozenset()).excused == excused


def test_nothing_excuses_a_wrong_answer_or_silence() -> None:
    sums = sums_of([asked("wrong", 150, 151), asked("silent", 150, 151)], AWAY, frozenset())
    assert len(sums.wrong) == 1
    assert len(sums.silent) == 1


def test_an_answer_is_cut_short_only_where_an_abort_was_ordered() -> None:
    answers = [asked("aborted", 1, 2, number=1), asked("aborted", 1, 2, number=2)]
    assert [one.question.number for one in sums_of(answers, AWAY, frozenset({2})).unexcused] == [1]


def test_clients_that_left_and_right_answers_are_well() -> None:
    sums = sums_of([asked("right", 1, 2), asked("left", 1, 2)], AWAY, frozenset())
    assert (sums.wrong, sums.silent, sums.unexcused, sums.excused) == ([], [], [], 0)


def test_findings_are_told_in_sentences_the_first_ones_in_full() -> None:
    lines = told("wrong answer", [asked("wrong", 1, 3.5, number=number) for number in range(12)])
    assert lines[0] == "wrong answer: request chaos-0, blockwise, after 2.5 s: wrong: why"
    assert lines[-1] == "wrong answer: 2 more"
    assert len(lines) == 11


def test_a_run_is_well_only_if_something_was_broken_and_nothing_was_found() -> None:
    assert CLEAN.is_well
    assert not msgspec.structs.replace(CLEAN, faults=0).is_well
    assert not msgspec.structs.replace(CLEAN, findings=["a block"]).is_well
