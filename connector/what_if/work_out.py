"""From the question to the answer, by the very plan that running engines follow.

The memory is made up: every layer is one region, its blocks one after the other from address 0, and a request
has every second block, so that no run of bytes reaches from one block into the next.
"""

import random
from collections import defaultdict
from collections.abc import Iterable
from functools import partial

import msgspec
import numpy as np
from dfirst.protocol.copies import Copies, copies
from dfirst.protocol.modes import BLOCKWISE
from dfirst.protocol.parallel import RankPlace, places
from dfirst.protocol.plan import LayoutMismatch, Leg, PairPlan, RequestPlan, plan_pair
from dfirst.protocol.shards import Directory, RankEntry, Region, Shard
from dfirst.protocol.tokens import blocks_needed, common_runs

from .answer import Copy, LegAnswer, LoadAnswer, PlanAnswer, Range, RankAnswer, SideAnswer
from .question import EngineQuestion, Question

SEED = 1
"""Of the random transfer ids: the same question has the same answer."""
MAX_COPIES, MAX_LISTED = 2**27, 2**22
"""Of a layer, over all legs: to count that many takes some ten seconds, to list so many some gigabytes."""


class WhatIf:
    """One question worked out. Raises ``ValueError`` in one sentence for values that make no sense."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.prefill = _Engine("prefill", question, question.prefill)
        self.decode = _Engine("decode", question, question.decode)
        self._copied = 0

    def answer(self, *, with_copies: bool) -> PlanAnswer:
        """``with_copies``: whether every copy is listed, or only counted."""
        question = self.question
        try:
            pair = plan_pair(self.prefill.directory, self.decode.directory)
        except LayoutMismatch as mismatch:
            return PlanAnswer(refusal=str(mismatch))
        plan = pair.request(question.transfer_id, question.prompt_tokens, question.cached_tokens)
        legs = [
            self._leg(leg, with_copies=with_copies)
            for leg in sorted(plan.legs, key=lambda leg: (leg.prefill_rank, leg.decode_rank))
        ]
        return PlanAnswer(
            mode=question.mode,
            convention=question.prefill.sizes.convention,
            transfer_id=question.transfer_id,
            layers=question.model.layers,
            prompt_tokens=question.prompt_tokens,
            cached_tokens=question.cached_tokens,
            bytes=sum(leg.bytes for leg in legs),
            copies=sum(leg.copies for leg in legs),
            prefill=self._prefill_side(plan, legs),
            decode=self._decode_side(plan, legs),
            legs=legs,
            load=self._load(pair) if question.transfers else None,
        )

    def _leg(self, leg: Leg, *, with_copies: bool) -> LegAnswer:
        source, target = self._shards(leg)
        moved = self._copies(leg)
        self._bound(moved, MAX_LISTED if with_copies else MAX_COPIES)
        ranges = _ranges(source, target, self._wanted())
        return LegAnswer(
            prefill_rank=leg.prefill_rank,
            decode_rank=leg.decode_rank,
            layers=list(leg.layers),
            heads=list(range(leg.first_kv_head, leg.first_kv_head + leg.head_count)),
            tokens=sum(end - first for first, end in ranges),
            token_ranges=ranges,
            bytes=moved.bytes * len(leg.layers),
            copies=len(moved) * len(leg.layers),
            copies_of_a_layer=_listed(moved, source, target) if with_copies else [],
        )

    def _wanted(self) -> range:
        return range(self.question.cached_tokens, self.question.prompt_tokens)

    def _shards(self, leg: Leg) -> tuple[Shard, Shard]:
        return self.prefill.shards[leg.prefill_rank], self.decode.shards[leg.decode_rank]

    def _copies(self, leg: Leg) -> Copies:
        """The copies of one layer: they are the same in all, and in every transfer that has this leg."""
        source, target = self._shards(leg)
        return copies(
            leg,
            source,
            target,
            self.prefill.block_ids,
            self.decode.block_ids,
            self._wanted(),
            layers=leg.layers[:1],
        )

    def _bound(self, moved: Copies, most: int) -> None:
        self._copied += len(moved)
        if self._copied > most:
            raise ValueError(
                f"--tokens is {self.question.prompt_tokens}, which takes more than {most} copies of a layer "
                "here, too many to work out" + (" with --json" if most == MAX_LISTED else "") + "; give fewer"
            )

    def _prefill_side(self, plan: RequestPlan, legs: list[LegAnswer]) -> SideAnswer:
        owns = self.question.mode == BLOCKWISE
        by_rank: dict[int, list[LegAnswer]] = defaultdict(list)
        for leg in legs:
            by_rank[leg.prefill_rank].append(leg)
        return self.prefill.side(
            [
                self.prefill.rank(
                    place,
                    by_rank,
                    peers={leg.decode_rank for leg in by_rank[place.rank]},
                    waits_for=plan.readers(place.rank) if owns else (),
                )
                for place in self.prefill.places
            ]
        )

    def _decode_side(self, plan: RequestPlan, legs: list[LegAnswer]) -> SideAnswer:
        owns = self.question.mode != BLOCKWISE
        by_rank: dict[int, list[LegAnswer]] = defaultdict(list)
        for leg in legs:
            by_rank[leg.decode_rank].append(leg)
        return self.decode.side(
            [
                self.decode.rank(
                    place,
                    by_rank,
                    peers={leg.prefill_rank for leg in by_rank[place.rank]},
                    waits_for=plan.writers(place.rank) if owns else (),
                    releases=() if owns else plan.releases_of(place.rank),
                )
                for place in self.decode.places
            ]
        )

    def _load(self, pair: PairPlan) -> LoadAnswer:
        draw = random.Random(SEED)
        question = self.question
        sent = dict.fromkeys((place.rank for place in self.prefill.places), 0)
        moved: dict[Leg, int] = {}
        for _ in range(question.transfers):
            name = draw.randbytes(16).hex()
            plan = pair.request(name, question.prompt_tokens, question.cached_tokens)
            for leg in plan.legs:
                if leg not in moved:
                    moved[leg] = self._copies(leg).bytes * len(leg.layers)
                sent[leg.prefill_rank] += moved[leg]
        return LoadAnswer(
            transfers=question.transfers,
            bytes=list(sent.values()),
            load=[_relative(sent, rank, self.prefill.replicas[rank]) for rank in sent],
        )


class _Engine:
    """One side of the question: its ranks, what they hold, and a directory as a real engine publishes it."""

    def __init__(self, name: str, question: Question, asked: EngineQuestion) -> None:
        self._question = question
        self._asked = asked
        model = question.model
        try:
            self.places = places(asked.sizes, model.kv_heads, model.layers, asked.layer_split)
        except ValueError as error:
            raise ValueError(f"--{name}: {error}") from error
        self.shards = {place.rank: self._shard(place) for place in self.places}
        some_shard = self.shards[0]
        self.block_ids = 2 * np.arange(blocks_needed(some_shard, question.prompt_tokens), dtype=np.int64)
        self.region = some_shard.regions[0]
        self._held: dict[int, list[Range]] = {}
        alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for place in self.places:
            alike[place.first_layer, place.layer_count, place.first_kv_head, place.cp_rank].append(place.rank)
        self.replicas = {rank: ranks for ranks in alike.values() for rank in ranks}
        self.layout = f"{asked.sizes}, {model}, block size {asked.block_tokens}"
        self.directory = Directory(
            engine_id=name[0].upper(),
            model=f"{model} of {model.layers} layers",
            layout=self.layout,
            ranks=tuple(
                RankEntry(rank=rank, host=name, port=0, incarnation="", data_address="", shard=shard)
                for rank, shard in self.shards.items()
            ),
        )

    def side(self, ranks: list[RankAnswer]) -> SideAnswer:
        return SideAnswer(
            layout=self.layout,
            replicas_of_engine=self._asked.dp,
            cp_size=self._asked.sizes.cp_size,
            interleave=self._asked.interleave,
            block_tokens=self._asked.block_tokens,
            head_stride_bytes=self.region.head_stride_bytes,
            token_stride_bytes=self.region.token_stride_bytes,
            content_bytes=self.region.content_bytes,
            ranks=ranks,
        )

    def rank(
        self,
        place: RankPlace,
        legs: dict[int, list[LegAnswer]],
        *,
        peers: Iterable[int],
        waits_for: Iterable[int],
        releases: Iterable[int] = (),
    ) -> RankAnswer:
        shard = self.shards[place.rank]
        if shard.cp_rank not in self._held:
            self._held[shard.cp_rank] = _ranges(shard, shard, range(self._question.prompt_tokens))
        ranges = self._held[shard.cp_rank]
        moved = {rank: sum(leg.bytes for leg in legs.get(rank, ())) for rank in self.replicas[place.rank]}
        return RankAnswer(
            rank=place.rank,
            pp_rank=place.pp_rank,
            pcp_rank=place.pcp_rank,
            tp_rank=place.tp_rank,
            cp_rank=place.cp_rank,
            layers=list(range(place.first_layer, place.first_layer + place.layer_count)),
            heads=list(range(place.first_kv_head, place.first_kv_head + place.kv_head_count)),
            tokens=sum(end - first for first, end in ranges),
            token_ranges=ranges,
            replicas=self.replicas[place.rank],
            bytes=moved[place.rank],
            copies=sum(leg.copies for leg in legs.get(place.rank, ())),
            load=_relative(moved, place.rank, self.replicas[place.rank]),
            peers=sorted(peers),
            waits_for=sorted(waits_for),
            releases=sorted(releases),
        )

    def _shard(self, place: RankPlace) -> Shard:
        asked, question = self._asked, self._question
        content = question.model.content_bytes
        block_bytes = asked.block_tokens * place.kv_head_count * content
        # What can move only whole is one slab for each head.
        heads_outside = question.heads_outside or question.whole_blocks
        region = partial(
            Region,
            part="kv",
            base_address=0,
            block_stride_bytes=block_bytes,
            head_stride_bytes=asked.block_tokens * content if heads_outside else content,
            token_stride_bytes=content if heads_outside else place.kv_head_count * content,
            content_bytes=content,
            tokens_sliceable=not question.whole_blocks,
        )
        shard = Shard(
            total_kv_heads=question.model.kv_heads,
            first_kv_head=place.first_kv_head,
            kv_head_count=place.kv_head_count,
            block_size=asked.block_tokens,
            regions=(),
            cp_size=place.cp_size,
            cp_rank=place.cp_rank,
            interleave=asked.interleave,
            convention=asked.sizes.convention,
        )
        block_count = 2 * blocks_needed(shard, question.prompt_tokens)
        layers = range(place.first_layer, place.first_layer + place.layer_count)
        regions = tuple(region(layer=layer, block_count=block_count) for layer in layers)
        return msgspec.structs.replace(shard, regions=regions)


def _ranges(source: Shard, target: Shard, tokens: range) -> list[Range]:
    """The tokens that both hold, neighbours as one."""
    ranges: list[Range] = []
    starts, lengths = common_runs(source, target, tokens)
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        if ranges and ranges[-1][1] == start:
            ranges[-1] = (ranges[-1][0], start + length)
        else:
            ranges.append((start, start + length))
    return ranges


def _listed(moved: Copies, source: Shard, target: Shard) -> list[Copy]:
    """Addresses as block and offset: addresses begin at 0, and only every second block is the request's."""
    source_block, source_offset = np.divmod(moved.source_addresses, source.regions[0].block_stride_bytes)
    target_block, target_offset = np.divmod(moved.target_addresses, target.regions[0].block_stride_bytes)
    columns = (source_block // 2, source_offset, target_block // 2, target_offset, moved.lengths)
    return [Copy(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def _relative(moved: dict[int, int], rank: int, replicas: list[int]) -> float:
    total = sum(moved[other] for other in replicas)
    return moved[rank] * len(replicas) / total if total else 1.0
