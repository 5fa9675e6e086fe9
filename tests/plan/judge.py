"""Runs a plan with memory copies and holds what came of it against the definition, byte for byte.

Nothing here asks the planner whether it was right: the decode side's memory, how often each byte was written
and where reads came from are compared with what ``definition.py`` demands.
"""

import ctypes
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from dfirst.protocol import copies as copying
from dfirst.protocol.copies import Copies
from dfirst.protocol.plan import Leg, PairPlan, RequestPlan, plan_pair
from dfirst.protocol.shards import Directory, Shard

from .explain import first_of
from .memory import BEHIND, UNTOUCHED, Bytes, KnownValues, RankMemory
from .request import (
    GONE,
    Engine,
    Request,
    Side,
    build,
    decode_engine,
    directory,
    places,
    prefill_engine,
    write_tokens,
)

NOT_NEEDED, NEEDED, MAY_COME_ALONG, OUT_OF_WINDOW = 0, 1, 2, 3


class Wrong(AssertionError):
    """The bytes, or who waits for whom, are not what the definition demands."""


@dataclass
class Move:
    """One transfer at work: both engines' memory, the plan, and what was written how often."""

    prefill: Engine
    decode: Engine
    request: Request
    values: KnownValues
    pair: PairPlan
    plan: RequestPlan
    prefill_shards: dict[int, Shard]
    decode_shards: dict[int, Shard]
    writes: dict[int, Bytes] = field(default_factory=dict)
    """For each decode rank, how often each byte of its memory was written."""

    def perform(self, moved: Copies, prefill_rank: int, decode_rank: int) -> int:
        """Carry the copies out; return how many bytes moved."""
        source, target = self.prefill.ranks[prefill_rank], self.decode.ranks[decode_rank]
        read_from, write_to, writes = source.base, target.base, self.writes[decode_rank]
        sources, targets = moved.source_addresses - read_from, moved.target_addresses - write_to
        _check_inside(source, sources, moved.lengths, f"prefill rank {prefill_rank}")
        _check_inside(target, targets, moved.lengths, f"decode rank {decode_rank}")
        for at, to, length in zip(sources.tolist(), targets.tolist(), moved.lengths.tolist(), strict=True):
            ctypes.memmove(write_to + to, read_from + at, length)
            writes[to : to + length] += 1
        return int(moved.lengths.sum())


def _check_inside(memory: RankMemory, starts: np.ndarray, lengths: np.ndarray, whose: str) -> None:
    if len(starts) and (
        starts.min() < 0 or (starts + lengths).max() > len(memory.arena) or lengths.min() < 1
    ):
        raise Wrong(f"a copy goes outside the memory of {whose}")


def begin(prefill: Side, decode: Side, request: Request, computed: bool = True) -> Move:
    """Make both engines and the plan; ``computed``: the prefill side holds the whole prompt already.

    Raises ``LayoutMismatch`` if the planner refuses the pair.
    """
    sources, targets = prefill_engine(prefill, request), decode_engine(decode)
    values = KnownValues(prefill.parallel.heads, request.tokens, prefill.form.parts)
    if computed:
        write_tokens(sources, request.prefill_blocks, values, 0, request.tokens)
    ours, theirs = directory(sources, "P"), directory(targets, "D")
    pair = plan_pair(ours, theirs)
    plan = pair.request(request.transfer_id, request.tokens, request.cached)
    _check_both_sides_agree(ours, theirs, request, plan)
    return Move(
        prefill=sources,
        decode=targets,
        request=request,
        values=values,
        pair=pair,
        plan=plan,
        prefill_shards={entry.rank: entry.shard for entry in ours.ranks},
        decode_shards={entry.rank: entry.shard for entry in theirs.ranks},
        writes={memory.rank: np.zeros(len(memory.arena), dtype=np.uint8) for memory in targets.ranks},
    )


def _check_both_sides_agree(ours: Directory, theirs: Directory, request: Request, plan: RequestPlan) -> None:
    """The other side has the same directories from the wire and makes its own plan of them."""
    heard = [msgspec.msgpack.decode(msgspec.msgpack.encode(one), type=Directory) for one in (ours, theirs)]
    other = plan_pair(*heard).request(request.transfer_id, request.tokens, request.cached)
    if other.legs != plan.legs or dict(other.releasers) != dict(plan.releasers):
        raise Wrong("the two sides come to different plans")


def pull(prefill: Side, decode: Side, request: Request) -> Move:
    """Let every decode rank read its legs, and check everything."""
    move = begin(prefill, decode, request)
    before = [memory.arena.copy() for memory in move.prefill.ranks]
    carried: dict[tuple[int, int], int] = {}
    for memory in move.decode.ranks:
        for leg in move.plan.legs_of_decode(memory.rank):
            moved = leg_copies(move, leg, request.cached, request.tokens)
            carried[leg.prefill_rank, leg.decode_rank] = move.perform(moved, leg.prefill_rank, memory.rank)
    for memory, unchanged in zip(move.prefill.ranks, before, strict=True):
        if not np.array_equal(memory.arena, unchanged):
            raise Wrong(f"a pull changed the memory of prefill rank {memory.rank}")
    check_arrived(move)
    check_words(move, carried)
    return move


