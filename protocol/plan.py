"""Who copies what from whom, worked out from two directories and nothing else.

Both engines hold both directories, so both come to the same plan without a word between them. What follows
from the layouts alone is a ``PairPlan``, made when the engines first meet. What differs from request to
request is a ``RequestPlan``: which legs have tokens to move, and which of several replicas serves whom.

Prefill ranks that hold the same layers, heads and share of the tokens are replicas. A decode rank reads what
it needs of such a holding from one of them: the readers of a holding are dealt out over its replicas, and the
deal moves on with a hash of the transfer id.

A rank asks for its own part only, so a plan works out no more than that.
"""

import hashlib
import heapq
import math
from collections import OrderedDict
from collections.abc import Mapping
from functools import cached_property

import msgspec

from .holdings import Holding, holdings_of
from .pairing import LayoutMismatch as LayoutMismatch
from .pairing import check_pair
from .shards import Directory, Shard
from .shares import Shares, Window, split_of

MAX_REQUEST_PLANS = 1024
"""How many request plans a pair keeps; the one longest out of use goes first."""


class Leg(msgspec.Struct, frozen=True, kw_only=True):
    """One prefill rank and one decode rank with bytes to move between them: some layers of some heads, and
    of the request's tokens those that both hold.
    """

    prefill_rank: int
    decode_rank: int
    first_kv_head: int
    """First head of the leg, numbered in the whole model."""
    head_count: int
    layers: tuple[int, ...]
    """Layer numbers in the whole model, ascending."""


class Overlap(msgspec.Struct, frozen=True):
    """What a decode rank takes from a holding, if the request has tokens of both their shares."""

    holding: int
    """Place of the holding in ``PairPlan.holdings``."""
    decode_rank: int
    first_kv_head: int
    head_count: int
    layers: tuple[int, ...]
    prefill_cp_rank: int
    decode_cp_rank: int
    weight: int
    """Its part of a long prompt's bytes, in some unit."""


class Dealt(msgspec.Struct, frozen=True):
    """A reader of a holding."""

    overlap: Overlap
    replica: int
    """Which of the holding's ranks serves it, in turn 0."""


