"""A prompt, where its tokens lie in an engine, and an engine with all its ranks."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from dfirst.protocol.shards import CacheGroup, Directory, RankEntry, Region, Shard

from .definition import Parallel
from .memory import (
    BEHIND,
    FOREIGN,
    PADDING,
    UNTOUCHED,
    Form,
    Ints,
    KnownValues,
    RankMemory,
    Tensor,
    build_rank,
)

GONE = 0
"""The block id, in a group with a window, of what the request no longer has."""


@dataclass(frozen=True)
class Request:
    """What is to be moved: tokens from ``cached`` to ``tokens``."""

    tokens: int
    cached: int
    prefill_blocks: tuple[tuple[int, ...], ...]
    """Block table of each KV cache group, the same on all ranks of the engine.

    In a group with a window, 0 stands for blocks that are gone.
    """
    decode_blocks: tuple[tuple[int, ...], ...]
    transfer_id: str = "some-transfer"


@dataclass(frozen=True)
class Side:
    """A layout: how the ranks share the cache, and how each keeps its part."""

    parallel: Parallel
    form: Form


@dataclass(frozen=True)
class Engine:
    """A layout with memory for every rank."""

    side: Side
    ranks: tuple[RankMemory, ...]


@lru_cache(maxsize=4096)
def places(parallel: Parallel, group: int, rank: int, first: int, end: int) -> tuple[Ints, Ints, Ints]:
    """Return (tokens, entries of the block table, slots) of the tokens in [first, end) that a rank holds."""
    its = parallel.groups[group]
    found = [
        (token, parallel.table_entry(its, token), parallel.slot(its, token))
        for token in range(first, end)
        if parallel.holds_token(rank, token)
    ]
    columns = np.array(found, dtype=np.int64).reshape(-1, 3).T
    return columns[0], columns[1], columns[2]


def blocks_needed(parallel: Parallel, group: int, tokens: int) -> int:
    """Return how many entries a request's block table has."""
    return -(-tokens // parallel.virtual_block(parallel.groups[group]))


def build(side: Side, background: int) -> Engine:
    """Return an engine with one value in all of its memory."""
    parallel = side.parallel
    return Engine(
        side, tuple(build_rank(parallel, side.form, rank, background) for rank in range(parallel.rank_count))
    )


def prefill_engine(side: Side, request: Request) -> Engine:
    """Return an engine before it has computed the prompt, with patterns that tell what may be copied."""
    engine = build(side, PADDING)
    for memory in engine.ranks:
        for tensor in memory.tensors:
            tensor.view[:] = FOREIGN
    # Groups may share bytes: the request's own blocks are marked last.
    mark_blocks(engine, request)
    return engine


def mark_blocks(engine: Engine, request: Request) -> None:
    """Fill a request's blocks with what stands for tokens that are not computed."""
    for memory in engine.ranks:
        for tensor in memory.tensors:
            window = engine.side.parallel.groups[tensor.group].window
            table = request.prefill_blocks[tensor.group]
            tensor.view[[block for block in table if not window or block != GONE]] = BEHIND


def decode_engine(side: Side) -> Engine:
    """Return an engine that has received nothing."""
    return build(side, UNTOUCHED)


def write_tokens(
    engine: Engine,
    tables: tuple[tuple[int, ...], ...],
    values: KnownValues,
    first: int,
    end: int,
    layers: frozenset[int] | None = None,
) -> None:
    """Write the known values of the tokens in [first, end) at their places on every rank."""
    for memory in engine.ranks:
        for tensor in memory.tensors:
            if layers is None or tensor.layer in layers:
                _write(engine.side.parallel, memory.rank, tensor, tables[tensor.group], values, first, end)


def _write(
    parallel: Parallel,
    rank: int,
    tensor: Tensor,
    table: tuple[int, ...],
    values: KnownValues,
    first: int,
    end: int,
) -> None:
    tokens, entries, slots = places(parallel, tensor.group, rank, first, end)
    blocks = np.asarray(table, dtype=np.int64)[entries]
    if parallel.groups[tensor.group].window:
        there = blocks != GONE
        tokens, slots, blocks = tokens[there], slots[there], blocks[there]
    if len(tokens):
        known = values.of(tensor.layer, tensor.part)[list(parallel.heads_of(rank))]
        tensor.put(blocks, slots, known[:, tokens])


def directory(engine: Engine, name: str, model: str = "tiny") -> Directory:
    """Return what the engine publishes; addresses and strides are those of its arrays."""
    entries = tuple(
        RankEntry(
            rank=memory.rank,
            host=f"{name}-host-{memory.rank}",
            port=7000 + memory.rank,
            incarnation=f"{name}{memory.rank}",
            data_address=f"{name}-host-{memory.rank}:9000",
            shard=shard_of(engine.side, memory),
        )
        for memory in engine.ranks
    )
    return Directory(engine_id=name, model=model, layout=engine.side.parallel.describe(), ranks=entries)


def shard_of(side: Side, memory: RankMemory) -> Shard:
    parallel, heads = side.parallel, side.parallel.heads_of(memory.rank)
    return Shard(
        total_kv_heads=parallel.heads,
        first_kv_head=heads[0],
        kv_head_count=len(heads),
        block_size=parallel.groups[0].block_size,
        regions=tuple(region_of(tensor) for tensor in memory.tensors),
        cp_size=parallel.cp_size,
        cp_rank=parallel.cp_rank(memory.rank),
        interleave=parallel.interleave,
        convention=parallel.convention,
        groups=cache_groups(parallel),
    )


def cache_groups(parallel: Parallel) -> tuple[CacheGroup, ...]:
    """Return the groups as the engine publishes them; a plain engine says nothing of its only one."""
    if len(parallel.groups) == 1 and not parallel.groups[0].window:
        return ()
    return tuple(CacheGroup(group.block_size, group.window) for group in parallel.groups)


def region_of(tensor: Tensor) -> Region:
    view = tensor.view
    return Region(
        layer=tensor.layer,
        part=tensor.form.name,
        base_address=int(view.ctypes.data),
        block_count=view.shape[0],
        block_stride_bytes=view.strides[0],
        head_stride_bytes=view.strides[1],
        token_stride_bytes=view.strides[2],
        content_bytes=tensor.form.content_bytes,
        tokens_sliceable=tensor.sliceable,
        group=tensor.group,
    )
