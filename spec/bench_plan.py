"""What a plan costs: two large engines, a long prompt, and the copies of one leg, in milliseconds of one CPU.

The blocks of both sides are in a random order, so that none of them can be merged: the worst case.
"""

import random
import time
from collections.abc import Iterator
from typing import NamedTuple

from dfirst.protocol.copies import copies
from dfirst.protocol.parallel import CONVENTION_A, ParallelSizes, RankPlace, places
from dfirst.protocol.plan import Leg, plan_pair
from dfirst.protocol.shards import Directory, RankEntry, Region, Shard

TOKENS, LAYERS, BLOCK_SIZE = 131_072, 64, 16
BLOCKS = TOKENS // BLOCK_SIZE
LARGEST_MILLISECONDS = 50.0
ROUNDS = 7


class Case(NamedTuple):
    """Two layouts of one model, 16 ranks and 8."""

    name: str
    kv_heads: int
    content_bytes: int
    prefill: ParallelSizes
    decode: ParallelSizes
    decode_block_size: int = BLOCK_SIZE
    interleave: int = BLOCK_SIZE
    """Of the prefill side."""


_SPLIT = ParallelSizes(tp=8, pcp=2, dcp=8, convention=CONVENTION_A)
CASES = (
    Case("GQA, TP 16 to TP 8", 8, 512, ParallelSizes(tp=16), ParallelSizes(tp=8)),
    Case("MLA, TP 16 to TP 8, blocks of 16 to 64", 1, 1152, ParallelSizes(tp=16), ParallelSizes(tp=8), 64),
    Case("MLA, PCP 2 DCP 8 token by token to TP 8", 1, 1152, _SPLIT, ParallelSizes(tp=8), interleave=1),
)


class Measured(NamedTuple):
    """What a case costs, in milliseconds."""

    name: str
    meeting: float
    """The plan of the two engines, which is made once."""
    leg: float
    """The copies of one leg."""


def measured() -> Iterator[Measured]:
    """Yield what each case costs."""
    for case in CASES:
        prefill = _directory("P", case, case.prefill, BLOCK_SIZE, case.interleave)
        decode_size = case.decode_block_size
        decode = _directory("D", case, case.decode, decode_size, decode_size)
        started = time.thread_time()
        leg = plan_pair(prefill, decode).request("t", TOKENS, 0).legs_of_decode(0)[0]
        planned = time.thread_time() - started
        source, target = prefill.ranks[leg.prefill_rank].shard, decode.ranks[0].shard
        spent = min(_measured(leg, source, target) for _ in range(ROUNDS))
        yield Measured(case.name, planned * 1e3, spent * 1e3)


def _measured(leg: Leg, source: Shard, target: Shard) -> float:
    from_blocks, to_blocks = shuffled(BLOCKS)
    started = time.thread_time()
    copies(leg, source, target, from_blocks, to_blocks, range(TOKENS))
    return time.thread_time() - started


def shuffled(blocks: int) -> tuple[list[int], list[int]]:
    """Return so many blocks in two random orders, the same ones each time."""
    first, second = (random.Random(seed).sample(range(blocks), blocks) for seed in (1, 2))
    return first, second


def regions(
    layers: range, blocks: int, block_size: int, heads: int, content_bytes: int
) -> tuple[Region, ...]:
    """Return the caches of these layers, one after the other, each block with its heads one by one."""
    head_stride = block_size * content_bytes
    block_stride = heads * head_stride
    return tuple(
        Region(
            layer=layer,
            part="kv",
            base_address=(1 << 40) + layer * blocks * block_stride,
            block_count=blocks,
            block_stride_bytes=block_stride,
            head_stride_bytes=head_stride,
            token_stride_bytes=content_bytes,
            content_bytes=content_bytes,
            tokens_sliceable=True,
        )
        for layer in layers
    )


def _directory(name: str, case: Case, sizes: ParallelSizes, block_size: int, interleave: int) -> Directory:
    ranks = tuple(
        RankEntry(
            rank=place.rank,
            host=name,
            port=place.rank,
            incarnation=f"{name}{place.rank}",
            data_address=f"{name}:{place.rank}",
            shard=_shard(case, sizes, place, block_size, interleave),
        )
        for place in places(sizes, case.kv_heads, LAYERS)
    )
    return Directory(engine_id=name, model="m", layout=str(sizes), ranks=ranks)


def _shard(case: Case, sizes: ParallelSizes, place: RankPlace, block_size: int, interleave: int) -> Shard:
    layers = range(place.first_layer, place.first_layer + place.layer_count)
    return Shard(
        total_kv_heads=case.kv_heads,
        first_kv_head=place.first_kv_head,
        kv_head_count=place.kv_head_count,
        block_size=block_size,
        regions=regions(layers, BLOCKS, block_size, place.kv_head_count, case.content_bytes),
        cp_size=place.cp_size,
        cp_rank=place.cp_rank,
        interleave=interleave,
        convention=sizes.convention,
    )
