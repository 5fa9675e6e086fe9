"""Every pair of the table over the real Mooncake engine, one process a rank, in both modes."""

from collections.abc import Callable, Iterator

import pytest

from ..request import Side
from ..table import PAIRS, Pair, prompts, request_for
from .fleet import Fleet, fleets

pytestmark = pytest.mark.e2e

KINDS = (
    "one token",
    "ends inside a block",
    "ends inside a block, one virtual block cached",
    "whole virtual blocks of both, all whole virtual blocks cached",
)


@pytest.fixture(scope="module")
def start() -> Iterator[Callable[[Side, Side], Fleet]]:
    with fleets() as start:
        yield start


def move(pair: Pair, kinds: Callable[[str], bool], start: Callable[[Side, Side], Fleet]) -> None:
    """Move prompts of these kinds in both modes."""
    prefill, decode = pair.sides()
    fleet = start(prefill, decode)
    moved = 0
    for name, (tokens, cached) in prompts(prefill, decode).items():
        if kinds(name):
            fleet.pull(request_for(prefill, decode, tokens, cached, f"pull, {name}"))
            chunk_ends = [*range(7, tokens, 19), tokens]
            fleet.push(request_for(prefill, decode, tokens, cached, f"push, {name}"), chunk_ends)
            moved += 1
    assert moved, "these layouts have no such prompts"
    fleet.end()


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_prompts_arrive_whole_in_both_modes(pair: Pair, start: Callable[[Side, Side], Fleet]) -> None:
    move(pair, lambda kind: kind in KINDS, start)


@pytest.mark.full
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_prompts_of_all_other_kinds_arrive_too(pair: Pair, start: Callable[[Side, Side], Fleet]) -> None:
    move(pair, lambda kind: kind not in KINDS, start)
