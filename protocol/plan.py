"""Who copies what from whom, worked out from two directories and nothing else.

Both engines hold both directories, so both come to the same plan without a word between them. What follows
from the layouts alone is a ``PairPlan``, made when the engines first meet. What differs from request to
request is a ``RequestPlan``: whether anything is left to move, and which of several replicas serves whom.

Prefill ranks that hold the same layers and heads (MLA, tensor parallelism above the number of KV heads) form
a replica group. Groups never overlap and together hold everything; a leg is the intersection of one group
with one decode rank, and the group's member that serves it turns with a hash of the transfer id.
"""

import hashlib
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from .pairing import LayoutMismatch as LayoutMismatch
from .pairing import check_pair
from .shards import Directory, RankEntry


class Leg(msgspec.Struct, frozen=True, kw_only=True):
    """One prefill rank and one decode rank with bytes to move between them: some layers of some heads."""

    prefill_rank: int
    decode_rank: int
    first_kv_head: int
    """First head of the leg, numbered in the whole model."""
    head_count: int
    layers: tuple[int, ...]
    """Layer numbers in the whole model, ascending."""


class Reader(msgspec.Struct, frozen=True, kw_only=True):
    """What one decode rank takes from one replica group."""

    decode_rank: int
    first_kv_head: int
    head_count: int
    layers: tuple[int, ...]


class ReplicaGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Prefill ranks that hold the same layers and heads, and the decode ranks that need some of them."""

    prefill_ranks: tuple[int, ...]
    readers: tuple[Reader, ...]


@dataclass(frozen=True, eq=False)
class RequestPlan:
    """Who does what for one transfer."""

    legs: tuple[Leg, ...]
    releasers: Mapping[int, int]
    """For each prefill rank that nobody reads: the decode rank whose DONE releases it."""
    _readers: Mapping[int, frozenset[int]]
    _writers: Mapping[int, frozenset[int]]

    def readers(self, prefill_rank: int) -> frozenset[int]:
        """Return the decode ranks whose DONE this prefill rank must hear: its readers, else its releaser."""
        return self._readers[prefill_rank]

    def writers(self, decode_rank: int) -> frozenset[int]:
        """Return the prefill ranks whose DONE this decode rank must hear in a push: its writers."""
        return self._writers[decode_rank]

    def legs_of_prefill(self, prefill_rank: int) -> tuple[Leg, ...]:
        return tuple(leg for leg in self.legs if leg.prefill_rank == prefill_rank)

    def legs_of_decode(self, decode_rank: int) -> tuple[Leg, ...]:
        return tuple(leg for leg in self.legs if leg.decode_rank == decode_rank)

    def releases_of(self, decode_rank: int) -> tuple[int, ...]:
        """Return the prefill ranks that this decode rank releases without having read them."""
        return tuple(rank for rank, releaser in self.releasers.items() if releaser == decode_rank)


@dataclass(frozen=True, eq=False)
class PairPlan:
    """What the two layouts alone decide, for all transfers between two engines."""

    prefill_ranks: tuple[int, ...]
    decode_ranks: tuple[int, ...]
    block_size: int
    """Tokens in a block, on both sides."""
    groups: tuple[ReplicaGroup, ...]
    turns: int
    """After so many turns of the replicas the plans repeat: their number bounds the cache."""
    _plans: dict[tuple[int, bool], RequestPlan] = field(default_factory=dict, repr=False)

    def request(self, transfer_id: str, prompt_tokens: int, cached_tokens: int) -> RequestPlan:
        """Return the plan of one transfer.

        ``cached_tokens`` of the prompt are on the decode side already: a whole number of its blocks.
        """
        if prompt_tokens < 0 or cached_tokens < 0 or cached_tokens % self.block_size:
            raise ValueError(
                f"{cached_tokens} cached tokens of {prompt_tokens} are not a whole number of blocks of "
                f"{self.block_size} tokens"
            )
        turn = _turn(transfer_id, self.turns)
        key = (turn, cached_tokens < prompt_tokens)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = _request_plan(self, *key)
        return plan


def plan_pair(prefill: Directory, decode: Directory) -> PairPlan:
    """Return the plan of two engines; raise ``LayoutMismatch`` if they cannot work together."""
    check_pair(prefill, decode)
    members: dict[tuple[tuple[int, ...], int, int], list[int]] = defaultdict(list)
    for entry in sorted(prefill.ranks, key=lambda entry: entry.rank):
        shard = entry.shard
        members[shard.layers, shard.first_kv_head, shard.kv_head_count].append(entry.rank)
    decode_entries = sorted(decode.ranks, key=lambda entry: entry.rank)
    groups = tuple(
        ReplicaGroup(prefill_ranks=tuple(ranks), readers=_readers_of(*held, decode_entries))
        for held, ranks in members.items()
    )
    decode_ranks = tuple(entry.rank for entry in decode_entries)
    return PairPlan(
        prefill_ranks=tuple(sorted(entry.rank for entry in prefill.ranks)),
        decode_ranks=decode_ranks,
        block_size=decode.ranks[0].shard.block_size,
        groups=groups,
        turns=math.lcm(len(decode_ranks), *(len(group.prefill_ranks) for group in groups)),
    )


def _readers_of(
    layers: tuple[int, ...], first_kv_head: int, head_count: int, decode_entries: list[RankEntry]
) -> tuple[Reader, ...]:
    found = []
    for entry in decode_entries:
        shard = entry.shard
        first = max(first_kv_head, shard.first_kv_head)
        end = min(first_kv_head + head_count, shard.first_kv_head + shard.kv_head_count)
        common = tuple(sorted(set(layers).intersection(shard.layers)))
        if first < end and common:
            found.append(
                Reader(decode_rank=entry.rank, first_kv_head=first, head_count=end - first, layers=common)
            )
    return tuple(found)


def _turn(transfer_id: str, turns: int) -> int:
    # Both engines must draw the same number, so not Python's own hash, which each process salts for itself.
    digest = hashlib.blake2b(transfer_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % turns


def _request_plan(pair: PairPlan, turn: int, moves: bool) -> RequestPlan:
    legs = tuple(_legs(pair.groups, turn)) if moves else ()
    readers: dict[int, set[int]] = {rank: set() for rank in pair.prefill_ranks}
    writers: dict[int, set[int]] = {rank: set() for rank in pair.decode_ranks}
    for leg in legs:
        readers[leg.prefill_rank].add(leg.decode_rank)
        writers[leg.decode_rank].add(leg.prefill_rank)
    unread = [rank for rank in pair.prefill_ranks if not readers[rank]]
    releasers = {
        rank: pair.decode_ranks[(turn + place) % len(pair.decode_ranks)] for place, rank in enumerate(unread)
    }
    for rank, releaser in releasers.items():
        readers[rank].add(releaser)
    return RequestPlan(
        legs=legs,
        releasers=releasers,
        _readers={rank: frozenset(peers) for rank, peers in readers.items()},
        _writers={rank: frozenset(peers) for rank, peers in writers.items()},
    )


def _legs(groups: tuple[ReplicaGroup, ...], turn: int) -> list[Leg]:
    """Deal the readers of each group out over its replicas, the first one moved on by ``turn``."""
    return [
        Leg(
            prefill_rank=group.prefill_ranks[(turn + place) % len(group.prefill_ranks)],
            decode_rank=reader.decode_rank,
            first_kv_head=reader.first_kv_head,
            head_count=reader.head_count,
            layers=reader.layers,
        )
        for group in groups
        for place, reader in enumerate(group.readers)
    ]
