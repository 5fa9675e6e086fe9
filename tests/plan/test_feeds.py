"""The connector's feeds push what the plan says, whatever the chunks and whenever the legs are lent."""

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from .feeds import push_with_feeds
from .layouts import Case, cases, must_work
from .table import PAIRS, Pair, prompts, request_for


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_a_prompt_in_chunks_that_end_anywhere_arrives_whole(pair: Pair) -> None:
    prefill, decode = pair.sides()
    for number, (name, (tokens, cached)) in enumerate(prompts(prefill, decode).items()):
        request = request_for(prefill, decode, tokens, cached, name)
        chunk_ends = [*range(3, tokens, 11), tokens]
        lent_before_chunk = number % 3 * len(chunk_ends) // 2
        push_with_feeds(prefill, decode, request, chunk_ends, lent_before_chunk)


@settings(max_examples=60, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases(), st.lists(st.integers(1, 80), max_size=4), st.integers(0, 5))
def test_random_layouts_are_pushed_whole(case: Case, ends: list[int], lent: int) -> None:
    assume(must_work(case.prefill, case.decode))
    tokens = case.request.tokens
    chunk_ends = [*sorted({end for end in ends if end < tokens}), tokens]
    push_with_feeds(case.prefill, case.decode, case.request, chunk_ends, lent)