class PairPlan:
    """What the two layouts alone decide, for all transfers between two engines."""

    def __init__(self, prefill: Directory, decode: Directory) -> None:
        """Take two engines that ``check_pair`` has let pass."""
        self.prefill_ranks = tuple(sorted(entry.rank for entry in prefill.ranks))
        self.decode_ranks = tuple(sorted(entry.rank for entry in decode.ranks))
        self.holdings = holdings_of(prefill)
        """Of the prefill side."""
        self.decode_block_tokens = _block_tokens(decode.ranks[0].shard)
        """Tokens of a block id on the decode side: a cached prefix is a whole number of these."""
        self._shares = Shares(split_of(prefill.ranks[0].shard), split_of(decode.ranks[0].shard))
        self._holding_of = {rank: place for place, held in enumerate(self.holdings) for rank in held.ranks}
        self._decode_holdings = holdings_of(decode)
        self._decode_holding_of = {rank: held for held in self._decode_holdings for rank in held.ranks}
        self._prefill_place = {rank: place for place, rank in enumerate(self.prefill_ranks)}
        self._decode_place = {rank: place for place, rank in enumerate(self.decode_ranks)}
        self._turns = math.lcm(len(self.decode_ranks), *(len(held.ranks) for held in self.holdings))
        self._common_layers: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, ...]] = {}
        self._dealt: dict[int, dict[int, Dealt]] = {}
        self._met: dict[int, tuple[Overlap, ...]] = {}
        self._plans: OrderedDict[tuple[int, bytes | None], RequestPlan] = OrderedDict()

    @property
    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """Prefill ranks that hold the same, each rank once."""
        return tuple(held.ranks for held in self.holdings)

    def request(self, transfer_id: str, prompt_tokens: int, cached_tokens: int) -> "RequestPlan":
        """Return the plan of one transfer.

        ``cached_tokens`` of the prompt are on the decode side already. Raises ``ValueError`` if they are not
        a whole number of its blocks.
        """
        if prompt_tokens < 0 or cached_tokens < 0 or cached_tokens % self.decode_block_tokens:
            raise ValueError(
                f"{cached_tokens} cached tokens of {prompt_tokens} are not a whole number of blocks of "
                f"{self.decode_block_tokens} tokens"
            )
        tokens = range(cached_tokens, prompt_tokens)
        window = self._shares.window(tokens) if tokens else None
        key = (_turn(transfer_id, self._turns), None if window is None else window.name)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = RequestPlan(self, key[0], window)
            if len(self._plans) > MAX_REQUEST_PLANS:
                self._plans.popitem(last=False)
        else:
            self._plans.move_to_end(key)
        return plan

    # For the plans of requests

    def holding_of(self, prefill_rank: int) -> int:
        """Return the place of a prefill rank's holding."""
        return self._holding_of[prefill_rank]

    def met_by(self, decode_rank: int) -> tuple[Overlap, ...]:
        """Return what a decode rank takes from each holding that has something for it."""
        found = self._met.get(decode_rank)
        if found is None:
            held = self._decode_holding_of[decode_rank]
            overlaps = (self._overlap(place, decode_rank, held) for place in range(len(self.holdings)))
            found = self._met[decode_rank] = tuple(each for each in overlaps if each is not None)
        return found

    def dealt(self, holding: int) -> dict[int, Dealt]:
        """Return the readers of a holding by their ranks, dealt out over its replicas.

        The largest is dealt first, each to the replica with the least to do.
        """
        found = self._dealt.get(holding)
        if found is None:
            readers = [
                overlap
                for held in self._decode_holdings
                for rank in held.ranks
                if (overlap := self._overlap(holding, rank, held)) is not None
            ]
            readers.sort(key=lambda each: (-each.weight, each.decode_rank))
            load = [(0, number) for number in range(len(self.holdings[holding].ranks))]
            found = self._dealt[holding] = {
                each.decode_rank: Dealt(each, _deal(load, each.weight)) for each in readers
            }
        return found

    def served_by(self, overlap: Overlap, turn: int) -> int:
        """Return the replica that a decode rank reads a holding from."""
        ranks = self.holdings[overlap.holding].ranks
        if len(ranks) == 1:
            return ranks[0]
        return ranks[(self.dealt(overlap.holding)[overlap.decode_rank].replica + turn) % len(ranks)]

    def releaser(self, prefill_rank: int, turn: int) -> int:
        """Return the decode rank that releases a prefill rank if nobody reads it."""
        return self.decode_ranks[(self._prefill_place[prefill_rank] + turn) % len(self.decode_ranks)]

    def released_by(self, decode_rank: int, turn: int) -> tuple[int, ...]:
        """Return the prefill ranks that a decode rank releases if nobody reads them."""
        step = len(self.decode_ranks)
        return self.prefill_ranks[(self._decode_place[decode_rank] - turn) % step :: step]

    def _overlap(self, holding: int, decode_rank: int, held: Holding) -> Overlap | None:
        mine = self.holdings[holding]
        first, end = max(mine.heads.first, held.heads.first), min(mine.heads.end, held.heads.end)
        tokens = self._shares.count(mine.cp_rank, held.cp_rank)
        if first >= end or not tokens:
            return None
        layers = self._layers_of(mine, held)
        if not layers:
            return None
        return Overlap(
            holding=holding,
            decode_rank=decode_rank,
            first_kv_head=first,
            head_count=end - first,
            layers=layers,
            prefill_cp_rank=mine.cp_rank,
            decode_cp_rank=held.cp_rank,
            weight=(end - first) * len(layers) * tokens,
        )

    def _layers_of(self, one: Holding, other: Holding) -> tuple[int, ...]:
        key = (one.layers, other.layers)
        found = self._common_layers.get(key)
        if found is None:
            found = self._common_layers[key] = tuple(sorted(set(one.layers).intersection(other.layers)))
        return found


