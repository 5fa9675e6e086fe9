"""The connector's feeds push what the plan says, whatever the chunks and whenever the legs are lent."""

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from .definition import Group, Parallel
from .feeds import push_with_feeds
from .layouts import Case, cases, must_work
from .memory import Form
from .request import Side
from .table import PAIRS, Pair, prompts, request_for


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_a_prompt_in_chunks_that_end_anywhere_arrives_whole(pair: Pair) -> None:
    prefill, decode = pair.sides()
    for number, (name, (tokens, cached)) in enumerate(prompts(prefill, decode).items()):
        request = request_for(prefill, decode, tokens, cached, name)
        chunk_ends = [*range(3, tokens, 11), tokens]
        lent_before_chunk = number % 3 * len(chunk_ends) // 2
        push_with_feeds(prefill, decode, request, chunk_ends, lent_before_chunk)


@pytest.mark.parametrize("interleave", [4, 2, 1])
@pytest.mark.parametrize("lent_before_chunk", [0, 1, 3])
def test_blocks_that_must_stay_whole_go_when_they_are_full_on_all_ranks_that_split_the_tokens(
    interleave: int, lent_before_chunk: int
) -> None:
    prefill, decode = (
        Side(
            Parallel(heads=2, stages=(2,), groups=(Group((0, 1), 4),), tp=tp, dcp=2, interleave=interleave),
            Form(sliceable=False),
        )
        for tp in (8, 4)
    )
    request = request_for(prefill, decode, 29, 8, "whole blocks")
    push_with_feeds(prefill, decode, request, [4, 13, 29], lent_before_chunk)


@settings(max_examples=25, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases(), st.lists(st.integers(1, 80), max_size=4), st.integers(0, 5))
def test_random_layouts_are_pushed_whole(case: Case, ends: list[int], lent: int) -> None:
    assume(must_work(case.prefill, case.decode))
    tokens = case.request.tokens
    chunk_ends = [*sorted({end for end in ends if end < tokens}), tokens]
    push_with_feeds(case.prefill, case.decode, case.request, chunk_ends, lent)
