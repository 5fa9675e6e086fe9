"""Runs inside a rank's cache pass, all others are named."""

import numpy as np
import pytest
from dfirst.connector.own_memory import OwnMemory
from dfirst.protocol.shards import Region, Shard

BLOCKS, HEADS, TOKENS, CONTENT = 4, 2, 8, 16
BLOCK = HEADS * TOKENS * CONTENT
FIRST, SECOND = 0x10000, 0x90000
"""Where two layers lie, apart from each other."""


def shard(*bases: int) -> Shard:
    regions = tuple(
        Region(layer, "kv", base, BLOCKS, BLOCK, TOKENS * CONTENT, CONTENT, CONTENT)
        for layer, base in enumerate(bases)
    )
    return Shard(total_kv_heads=2, first_kv_head=0, kv_head_count=HEADS, block_size=TOKENS, regions=regions)


def check(memory: OwnMemory, *runs: tuple[int, int]) -> None:
    addresses, lengths = (np.asarray(column, dtype=np.int64) for column in zip(*runs, strict=True))
    memory.check(addresses, lengths)


END = FIRST + BLOCKS * BLOCK


@pytest.mark.parametrize(
    "run", [(FIRST, 1), (FIRST, BLOCKS * BLOCK), (END - 1, 1), (SECOND, BLOCK), (END, 0)]
)
def test_runs_inside_pass(run: tuple[int, int]) -> None:
    check(OwnMemory(shard(FIRST, SECOND)), (FIRST, 4), run)


@pytest.mark.parametrize(
    "run",
    [
        (FIRST - 1, 1),
        (FIRST - 1, 2),
        (END - 1, 2),
        (END, 1),
        (FIRST, BLOCKS * BLOCK + 1),
        (SECOND - 1, 1),
        (0, 1),
        (FIRST, -1),
        (FIRST, (1 << 63) - 1),
        (-(1 << 63), 1),
        ((1 << 63) - 1, 1),
    ],
)
def test_runs_outside_are_named(run: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=rf"{run[1]} bytes at .+ are not in this rank's KV cache"):
        check(OwnMemory(shard(FIRST, SECOND)), (FIRST, 4), run)


def test_layers_that_follow_each_other_are_one_memory() -> None:
    check(OwnMemory(shard(END, FIRST)), (END - 8, 16))


def test_nothing_is_nowhere() -> None:
    nothing = np.empty(0, dtype=np.int64)
    OwnMemory(shard()).check(nothing, nothing)