class RequestPlan:
    """Who does what for one transfer."""

    def __init__(self, pair: PairPlan, turn: int, window: Shares | Window | None) -> None:
        self._pair = pair
        self._turn = turn
        self._window = window
        self._of_prefill: dict[int, tuple[Leg, ...]] = {}
        self._of_decode: dict[int, tuple[Leg, ...]] = {}

    @cached_property
    def legs(self) -> tuple[Leg, ...]:
        """All legs with tokens to move, at most one for each prefill rank and decode rank."""
        return tuple(leg for rank in self._pair.decode_ranks for leg in self.legs_of_decode(rank))

    @cached_property
    def releasers(self) -> Mapping[int, int]:
        """For each prefill rank that nobody reads: the decode rank whose DONE releases it."""
        pair, turn = self._pair, self._turn
        return {
            rank: pair.releaser(rank, turn) for rank in pair.prefill_ranks if not self.legs_of_prefill(rank)
        }

    def readers(self, prefill_rank: int) -> frozenset[int]:
        """Return the decode ranks whose DONE this prefill rank must hear: its readers, else its releaser."""
        readers = frozenset(leg.decode_rank for leg in self.legs_of_prefill(prefill_rank))
        return readers or frozenset((self._pair.releaser(prefill_rank, self._turn),))

    def writers(self, decode_rank: int) -> frozenset[int]:
        """Return the prefill ranks whose DONE this decode rank must hear in a push: its writers."""
        return frozenset(leg.prefill_rank for leg in self.legs_of_decode(decode_rank))

    def legs_of_prefill(self, prefill_rank: int) -> tuple[Leg, ...]:
        """Return the legs of a prefill rank, by decode rank."""
        found = self._of_prefill.get(prefill_rank)
        if found is None:
            pair = self._pair
            legs = [
                _leg(prefill_rank, reader.overlap)
                for reader in pair.dealt(pair.holding_of(prefill_rank)).values()
                if pair.served_by(reader.overlap, self._turn) == prefill_rank
                and self._has_tokens(reader.overlap)
            ]
            legs.sort(key=lambda leg: leg.decode_rank)
            found = self._of_prefill[prefill_rank] = tuple(legs)
        return found

    def legs_of_decode(self, decode_rank: int) -> tuple[Leg, ...]:
        """Return the legs of a decode rank, by prefill rank."""
        found = self._of_decode.get(decode_rank)
        if found is None:
            pair = self._pair
            legs = [
                _leg(pair.served_by(overlap, self._turn), overlap)
                for overlap in pair.met_by(decode_rank)
                if self._has_tokens(overlap)
            ]
            legs.sort(key=lambda leg: leg.prefill_rank)
            found = self._of_decode[decode_rank] = tuple(legs)
        return found

    def releases_of(self, decode_rank: int) -> tuple[int, ...]:
        """Return the prefill ranks that this decode rank releases without having read them."""
        named = self._pair.released_by(decode_rank, self._turn)
        return tuple(rank for rank in named if not self.legs_of_prefill(rank))

    def _has_tokens(self, overlap: Overlap) -> bool:
        if self._window is None:
            return False
        return self._window.common(overlap.prefill_cp_rank, overlap.decode_cp_rank)


def plan_pair(prefill: Directory, decode: Directory) -> PairPlan:
    """Return the plan of two engines; raise ``LayoutMismatch`` if they cannot work together."""
    check_pair(prefill, decode)
    return PairPlan(prefill, decode)


def _block_tokens(shard: Shard) -> int:
    sizes = [group.block_size for group in shard.groups] or [shard.block_size]
    return math.gcd(*sizes) * shard.cp_size


def _leg(prefill_rank: int, overlap: Overlap) -> Leg:
    return Leg(
        prefill_rank=prefill_rank,
        decode_rank=overlap.decode_rank,
        first_kv_head=overlap.first_kv_head,
        head_count=overlap.head_count,
        layers=overlap.layers,
    )


def _deal(load: list[tuple[int, int]], weight: int) -> int:
    """Give a weight to the number with the least load in a heap of (load, number); return the number."""
    least, number = load[0]
    heapq.heapreplace(load, (least + weight, number))
    return number


def _turn(transfer_id: str, turns: int) -> int:
    # Both engines must draw the same number, so not Python's own hash, which each process salts for itself.
    digest = hashlib.blake2b(transfer_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % turns
