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
import numpy.typing as npt

from .plan import Leg
from .shards import Region, Shard
from .tokens import Groups, Pieces, common_pieces, group_starts, same_slabs, tokens_at
from .tokens import Int64Array as Int64Array

BlockIds = Sequence[int] | Int64Array
BlockLists = BlockIds | Mapping[int, BlockIds]
"""A request's block ids from its first token on; with several KV cache groups, one list for each group."""
OUT_OF_WINDOW = 0
"""The id, in a list of a group with a window, of blocks that the request no longer has."""
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
    return TokenCopies(leg, source, target, source_blocks, target_blocks, tokens).of(layers)


def join(pieces: Sequence[Copies]) -> Copies:
    """Return all runs of ``pieces`` by ascending source address, with neighbours on both sides made one."""
    if not pieces:
        return Copies(_NOTHING, _NOTHING, _NOTHING)
    first, *others = pieces
    source, target, length = first.source_addresses, first.target_addresses, first.lengths
    if others:
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
    starts = group_starts(breaks)
    return Copies(source[starts], target[starts], np.add.reduceat(length, starts))


class _Shape(NamedTuple):
    """What decides the runs of a region beside its address. Most often all layers have one."""

    content_bytes: int
    block_strides: tuple[int, int]
    """Of the source and of the target, like the others."""
    head_strides: tuple[int, int]
    token_strides: tuple[int, int]
    groups: Groups
    sliceable: bool


class _Axis(NamedTuple):
    extent: int
    source_stride: int
    target_stride: int


class _Moved:
    """In which blocks and slots the tokens that move are, for layers of one KV cache group on each side."""

    def __init__(
        self,
        source: Shard,
        target: Shard,
        lists: tuple[BlockLists, BlockLists],
        tokens: range,
        groups: Groups,
        block_counts: tuple[int, int],
    ) -> None:
        pieces = common_pieces(source, target, tokens, groups)
        self._tokens = tokens
        self._whole = same_slabs(source, target, groups)
        sides = []
        for number, (name, shard) in enumerate((("prefill", source), ("decode", target))):
            block_size = shard.group(groups[number]).block_size
            numbers = pieces[number] // block_size
            blocks = _block_ids(name, lists[number], groups[number], numbers)
            sides.append((blocks, pieces[number] - numbers * block_size))
        (from_blocks, self._from_slots), (to_blocks, self._to_slots) = sides
        self._lengths = pieces.lengths
        if self._whole:
            self._lengths = source.group(groups[0]).block_size - self._from_slots
        windows = (source.group(groups[0]).window, target.group(groups[1]).window)
        if any(windows):
            kept = _in_window(windows, from_blocks, to_blocks)
            still_there = to_blocks != OUT_OF_WINDOW if windows[1] else True
            _check_given_away(target, pieces, tokens, windows, ~kept & still_there)
            from_blocks, to_blocks, self._lengths = from_blocks[kept], to_blocks[kept], self._lengths[kept]
            self._from_slots, self._to_slots = self._from_slots[kept], self._to_slots[kept]
        _check_blocks("prefill", from_blocks, block_counts[0])
        _check_blocks("decode", to_blocks, block_counts[1])
        self._from_blocks, self._to_blocks = from_blocks, to_blocks
        self._by_length = _by_length(self._lengths)

    def in_a_region(self, shape: _Shape, head_count: int) -> Copies:
        """Return the runs of a region whose first byte has the address 0 on both sides."""
        if not shape.sliceable and not (self._whole and not self._from_slots.any()):
            raise ValueError(
                f"tokens {self._tokens.start} to {self._tokens.stop - 1} begin inside a block that can only "
                "move whole"
            )
        sources = self._from_blocks * shape.block_strides[0] + self._from_slots * shape.token_strides[0]
        targets = self._to_blocks * shape.block_strides[1] + self._to_slots * shape.token_strides[1]
        runs = []
        # Tokens of a piece are an axis like heads, so pieces of one length are expanded together.
        for length, mine in self._by_length:
            axes = [_Axis(length, *shape.token_strides), _Axis(head_count, *shape.head_strides)]
            runs.append(_expanded(shape.content_bytes, axes, sources[mine], targets[mine]))
        return join(runs)


