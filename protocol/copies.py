"""The bytes of a leg as three columns of numbers: where from, where to, how long.

A copy costs the Transfer Engine about the same whatever its length, so the number of runs is what a transfer
costs. Runs are therefore as long as the two memories allow: axes that are dense on both sides (tokens, heads,
layers) are folded into one run first, and runs that follow each other on both sides (blocks) are joined
afterwards. Loops go over regions, lengths and batches, never over blocks or tokens.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .plan import Leg
from .shards import Region, Shard
from .tokens import Int64Array as Int64Array
from .tokens import common_pieces, same_slabs

BlockIds = Sequence[int] | Int64Array
BlockLists = BlockIds | Mapping[int, BlockIds]
"""A request's block ids from its first token on; with several KV cache groups, one list for each group."""
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
    source_blocks: BlockLists,
    target_blocks: BlockLists,
    tokens: range,
    layers: Sequence[int] | None = None,
) -> Copies:
    """Return the runs that move some tokens of a leg from the prefill shard to the decode shard.

    ``tokens`` is a range of the request's tokens with step 1; those that both shards hold are moved. The
    block lists begin with the request's first token and reach at least to the last that is moved. Where a
    block of one side holds the same tokens as a block of the other, the slots behind the range's end in its
    last block are copied along; nothing else is that was not asked for. ``layers`` narrows the leg (a push
    moves one layer at a time); layers that the leg does not have are left out.

    Raises ``ValueError`` in one sentence for a block list that is too short, a block that is not in the
    cache, heads or layers that a shard does not have, and a range that begins inside a block that must stay
    whole.
    """
    wanted = set(leg.layers) if layers is None else set(leg.layers).intersection(layers)
    pieces = common_pieces(source, target, tokens) if wanted else None
    if pieces is None or not len(pieces.lengths):
        return Copies(_NOTHING, _NOTHING, _NOTHING)
    from_side = _Side("prefill", source, source_blocks, pieces.source_places)
    to_side = _Side("decode", target, target_blocks, pieces.target_places)
    bases: dict[_Shape, list[tuple[int, int]]] = defaultdict(list)
    for from_region, to_region in _paired(source, target, wanted):
        base = (_first_byte(leg, source, from_region), _first_byte(leg, target, to_region))
        bases[_shape(from_region, to_region)].append(base)
        from_side.check(from_region)
        to_side.check(to_region)
    whole = same_slabs(source, target)
    lengths = source.block_size - from_side.slots if whole else pieces.lengths
    for shape in bases:
        if not shape.sliceable and not (whole and not from_side.slots.any()):
            raise ValueError(
                f"tokens {tokens.start} to {tokens.stop - 1} begin inside a block that can only move whole"
            )
    return join(
        [
            _over_layers(places, _in_a_region(shape, leg.head_count, from_side, to_side, lengths))
            for shape, places in bases.items()
        ]
    )


def join(pieces: Sequence[Copies]) -> Copies:
    """Return all runs of ``pieces`` by ascending source address, with neighbours on both sides made one."""
    if not pieces:
        return Copies(_NOTHING, _NOTHING, _NOTHING)
    source = np.concatenate([piece.source_addresses for piece in pieces])
    target = np.concatenate([piece.target_addresses for piece in pieces])
    length = np.concatenate([piece.lengths for piece in pieces])
    if len(length) < 2:
        return Copies(source, target, length)
    if bool((source[1:] < source[:-1]).any()):
        order = np.argsort(source, kind="stable")
        source, target, length = source[order], target[order], length[order]
    breaks = (source[:-1] + length[:-1] != source[1:]) | (target[:-1] + length[:-1] != target[1:])
    if bool(breaks.all()):
        return Copies(source, target, length)
    starts = np.concatenate([np.zeros(1, dtype=np.int64), np.flatnonzero(breaks) + 1])
    return Copies(source[starts], target[starts], np.add.reduceat(length, starts))


class _Shape(NamedTuple):
    """What decides the runs of a region beside its address. Most often all layers have one."""

    content_bytes: int
    block_strides: tuple[int, int]
    """Of the source and of the target, like the others."""
    head_strides: tuple[int, int]
    token_strides: tuple[int, int]
    groups: tuple[int, int]
    sliceable: bool


class _Axis(NamedTuple):
    extent: int
    source_stride: int
    target_stride: int


