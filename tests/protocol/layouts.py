"""Engines made of plain memory, and a transfer between two of them that checks every byte.

Prefill ranks hold values that only (layer, part, head, token) decides. After the copies of a plan have run,
decode ranks must hold the same values in their own layout, each written once, and every other byte of theirs
must be as it was. Only the slots behind the prompt's end in its last block may hold anything.
"""

import ctypes
import itertools
import random
from dataclasses import dataclass, field

import numpy as np
from dfirst.protocol.copies import Copies, copies
from dfirst.protocol.parallel import ParallelSizes, RankPlace, places
from dfirst.protocol.plan import PairPlan, RequestPlan, plan_pair
from dfirst.protocol.shards import Directory, RankEntry, Region, Shard

HEADS_OUTER, TOKENS_OUTER, BLOCK_INTERLEAVED = "LBHN", "LBNH", "BLHN"
UNTOUCHED, NOT_OF_THE_PROMPT = 0xFE, 0xFD
"""Values of no token: what decode ranks hold before, and what prefill ranks hold elsewhere."""


@dataclass(frozen=True)
class Engine:
    """A layout to build ranks from; ``order`` names its axes layer, block, head, token from outside in."""

    heads: int = 4
    tp: int = 1
    pcp: int = 1
    dcp: int = 1
    convention: str = "a"
    interleave: int = 0
    """0: a whole block."""
    stages: tuple[int, ...] = (2,)
    order: str = HEADS_OUTER
    block_size: int = 4
    content: int = 6
    parts: tuple[str, ...] = ("kv",)
    sliceable: bool = True
    blocks: int = 6
    model: str = "tiny"

    @property
    def sizes(self) -> ParallelSizes:
        return ParallelSizes(
            tp=self.tp, pp=len(self.stages), pcp=self.pcp, dcp=self.dcp, convention=self.convention
        )

    @property
    def virtual_block_size(self) -> int:
        return self.block_size * self.sizes.cp_size

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.virtual_block_size)


@dataclass
class Rank:
    entry: RankEntry
    buffer: np.ndarray = field(repr=False)
    views: dict[tuple[int, str], np.ndarray] = field(repr=False)
    """(blocks, heads, slots, content bytes) of each layer and part, views of ``buffer``."""


def build(engine: Engine, fill: int = UNTOUCHED) -> list[Rank]:
    ranks = places(engine.sizes, engine.heads, sum(engine.stages), engine.stages)
    return [build_rank(engine, place, fill) for place in ranks]


def build_rank(engine: Engine, place: RankPlace, fill: int) -> Rank:
    layers = range(place.first_layer, place.first_layer + place.layer_count)
    extents = {"L": len(layers), "B": engine.blocks, "H": place.kv_head_count, "N": engine.block_size}
    shape = [extents[axis] for axis in engine.order]
    views, regions = {}, []
    whole = np.full(len(engine.parts) * int(np.prod(shape)) * engine.content, fill, dtype=np.uint8)
    for part, buffer in zip(engine.parts, np.split(whole, len(engine.parts)), strict=True):
        logical = buffer.reshape(*shape, engine.content)
        logical = logical.transpose(*[engine.order.index(axis) for axis in "LBHN"], 4)
        for number, layer in enumerate(layers):
            view = logical[number]
            views[layer, part] = view
            regions.append(region_of(layer, part, view, engine))
    shard = Shard(
        total_kv_heads=engine.heads,
        first_kv_head=place.first_kv_head,
        kv_head_count=place.kv_head_count,
        block_size=engine.block_size,
        regions=tuple(regions),
        cp_size=place.cp_size,
        cp_rank=place.cp_rank,
        interleave=engine.interleave or engine.block_size,
        convention=engine.convention,
    )
    entry = RankEntry(rank=place.rank, host="h", port=1, incarnation="i", data_address="h:2", shard=shard)
    return Rank(entry, whole, views)


def region_of(layer: int, part: str, view: np.ndarray, engine: Engine) -> Region:
    return Region(
        layer=layer,
        part=part,
        base_address=view.ctypes.data,
        block_count=engine.blocks,
        block_stride_bytes=view.strides[0],
        head_stride_bytes=view.strides[1],
        token_stride_bytes=view.strides[2],
        content_bytes=engine.content,
        tokens_sliceable=engine.sliceable,
    )


_numbers = itertools.count(1)


def directory(engine: Engine, ranks: list[Rank] | None = None, name: str = "") -> Directory:
    """An engine as it says of itself; without a name it gets one that no other has."""
    entries = tuple(rank.entry for rank in ranks or build(engine))
    layout = f"{engine.sizes}, {engine.heads} KV heads, stages {engine.stages}"
    name = name or f"engine-{next(_numbers)}"
    return Directory(engine_id=name, model=engine.model, layout=layout, ranks=entries)


def pair_of(prefill: Engine, decode: Engine) -> PairPlan:
    return plan_pair(directory(prefill, name="prefill-1"), directory(decode, name="decode-1"))