class TokenCopies:
    """What ``copies`` returns for some tokens of a leg, layer by layer: what layers have in common is worked
    out once, which is nearly all of it. Parameters and errors are those of ``copies``.
    """

    def __init__(
        self,
        leg: Leg,
        source: Shard,
        target: Shard,
        source_blocks: BlockLists,
        target_blocks: BlockLists,
        tokens: range,
    ) -> None:
        self._leg = leg
        self._shards = (source, target)
        self._lists = (source_blocks, target_blocks)
        self._tokens = tokens
        self._moved: dict[tuple[Groups, tuple[int, int]], _Moved] = {}
        self._in_a_region: dict[tuple[_Shape, tuple[int, int]], Copies] = {}

    def of(self, layers: Sequence[int] | None = None) -> Copies:
        """Return the runs of these layers; of all of the leg without them."""
        leg, (source, target) = self._leg, self._shards
        wanted = set(leg.layers) if layers is None else set(leg.layers).intersection(layers)
        bases: dict[_Shape, list[tuple[int, int]]] = defaultdict(list)
        block_counts: dict[Groups, tuple[int, int]] = {}
        for from_region, to_region in _paired(source, target, wanted) if self._tokens else ():
            shape = _shape(from_region, to_region)
            bases[shape].append((_first_byte(leg, source, from_region), _first_byte(leg, target, to_region)))
            counts = (from_region.block_count, to_region.block_count)
            least = block_counts.get(shape.groups, counts)
            block_counts[shape.groups] = (min(least[0], counts[0]), min(least[1], counts[1]))
        return join(
            [
                _over_layers(places, self._runs(shape, block_counts[shape.groups]))
                for shape, places in bases.items()
            ]
        )

    def _runs(self, shape: _Shape, block_counts: tuple[int, int]) -> Copies:
        """Return the runs of a region of this shape, from its first byte on."""
        runs = self._in_a_region.get((shape, block_counts))
        if runs is None:
            moved = self._moved.get((shape.groups, block_counts))
            if moved is None:
                moved = _Moved(*self._shards, self._lists, self._tokens, shape.groups, block_counts)
                self._moved[shape.groups, block_counts] = moved
            runs = self._in_a_region[shape, block_counts] = moved.in_a_region(shape, self._leg.head_count)
        return runs


def _block_ids(name: str, lists: BlockLists, group: int, numbers: Int64Array) -> Int64Array:
    """Return the blocks that a list names at these numbers."""
    if not len(numbers):
        return numbers
    ids = lists.get(group, ()) if isinstance(lists, Mapping) else () if group else lists
    first, last = int(numbers.min()), int(numbers.max())
    if len(ids) <= last:
        raise ValueError(
            f"{len(ids)} blocks of the {name} rank were given where the tokens reach into block {last + 1} "
            "of the request"
        )
    # Of a long list only the part that is needed becomes numbers.
    return np.asarray(ids[first : last + 1], dtype=np.int64)[numbers - first]


def _by_length(lengths: Int64Array) -> list[tuple[int, slice | npt.NDArray[np.bool_]]]:
    """Return the lengths that occur, and which pieces have them."""
    if not len(lengths):
        return []
    least, most = int(lengths.min()), int(lengths.max())
    if least == most:
        return [(least, slice(None))]
    return [(length, lengths == length) for length in np.unique(lengths).tolist()]


def _in_window(
    windows: tuple[int, int], from_blocks: Int64Array, to_blocks: Int64Array
) -> npt.NDArray[np.bool_]:
    """Return which pieces are in blocks of the request on both sides."""
    kept = np.ones(len(from_blocks), dtype=np.bool_)
    for window, blocks in zip(windows, (from_blocks, to_blocks), strict=True):
        if window:
            kept &= blocks != OUT_OF_WINDOW
    return kept


def _check_given_away(
    target: Shard, pieces: Pieces, tokens: range, windows: tuple[int, int], lost: npt.NDArray[np.bool_]
) -> None:
    """Raise ``ValueError`` if pieces that only the target still has a block for are in the window."""
    needed = tokens.stop - min(window for window in windows if window)
    last = tokens_at(target, pieces.target_places + pieces.lengths - 1)
    if bool((last[lost] >= needed).any()):
        raise ValueError(
            f"the prefill rank has given away blocks of tokens from {needed} on, which the decode rank needs"
        )


def _check_blocks(name: str, blocks: Int64Array, block_count: int) -> None:
    # A block id comes over the wire: out of range it would read or write memory that is not KV cache.
    if not len(blocks):
        return
    low, high = int(blocks.min()), int(blocks.max())
    if low < 0 or high >= block_count:
        wrong = low if low < 0 else high
        raise ValueError(f"block {wrong} is not one of the {block_count} blocks of the {name} rank")


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
    step = int(runs.lengths[0]) if len(runs) else 0
    if len(source) > 1 and len(runs) and bool((runs.lengths == step).all()):
        breaks = (source[:-1] + step != source[1:]) | (target[:-1] + step != target[1:])
        starts = group_starts(breaks)
        layers = np.diff(starts, append=len(source))
        source, target = source[starts], target[starts]
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
