"""Every pair of the table, with prompts of every kind, in both modes and under several transfer ids."""

from dataclasses import replace

import pytest

from .cores import pull_with_cores, push_with_cores
from .judge import pull, push
from .request import Side
from .table import PAIRS, Pair, prompts, request_for

PROMPTS_FOR_CORES = (
    "one token",
    "shorter than the CP size",
    "ends inside a block",
    "ends inside a block, one virtual block cached",
    "ends inside a block, all whole virtual blocks cached",
    "whole virtual blocks of both, all whole virtual blocks cached",
)
PROMPTS_FOR_VARIANTS = ("ends inside a block", "ends inside a block, one virtual block cached")


def chosen(prefill: Side, decode: Side, names: tuple[str, ...]) -> list[tuple[str, tuple[int, int]]]:
    return [(name, size) for name, size in prompts(prefill, decode).items() if name in names]


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_every_byte_of_a_pulled_prompt_arrives_once_and_every_rank_is_released_once(pair: Pair) -> None:
    prefill, decode = pair.sides()
    for name, (tokens, cached) in prompts(prefill, decode).items():
        pull(prefill, decode, request_for(prefill, decode, tokens, cached, name))


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_every_byte_of_a_pushed_prompt_arrives_once(pair: Pair) -> None:
    prefill, decode = pair.sides()
    step = prefill.parallel.prefix_step
    for name, (tokens, cached) in prompts(prefill, decode).items():
        request = request_for(prefill, decode, tokens, cached, name)
        # Of a short prompt the two are one.
        for chunk_ends in {(tokens,), (*range(step, tokens, step), tokens)}:
            push(prefill, decode, request, chunk_ends)


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_real_cores_release_every_rank_once_and_none_before_its_last_reader(pair: Pair) -> None:
    prefill, decode = pair.sides()
    for name, (tokens, cached) in chosen(prefill, decode, PROMPTS_FOR_CORES):
        pull_with_cores(prefill, decode, request_for(prefill, decode, tokens, cached, name))


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_real_cores_complete_every_rank_once_and_none_before_its_last_writer(pair: Pair) -> None:
    prefill, decode = pair.sides()
    for name, (tokens, cached) in chosen(prefill, decode, PROMPTS_FOR_CORES):
        push_with_cores(prefill, decode, request_for(prefill, decode, tokens, cached, name))


@pytest.mark.parametrize(
    ("pair", "conventions"),
    [
        (pair, conventions)
        for pair in PAIRS
        for conventions in ("ab", "ba", "bb")
        if all(side.parallel.allowed for side in pair.sides(*conventions))
    ],
    ids=str,
)
def test_the_conventions_may_differ(pair: Pair, conventions: str) -> None:
    prefill, decode = pair.sides(*conventions)
    for name, (tokens, cached) in chosen(prefill, decode, PROMPTS_FOR_VARIANTS):
        pull(prefill, decode, request_for(prefill, decode, tokens, cached, name))


@pytest.mark.parametrize("interleaves", [(1, 1), (1, 4), (2, 1), (4, 2)], ids=str)
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_the_interleaves_may_differ(pair: Pair, interleaves: tuple[int, int]) -> None:
    prefill, decode = (
        replace(side, parallel=replace(side.parallel, interleave=interleave))
        for side, interleave in zip(pair.sides(), interleaves, strict=True)
    )
    for name, (tokens, cached) in chosen(prefill, decode, PROMPTS_FOR_VARIANTS):
        pull(prefill, decode, request_for(prefill, decode, tokens, cached, name))
