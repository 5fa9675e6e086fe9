"""The bytes of a leg as three columns of numbers: where from, where to, how long.

A copy costs the Transfer Engine about the same whatever its length, so the number of runs is what a transfer
costs. Runs are therefore as long as the two memories allow: axes that are dense on both sides (tokens, heads)
are folded into one run first, and runs that follow each other on both sides (blocks, layers) are joined
afterwards. Loops go over regions and batches, never over blocks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .plan import Leg
from .shards import Region, Shard
from .tokens import blocks_needed

Int64Array = npt.NDArray[np.int64]
_NOTHING: Int64Array = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Copies:
    """Runs of bytes to move: three arrays with one entry for each run, addresses and lengths in bytes."""

    source_addresses: Int64Array
    """Where the prefill rank holds the run."""
    target_addresses: Int64Array
    """Where the decode rank holds it."""
    lengths: Int64Array

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def bytes(self) -> int:
        return int(self.lengths.sum())

    def split(self, max_count: int, max_bytes: int | None = None) -> Iterator["Copies"]:
        """Yield the same bytes in batches of at most ``max_count`` runs and ``max_bytes`` bytes, in order.

        A run longer than ``max_bytes`` is cut, so that no batch takes longer than its caller can wait for.
        """
        if max_count < 1 or (max_bytes is not None and max_bytes < 1):
            raise ValueError(
                f"a batch of {max_count} runs and {max_bytes} bytes holds nothing: give at least 1"
            )
        whole = self if max_bytes is None else _cut(self, max_bytes)
        ends = np.cumsum(whole.lengths)
        start = 0
        while start < len(whole):
            stop = start + max_count
            if max_bytes is not None:
                moved = int(ends[start - 1]) if start else 0
                stop = min(stop, int(np.searchsorted(ends, moved + max_bytes, side="right")))
            yield Copies(
                whole.source_addresses[start:stop],
                whole.target_addresses[start:stop],
                whole.lengths[start:stop],
            )
            start = stop


def copies(
    leg: Leg,
    source: Shard,
    target: Shard,
    source_blocks: Sequence[int] | Int64Array,
    target_blocks: Sequence[int] | Int64Array,
    tokens: range,
    layers: Sequence[int] | None = None,
) -> Copies:
    """Return the runs that move some tokens of a leg from the prefill shard to the decode shard.

    Both block lists begin with the request's first token and reach at least to the last of ``tokens``, a
    range of the request's tokens with step 1. Slots behind its end may be copied along if they are in the
    block of a token that moves; nothing else is. ``layers`` narrows the leg (a push moves one layer at a
    time); layers that the leg does not have are left out.

    Raises ``ValueError`` in one sentence for a block list that is too short, a block that is not in the
    cache, heads or layers that a shard does not have, and a range that begins inside a slab that must stay
    whole.
    """
    wanted = set(leg.layers) if layers is None else set(leg.layers).intersection(layers)
    if not wanted or not tokens:
        return Copies(_NOTHING, _NOTHING, _NOTHING)
    first, end = tokens.start // source.block_size, blocks_needed(source, tokens.stop)
    from_blocks = np.asarray(source_blocks, dtype=np.int64)[first:end]
    to_blocks = np.asarray(target_blocks, dtype=np.int64)[first:end]
    if len(from_blocks) < end - first or len(to_blocks) < end - first:
        raise ValueError(
            f"{len(source_blocks)} source blocks and {len(target_blocks)} target blocks were given where "
            f"token {tokens.stop - 1} is in block {end - 1}"
        )
    targets = {(region.layer, region.part): region for region in target.regions if region.layer in wanted}
    pieces = [
        _region_copies(
            leg, source, target, region, targets[region.layer, region.part], from_blocks, to_blocks
        )
        for region in source.regions
        if region.layer in wanted
    ]
    return join(pieces)


def join(pieces: Sequence[Copies]) -> Copies:
    """Return all runs of ``pieces`` by ascending source address, with neighbours on both sides made one."""
    if not pieces:
        return Copies(_NOTHING, _NOTHING, _NOTHING)
    source = np.concatenate([piece.source_addresses for piece in pieces])
    target = np.concatenate([piece.target_addresses for piece in pieces])
    length = np.concatenate([piece.lengths for piece in pieces])
    if not len(length):
        return Copies(_NOTHING, _NOTHING, _NOTHING)
    order = np.argsort(source, kind="stable")
    source, target, length = source[order], target[order], length[order]
    breaks = (source[:-1] + length[:-1] != source[1:]) | (target[:-1] + length[:-1] != target[1:])
    starts = np.concatenate([np.zeros(1, dtype=np.int64), np.flatnonzero(breaks) + 1])
    return Copies(source[starts], target[starts], np.add.reduceat(length, starts))


def _region_copies(
    leg: Leg,
    source: Shard,
    target: Shard,
    from_region: Region,
    to_region: Region,
    from_blocks: Int64Array,
    to_blocks: Int64Array,
) -> Copies:
    _check_blocks(from_region, from_blocks, "prefill")
    _check_blocks(to_region, to_blocks, "decode")
    source_base = _first_byte(leg, source, from_region)
    target_base = _first_byte(leg, target, to_region)
    run_bytes, axes = _fold(
        from_region.content_bytes,
        [
            (source.block_size, from_region.token_stride_bytes, to_region.token_stride_bytes),
            (leg.head_count, from_region.head_stride_bytes, to_region.head_stride_bytes),
        ],
    )
    sources = source_base + from_blocks * from_region.block_stride_bytes
    targets = target_base + to_blocks * to_region.block_stride_bytes
    for extent, source_stride, target_stride in axes:
        steps = np.arange(extent, dtype=np.int64)
        sources = (sources[:, None] + steps * source_stride).ravel()
        targets = (targets[:, None] + steps * target_stride).ravel()
    return Copies(sources, targets, np.full(len(sources), run_bytes, dtype=np.int64))


def _fold(run_bytes: int, axes: list[tuple[int, int, int]]) -> tuple[int, list[tuple[int, int, int]]]:
    """Take every axis (extent, source stride, target stride) that is dense on both sides into the run."""
    remaining = sorted(axes, key=lambda axis: axis[1])
    kept: list[tuple[int, int, int]] = []
    for extent, source_stride, target_stride in remaining:
        if extent == 1:
            continue
        if not kept and source_stride == target_stride == run_bytes:
            run_bytes *= extent
        else:
            kept.append((extent, source_stride, target_stride))
    return run_bytes, kept


def _first_byte(leg: Leg, shard: Shard, region: Region) -> int:
    heads_in = leg.first_kv_head - shard.first_kv_head
    if heads_in < 0 or heads_in + leg.head_count > shard.kv_head_count:
        raise ValueError(
            f"heads {leg.first_kv_head} to {leg.first_kv_head + leg.head_count - 1} are not in a shard of "
            f"{shard.kv_head_count} heads from {shard.first_kv_head}"
        )
    return region.base_address + heads_in * region.head_stride_bytes


def _check_blocks(region: Region, blocks: Int64Array, side: str) -> None:
    # A block id comes over the wire: out of range it would read or write memory that is not KV cache.
    low, high = int(blocks.min()), int(blocks.max())
    if low < 0 or high >= region.block_count:
        wrong = low if low < 0 else high
        raise ValueError(f"block {wrong} is not one of the {region.block_count} blocks of the {side} rank")


def _cut(whole: Copies, max_bytes: int) -> Copies:
    parts = -(-whole.lengths // max_bytes)
    if not len(parts) or int(parts.max()) <= 1:
        return whole
    owner = np.repeat(np.arange(len(parts), dtype=np.int64), parts)
    first = np.repeat(np.cumsum(parts) - parts, parts)
    offset = (np.arange(len(owner), dtype=np.int64) - first) * max_bytes
    return Copies(
        whole.source_addresses[owner] + offset,
        whole.target_addresses[owner] + offset,
        np.minimum(whole.lengths[owner] - offset, max_bytes),
    )