class _Side:
    """Where one side has the pieces: the blocks by the groups' lists, and the slots in them."""

    def __init__(self, name: str, shard: Shard, lists: BlockLists, places: Int64Array) -> None:
        self._name = name
        self._lists = lists if isinstance(lists, Mapping) else {0: lists}
        self._numbers = places // shard.block_size
        self._first, self._last = int(self._numbers.min()), int(self._numbers.max())
        self._blocks: dict[int, Int64Array] = {}
        self._extremes: dict[int, tuple[int, int]] = {}
        self.slots: Int64Array = places - self._numbers * shard.block_size

    def blocks(self, group: int) -> Int64Array:
        """Return the block of each piece."""
        found = self._blocks.get(group)
        if found is None:
            ids = self._lists.get(group)
            if ids is None or len(ids) <= self._last:
                raise ValueError(
                    f"{0 if ids is None else len(ids)} blocks of the {self._name} rank were given where the "
                    f"tokens reach into block {self._last + 1} of the request"
                )
            # Of a long list only the part that is needed becomes numbers.
            needed = np.asarray(ids[self._first : self._last + 1], dtype=np.int64)
            found = self._blocks[group] = needed[self._numbers - self._first]
            self._extremes[group] = int(found.min()), int(found.max())
        return found

    def check(self, region: Region) -> None:
        """Raise ``ValueError`` for a block that the region does not have."""
        # A block id comes over the wire: out of range it would read or write memory that is not KV cache.
        self.blocks(region.group)
        low, high = self._extremes[region.group]
        if low < 0 or high >= region.block_count:
            raise ValueError(
                f"block {low if low < 0 else high} is not one of the {region.block_count} blocks of the "
                f"{self._name} rank"
            )


def _paired(source: Shard, target: Shard, layers: set[int]) -> list[tuple[Region, Region]]:
    targets = {(region.layer, region.part): region for region in target.regions if region.layer in layers}
    pairs = [
        (region, targets[region.layer, region.part])
        for region in source.regions
        if (region.layer, region.part) in targets
    ]
    missing = layers.difference(region.layer for region, _ in pairs)
    if missing:
        raise ValueError(f"layer {min(missing)} is not in both shards")
    return pairs


def _shape(source: Region, target: Region) -> _Shape:
    return _Shape(
        source.content_bytes,
        (source.block_stride_bytes, target.block_stride_bytes),
        (source.head_stride_bytes, target.head_stride_bytes),
        (source.token_stride_bytes, target.token_stride_bytes),
        (source.group, target.group),
        source.tokens_sliceable,
    )


def _first_byte(leg: Leg, shard: Shard, region: Region) -> int:
    heads_in = leg.first_kv_head - shard.first_kv_head
    if heads_in < 0 or heads_in + leg.head_count > shard.kv_head_count:
        raise ValueError(
            f"heads {leg.first_kv_head} to {leg.first_kv_head + leg.head_count - 1} are not in a shard of "
            f"{shard.kv_head_count} heads from {shard.first_kv_head}"
        )
    return region.base_address + heads_in * region.head_stride_bytes


def _in_a_region(
    shape: _Shape, head_count: int, from_side: _Side, to_side: _Side, lengths: Int64Array
) -> Copies:
    """Return the runs of a region whose first byte has the address 0 on both sides."""
    sources = from_side.blocks(shape.groups[0]) * shape.block_strides[0]
    targets = to_side.blocks(shape.groups[1]) * shape.block_strides[1]
    sources += from_side.slots * shape.token_strides[0]
    targets += to_side.slots * shape.token_strides[1]
    runs = []
    # Tokens of a piece are an axis like heads, so pieces of one length are expanded together.
    for length in np.unique(lengths).tolist():
        mine = lengths == length
        axes = [_Axis(length, *shape.token_strides), _Axis(head_count, *shape.head_strides)]
        runs.append(_expanded(shape.content_bytes, axes, sources[mine], targets[mine]))
    return join(runs)


def _expanded(run_bytes: int, axes: list[_Axis], sources: Int64Array, targets: Int64Array) -> Copies:
    run_bytes, axes = _fold(run_bytes, axes)
    for extent, source_stride, target_stride in axes:
        steps = np.arange(extent, dtype=np.int64)
        sources = (sources[:, None] + steps * source_stride).ravel()
        targets = (targets[:, None] + steps * target_stride).ravel()
    return Copies(sources, targets, np.full(len(sources), run_bytes, dtype=np.int64))


def _fold(run_bytes: int, axes: list[_Axis]) -> tuple[int, list[_Axis]]:
    """Take every axis that is dense on both sides into the run; return the others, largest stride first."""
    kept: list[_Axis] = []
    for axis in sorted(axes, key=lambda axis: axis.source_stride):
        if axis.extent == 1:
            continue
        if not kept and axis.source_stride == axis.target_stride == run_bytes:
            run_bytes *= axis.extent
        else:
            kept.append(axis)
    return run_bytes, kept[::-1]


def _over_layers(bases: list[tuple[int, int]], runs: Copies) -> Copies:
    """Repeat a region's runs at every base (source, target); layers that follow each other become one run."""
    source, target = np.array(sorted(bases), dtype=np.int64).T
    lengths = np.broadcast_to(runs.lengths, (len(source), len(runs)))
    step = int(runs.lengths[0])
    if len(source) > 1 and bool((runs.lengths == step).all()):
        breaks = (source[:-1] + step != source[1:]) | (target[:-1] + step != target[1:])
        heads = np.concatenate([np.zeros(1, dtype=np.int64), np.flatnonzero(breaks) + 1])
        layers = np.diff(heads, append=len(source))
        source, target = source[heads], target[heads]
        lengths = np.broadcast_to((layers * step)[:, None], (len(source), len(runs)))
    return Copies(
        (source[:, None] + runs.source_addresses).ravel(),
        (target[:, None] + runs.target_addresses).ravel(),
        lengths.ravel(),
    )


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
