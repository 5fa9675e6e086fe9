"""Layouts drawn at random: what whole numbers allow works and is right, and nothing is silently wrong."""

import pytest
from dfirst.protocol.plan import LayoutMismatch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from .judge import pull, push
from .layouts import Case, cases, grouped_cases, must_work

FEW, MANY = 40, 2000
DRAWN = {"derandomize": True, "deadline": None, "suppress_health_check": list(HealthCheck)}


def hold_to_the_definition(case: Case) -> None:
    """Move the prompt in both ways; a refusal must be right, and name both layouts."""
    refusal = refused(case)
    allowed = must_work(case.prefill, case.decode)
    if not refusal:
        event("moved" if allowed else "moved, could have been refused")
        return
    event("refused")
    assert not allowed, f"whole numbers allow this pair: {refusal}"
    for side in (case.prefill, case.decode):
        assert side.parallel.describe() in refusal


def refused(case: Case) -> str:
    """Move the prompt in both ways and check every byte; return why it was refused, if it was."""
    try:
        pull(case.prefill, case.decode, case.request)
        push(case.prefill, case.decode, case.request, case.chunk_ends)
    except LayoutMismatch as refusal:
        return str(refusal)
    return ""


@settings(max_examples=FEW, **DRAWN)
@given(st.one_of(cases(), cases(), cases(), grouped_cases()))
def test_some_random_layouts_move_every_byte_or_are_rightly_refused(case: Case) -> None:
    hold_to_the_definition(case)


@pytest.mark.slow
@settings(max_examples=MANY, **DRAWN)
@given(st.one_of(cases(), cases(), cases(), grouped_cases()))
def test_many_random_layouts_move_every_byte_or_are_rightly_refused(case: Case) -> None:
    hold_to_the_definition(case)
