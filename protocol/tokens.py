"""Which tokens of a request a shard holds, and where.

A rank holds the tokens with ``(token // interleave) % cp_size == cp_rank``. In order, they fill its blocks:
the j-th of them lies in the block that the request's block list names at ``j // block_size``, in slot
``j % block_size``. Block lists are the same on all ranks of an engine, so one block id stands for
``block_size * cp_size`` tokens of the request.

Nothing here loops over tokens or blocks: runs of tokens are columns of numbers.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .shards import Shard

Int64Array = npt.NDArray[np.int64]
Groups = tuple[int, int]
"""A layer's KV cache group on the source's and on the target's side."""


class Pieces(NamedTuple):
    """Tokens that two shards have in common, cut so that each piece stays in one block on both sides.

    Columns with one entry for each piece, by ascending token. Places count a rank's own slots from the
    request's first token on: block ``place // block_size`` of its list, slot ``place % block_size``.
    """

    source_places: Int64Array
    target_places: Int64Array
    lengths: Int64Array
    """In tokens, and so in slots."""


def blocks_needed(shard: Shard, tokens: int, group: int = 0) -> int:
    """Return how many block ids of a KV cache group a request of so many tokens has on each rank."""
    return -(-tokens // (shard.group(group).block_size * shard.cp_size))


def places_of(shard: Shard, tokens: Int64Array) -> Int64Array:
    """Return the places of tokens that the shard holds."""
    if shard.cp_size == 1:
        return tokens
    stride = shard.interleave * shard.cp_size
    return tokens // stride * shard.interleave + tokens % shard.interleave


def tokens_at(shard: Shard, places: Int64Array) -> Int64Array:
    """Return the tokens that a shard holds at these places."""
    if shard.cp_size == 1:
        return places
    interleave = shard.interleave
    held = places // interleave * (interleave * shard.cp_size) + shard.cp_rank * interleave
    return held + places % interleave


def holds_any(shard: Shard, tokens: range) -> bool:
    """Return whether the shard holds a token of the range (step 1)."""
    return bool(tokens) and (shard.cp_size == 1 or bool(len(common_runs(shard, shard, tokens)[0])))


def common_runs(source: Shard, target: Shard, tokens: range) -> tuple[Int64Array, Int64Array]:
    """Return the tokens of a range (step 1) that both shards hold: first tokens and lengths, ascending."""
    if not tokens:
        nothing = np.empty(0, dtype=np.int64)
        return nothing, nothing
    few, many = sorted((source, target), key=_stride, reverse=True)
    starts, ends = _held_runs(few, _column(tokens.start), _column(tokens.stop))
    starts, ends = _held_runs(many, starts, ends)
    return starts, ends - starts


def common_pieces(source: Shard, target: Shard, tokens: range, groups: Groups = (0, 0)) -> Pieces:
    """Return where both shards hold the tokens of a range (step 1) that they have in common."""
    starts, lengths = common_runs(source, target, tokens)
    pieces = _merged(Pieces(places_of(source, starts), places_of(target, starts), lengths))
    cuts = _cut(pieces.source_places, pieces.lengths, source.group(groups[0]).block_size)
    pieces = _at(pieces, *cuts)
    if same_slabs(source, target, groups):
        return pieces  # a cut of one side is one of the other
    cuts = _cut(pieces.target_places, pieces.lengths, target.group(groups[1]).block_size)
    return _at(pieces, *cuts)


def same_slabs(source: Shard, target: Shard, groups: Groups = (0, 0)) -> bool:
    """Whether a block of one side holds the same tokens in the same slots as one block of the other.

    That is so where both split the tokens alike, and where every block holds consecutive tokens.
    """
    sizes = [shard.group(group).block_size for shard, group in zip((source, target), groups, strict=True)]
    if sizes[0] != sizes[1]:
        return False
    alike = (source.cp_size, source.interleave) == (target.cp_size, target.interleave)
    return alike or (_consecutive(source, sizes[0]) and _consecutive(target, sizes[1]))


def _consecutive(shard: Shard, block_size: int) -> bool:
    return shard.cp_size == 1 or shard.interleave == block_size


def _stride(shard: Shard) -> int:
    """Return the tokens between the starts of two runs that the rank holds; 0 if it holds all."""
    return 0 if shard.cp_size == 1 else shard.interleave * shard.cp_size


def _column(value: int) -> Int64Array:
    return np.array([value], dtype=np.int64)


def _held_runs(shard: Shard, starts: Int64Array, ends: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return the parts of the runs ``[start, end)`` that a shard holds."""
    stride = _stride(shard)
    if not stride:
        return starts, ends
    first_held = shard.cp_rank * shard.interleave
    # The shard's own runs are numbered; those that reach into [start, end) are low, low + 1, ..., high - 1.
    low = (starts - first_held - shard.interleave) // stride + 1
    high = -((first_held - ends) // stride)
    counts = np.maximum(high - low, 0)
    owner, number = _numbered(counts)
    held = first_held + (low[owner] + number) * stride
    return np.maximum(starts[owner], held), np.minimum(ends[owner], held + shard.interleave)


def _numbered(counts: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return, for ``counts[i]`` entries of each i, which i an entry is of and its number there."""
    owner = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    return owner, np.arange(len(owner), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)


def _merged(pieces: Pieces) -> Pieces:
    """Join pieces that follow each other on both sides: one run of slots, whatever the interleaves."""
    source, target, lengths = pieces
    if len(lengths) < 2:
        return pieces
    breaks = (source[:-1] + lengths[:-1] != source[1:]) | (target[:-1] + lengths[:-1] != target[1:])
    starts = group_starts(breaks)
    return Pieces(source[starts], target[starts], np.add.reduceat(lengths, starts))


def group_starts(breaks: npt.NDArray[np.bool_]) -> Int64Array:
    """Return the numbers of the entries that begin a group: the first one, and those with a break before
    them. ``breaks[i]`` is between the entries i and i + 1.
    """
    return np.concatenate([np.zeros(1, dtype=np.int64), np.flatnonzero(breaks) + 1])


def _cut(
    places: Int64Array, lengths: Int64Array, block_size: int
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Cut runs of places at the ends of blocks: which run each part is of, its offset there, its length."""
    first_block = places // block_size
    owner, number = _numbered((places + lengths - 1) // block_size - first_block + 1)
    low = (first_block[owner] + number) * block_size - places[owner]
    offsets = np.maximum(low, 0)
    return owner, offsets, np.minimum(low + block_size, lengths[owner]) - offsets


def _at(pieces: Pieces, owner: Int64Array, offsets: Int64Array, lengths: Int64Array) -> Pieces:
    return Pieces(pieces.source_places[owner] + offsets, pieces.target_places[owner] + offsets, lengths)