def push(prefill: Side, decode: Side, request: Request, chunk_ends: Sequence[int]) -> Move:
    """Let every prefill rank write its legs, layer by layer and chunk by chunk while the prompt is computed.

    ``chunk_ends``: tokens computed after each chunk, ascending, on whole virtual blocks of the prefill side
    but for the last, which is the whole prompt. What is read too early is a pattern, and so shows.
    """
    move = begin(prefill, decode, request, computed=False)
    carried: dict[tuple[int, int], int] = defaultdict(int)
    first = 0
    for end in chunk_ends:
        for layer in range(prefill.parallel.layer_count):
            write_tokens(move.prefill, request.prefill_blocks, move.values, first, end, frozenset({layer}))
            for memory in move.prefill.ranks:
                for leg in move.plan.legs_of_prefill(memory.rank):
                    if layer in leg.layers:
                        moved = leg_copies(move, leg, max(first, request.cached), end, [layer])
                        key = (memory.rank, leg.decode_rank)
                        carried[key] += move.perform(moved, *key)
        first = end
    check_arrived(move)
    check_words(move, carried)
    return move


def leg_copies(move: Move, leg: Leg, first: int, end: int, layers: Sequence[int] | None = None) -> Copies:
    """Ask the planner for the copies of a leg."""
    return copying.copies(
        leg,
        move.prefill_shards[leg.prefill_rank],
        move.decode_shards[leg.decode_rank],
        dict(enumerate(move.request.prefill_blocks)),
        dict(enumerate(move.request.decode_blocks)),
        range(first, max(first, end)),
        layers,
    )


# What the definition demands


def check_arrived(move: Move, *more: Request) -> None:
    """Every needed byte has its known value and was written once; no other byte of that side changed.

    ``more``: other requests between the same engines, whose values are those of the same tokens.
    """
    marks = check_memory(move.decode, move.values, move.request, *more)
    for memory, mark in zip(move.decode.ranks, marks.ranks, strict=True):
        wrong = (move.writes[memory.rank] != mark.arena) & (mark.arena <= NEEDED)
        if wrong.any():
            counts = sorted(set(move.writes[memory.rank][wrong].tolist()))
            raise Wrong(f"decode rank {memory.rank}: {int(wrong.sum())} bytes were written {counts} times")


def check_memory(decode: Engine, values: KnownValues, *requests: Request) -> Engine:
    """Every byte of a decode engine is what it should be; return what each byte was there for."""
    wanted, marks = decode_engine(decode.side), build(decode.side, NOT_NEEDED)
    for request in requests:
        write_tokens(wanted, request.decode_blocks, values, request.cached, request.tokens)
        for mark in marks.ranks:
            mark_needed(decode.side, request, mark)
    for memory, want, mark in zip(decode.ranks, wanted.ranks, marks.ranks, strict=True):
        untouched = memory.arena == UNTOUCHED
        bad = memory.arena != want.arena
        bad &= ~((mark.arena == MAY_COME_ALONG) & (untouched | (memory.arena == BEHIND)))
        bad &= ~((mark.arena == OUT_OF_WINDOW) & untouched)
        if bad.any():
            raise Wrong(f"decode rank {memory.rank}: {first_of(memory, want, bad)}")
    return marks


def mark_needed(side: Side, request: Request, mark: RankMemory) -> None:
    """Mark the bytes that a decode rank needs, and those that may come along: behind the prompt's end in its
    last block, and before the window in blocks that are still there.
    """
    parallel = side.parallel
    for tensor in mark.tensors:
        group = parallel.groups[tensor.group]
        table = np.asarray(request.decode_blocks[tensor.group], dtype=np.int64)
        tokens, entries, slots = places(parallel, tensor.group, mark.rank, request.cached, request.tokens)
        if not len(entries):
            continue
        needed = np.array([group.needs(token, request.tokens) for token in tokens.tolist()])
        if (table[entries[needed]] == GONE).any() and group.window:
            raise Wrong("this request has no block for what it needs")
        there = ~needed & (table[entries] != GONE)
        tensor.fill(table[entries[needed]], slots[needed], NEEDED)
        tensor.fill(table[entries[there]], slots[there], OUT_OF_WINDOW)
        end = len(table) * parallel.virtual_block(group)
        _, behind, free = places(parallel, tensor.group, mark.rank, request.tokens, end)
        in_last = behind == entries[-1]
        tensor.fill(table[behind[in_last]], free[in_last], MAY_COME_ALONG)


def check_words(move: Move, carried: dict[tuple[int, int], int]) -> None:
    """Who waits for whose DONE is who moved something; every prefill rank is released, and once."""
    plan, request = move.plan, move.request
    # Whom to wait for is settled without a look at windows: a leg may then have nothing left to move.
    windows = any(group.window for group in move.decode.side.parallel.groups)
    for leg in plan.legs:
        if not windows and not carried.get((leg.prefill_rank, leg.decode_rank)):
            raise Wrong(f"the leg from {leg.prefill_rank} to {leg.decode_rank} moves nothing")
    if len(plan.legs) != len({(leg.prefill_rank, leg.decode_rank) for leg in plan.legs}):
        raise Wrong("two legs have the same two ranks")
    words: dict[int, list[int]] = defaultdict(list)
    for memory in move.decode.ranks:
        decode_rank = memory.rank
        read = {prefill_rank for prefill_rank, reader in carried if reader == decode_rank}
        needs = any(
            len(places(move.decode.side.parallel, group, decode_rank, request.cached, request.tokens)[0])
            for group in {tensor.group for tensor in memory.tensors}
        )
        if bool(read) != needs or plan.writers(decode_rank) != read:
            raise Wrong(f"decode rank {decode_rank} waits for {plan.writers(decode_rank)}, got from {read}")
        for prefill_rank in (*read, *plan.releases_of(decode_rank)):
            words[prefill_rank].append(decode_rank)
    for memory in move.prefill.ranks:
        heard, expected = words[memory.rank], plan.readers(memory.rank)
        if not heard or len(heard) != len(set(heard)) or set(heard) != expected:
            raise Wrong(f"prefill rank {memory.rank} waits for {set(expected)} and hears {heard}")
