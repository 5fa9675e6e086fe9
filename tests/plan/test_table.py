"""Every pair of the table, with prompts of every kind, in both modes and under several transfer ids."""

import pytest

from .cores import pull_with_cores, push_with_cores
from .judge import pull, push
from .table import PAIRS, Pair, prompts, request_for


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_every_byte_of_a_pulled_prompt_arrives_once_and_every_rank_is_released_once(pair: Pair) -> None:
    prefill, decode = pair.sides()
    for name, (tokens, cached) in prompts(prefill, decode).items():
        for turn in range(3):
            pull(prefill, decode, request_for(prefill, decode, tokens, cached, f"{name} {turn}"))


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_every_byte_of_a_pushed_prompt_arrives_once(pair: Pair) -> None:
    prefill, decode = pair.sides()
    step = prefill.parallel.prefix_step
    for name, (tokens, cached) in prompts(prefill, decode).items():
        request = request_for(prefill, decode, tokens, cached, name)
        push(prefill, decode, request, [tokens])
        push(prefill, decode, request, [*range(step, tokens, step), tokens])


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_real_cores_release_every_rank_once_and_none_before_its_last_reader(pair: Pair) -> None:
    prefill, decode = pair.sides()
    for name, (tokens, cached) in prompts(prefill, decode).items():
        pull_with_cores(prefill, decode, request_for(prefill, decode, tokens, cached, name))


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_real_cores_complete_every_rank_once_and_none_before_its_last_writer(pair: Pair) -> None:
    prefill, decode = pair.sides()
    for name, (tokens, cached) in prompts(prefill, decode).items():
        push_with_cores(prefill, decode, request_for(prefill, decode, tokens, cached, name))