def values(layer: int, part: str, heads: np.ndarray, tokens: np.ndarray, content: int) -> np.ndarray:
    """What (heads, tokens, content bytes) of a layer hold, by definition."""
    place = layer * 7919 + ord(part[0]) * 15485863 + heads[:, None] * 104729 + tokens * 1299709
    return ((place[:, :, None] + np.arange(content) * 31) % 251).astype(np.uint8)


def held_tokens(shard: Shard, end: int) -> list[int]:
    """The tokens before ``end`` that a shard holds, by definition."""
    return [token for token in range(end) if token // shard.interleave % shard.cp_size == shard.cp_rank]


def write_prompt(ranks: list[Rank], blocks: list[int], tokens: range) -> None:
    """Write these tokens of a prompt whose blocks, from its first token on, are ``blocks``."""
    for rank in ranks:
        shard = rank.entry.shard
        held = held_tokens(shard, tokens.stop)
        mine = [(place, token) for place, token in enumerate(held) if token >= tokens.start]
        if not mine:
            continue
        at = np.array([place for place, _ in mine])
        block, slot = np.array(blocks)[at // shard.block_size], at % shard.block_size
        heads = np.arange(shard.first_kv_head, shard.first_kv_head + shard.kv_head_count)
        for (layer, part), view in rank.views.items():
            made = values(layer, part, heads, np.array([token for _, token in mine]), view.shape[3])
            view[block, :, slot] = made.transpose(1, 0, 2)


def forgive_the_last_block(ranks: list[Rank], blocks: list[int], tokens: range) -> None:
    """Make the slots behind the prompt, in blocks that hold some of ``tokens``, as if untouched."""
    for rank in ranks:
        shard = rank.entry.shard
        held = held_tokens(shard, tokens.stop)
        if not held or held[-1] < tokens.start or not len(held) % shard.block_size:
            continue
        for view in rank.views.values():
            view[blocks[len(held) // shard.block_size], :, len(held) % shard.block_size :] = UNTOUCHED


def run(moves: Copies, sources: list[Rank], targets: list[Rank], written: list[np.ndarray]) -> None:
    """Carry copies out, within the buffers of the ranks only, and count what is written where."""
    for start, end, length in zip(
        moves.source_addresses.tolist(), moves.target_addresses.tolist(), moves.lengths.tolist(), strict=True
    ):
        assert any(_inside(start, length, rank.buffer) for rank in sources)
        (place,) = [number for number, rank in enumerate(targets) if _inside(end, length, rank.buffer)]
        ctypes.memmove(end, start, length)
        written[place][end - targets[place].buffer.ctypes.data :][:length] += 1


def _inside(address: int, length: int, buffer: np.ndarray) -> bool:
    return buffer.ctypes.data <= address and address + length <= buffer.ctypes.data + buffer.nbytes


class Transfer:
    """A prompt on a prefill engine, whose first ``cached`` tokens the decode side has already."""

    def __init__(
        self,
        prefill: Engine,
        decode: Engine,
        prompt: int,
        cached: int = 0,
        transfer_id: str = "t",
        seed: int = 0,
        blocks: tuple[list[int], list[int]] | None = None,
    ) -> None:
        self.sources, self.targets = build(prefill, NOT_OF_THE_PROMPT), build(decode)
        self.tokens = range(cached, prompt)
        draw = random.Random(seed)
        self.from_blocks, self.to_blocks = blocks or (
            draw.sample(range(engine.blocks), engine.blocks_for(prompt)) for engine in (prefill, decode)
        )
        write_prompt(self.sources, self.from_blocks, range(prompt))
        self.written = [np.zeros(rank.buffer.nbytes, dtype=np.int64) for rank in self.targets]
        self.pair = plan_pair(directory(prefill, self.sources), directory(decode, self.targets))
        self.plan: RequestPlan = self.pair.request(transfer_id, prompt, cached)
        self.decode = decode

    def copies_of(self, leg, tokens: range, layers: list[int] | None = None) -> Copies:
        source = self.sources[leg.prefill_rank].entry.shard
        target = self.targets[leg.decode_rank].entry.shard
        return copies(leg, source, target, self.from_blocks, self.to_blocks, tokens, layers)

    def move(self) -> int:
        """Move everything; return how many runs it took."""
        count = 0
        for leg in self.plan.legs:
            moves = self.copies_of(leg, self.tokens)
            assert len(moves), "a leg without a token is none"
            run(moves, self.sources, self.targets, self.written)
            count += len(moves)
        return count

    def check(self) -> None:
        """Every byte is where it belongs, was written once, and nothing else was touched."""
        expected = build(self.decode)
        write_prompt(expected, self.to_blocks, self.tokens)
        forgive_the_last_block(self.targets, self.to_blocks, self.tokens)
        for got, want, written in zip(self.targets, expected, self.written, strict=True):
            np.testing.assert_array_equal(got.buffer, want.buffer)
            assert written[want.buffer != UNTOUCHED].tolist() == [1] * int((want.buffer != UNTOUCHED).sum())


def transfer(prefill: Engine, decode: Engine, prompt: int, cached: int = 0, **how) -> int:
    """Move a prompt, check every byte, and return how many runs it took."""
    made = Transfer(prefill, decode, prompt, cached, **how)
    count = made.move()
    made.check()
    return count
