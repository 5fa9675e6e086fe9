"""Whether two engines can work together, asked once when they first meet.

Each check names the first reason found. A pair that passes has, for every (layer, head, token), bytes of one
meaning on both sides, and ranks that either hold the same or hold nothing in common. A directory comes over
the wire: every number is bounded here, and no check takes more time than the directory is long.
"""

from collections import defaultdict
from collections.abc import Iterator

from .holdings import HeadRange, heads_of
from .parallel import CONVENTIONS
from .shards import Directory, RankEntry, Region, Shard
from .tokens import same_slabs

MAX_RANKS = 1024
MAX_BLOCK_SIZE = 1 << 20
MAX_KV_HEADS = 1 << 16
MAX_WORDS = 200
"""Characters of a peer's own words in a message."""
MAX_ADDRESS = (1 << 63) - 1
"""Addresses are counted in 64 bits with a sign."""


class LayoutMismatch(ValueError):
    """Two engines whose caches cannot be copied into each other."""

    def __init__(self, prefill: Directory, decode: Directory, reason: str) -> None:
        one, other = (f"{_cut(side.engine_id)} ({_cut(side.layout)})" for side in (prefill, decode))
        super().__init__(f"prefill engine {one} and decode engine {other} cannot work together: {reason}")


def check_pair(prefill: Directory, decode: Directory) -> None:
    """Raise ``LayoutMismatch`` with the first reason why these two cannot work together."""
    reason = next(_reasons(prefill, decode), None)
    if reason is not None:
        raise LayoutMismatch(prefill, decode, reason)


def _reasons(prefill: Directory, decode: Directory) -> Iterator[str]:
    if prefill.engine_id == decode.engine_id:
        yield f"both are called {_cut(prefill.engine_id)}: give each its own engine_id in kv_transfer_config"
    if prefill.model != decode.model:
        yield f"they serve different models ({_cut(prefill.model)} and {_cut(decode.model)})"
    sides = (("prefill", prefill), ("decode", decode))
    for side, directory in sides:
        yield from _engine_reasons(side, directory)
    yield from _region_reasons(prefill, decode)
    for side, directory in sides:
        yield from _stage_reasons(side, directory)
    yield from _common_reasons(prefill, decode)
    yield from _slab_reasons(prefill, decode)


# One engine by itself


def _engine_reasons(side: str, directory: Directory) -> Iterator[str]:
    if not directory.ranks:
        yield f"the {side} engine has no ranks"
    if len(directory.ranks) > MAX_RANKS:
        yield f"the {side} engine has {len(directory.ranks)} ranks, more than {MAX_RANKS}"
    if len({entry.rank for entry in directory.ranks}) != len(directory.ranks):
        yield f"the {side} engine lists a rank twice"
    for entry in directory.ranks:
        name = f"{side} rank {entry.rank}"
        yield from _shard_reasons(name, entry.shard, len(directory.ranks))
        yield from _layer_reasons(name, entry.shard)
    first = directory.ranks[0].shard
    for entry in directory.ranks:
        for what, mine, other in _same_for_all(entry.shard, first):
            if mine != other:
                yield f"{what} is {mine} on {side} rank {entry.rank} and {other} on others of its engine"


def _same_for_all(one: Shard, other: Shard) -> Iterator[tuple[str, object, object]]:
    yield "the block size", one.block_size, other.block_size
    yield "the number of KV heads of the model", one.total_kv_heads, other.total_kv_heads
    yield "the number of ranks that split the tokens", one.cp_size, other.cp_size
    yield "the interleave", one.interleave, other.interleave
    yield "the list of KV cache groups", one.groups, other.groups
    yield "the convention of context parallelism", one.convention, other.convention


def _shard_reasons(name: str, shard: Shard, ranks: int) -> Iterator[str]:
    heads = heads_of(shard)
    block_sizes = {shard.block_size, *(group.block_size for group in shard.groups)}
    for block_size in block_sizes:
        if not 1 <= block_size <= MAX_BLOCK_SIZE:
            yield f"{name} says that a block has {block_size} tokens: 1 to {MAX_BLOCK_SIZE} can be"
    if not 1 <= shard.total_kv_heads <= MAX_KV_HEADS:
        yield f"{name} says that the model has {shard.total_kv_heads} KV heads: 1 to {MAX_KV_HEADS} can be"
    if heads.first < 0 or heads.end <= heads.first:
        yield f"{name} says that it holds {shard.kv_head_count} KV heads from number {shard.first_kv_head}"
    if heads.end > shard.total_kv_heads:
        yield f"{name} holds {heads}, but the model has {shard.total_kv_heads}"
    if shard.convention not in CONVENTIONS:
        yield f"{name} follows convention {_cut(shard.convention)} of context parallelism, which is not known"
    if not 1 <= shard.cp_size <= ranks:
        yield f"{name} says that {shard.cp_size} ranks split the tokens, and its engine has {ranks}"
    if not 0 <= shard.cp_rank < shard.cp_size:
        yield f"{name} says that it is number {shard.cp_rank} of {shard.cp_size} ranks that split the tokens"
    for block_size in block_sizes:
        if shard.interleave < 1 or block_size % shard.interleave:
            yield (
                f"{name} has an interleave of {shard.interleave} tokens, which does not divide its blocks of "
                f"{block_size}"
            )
    groups = max(len(shard.groups), 1)
    if any(not 0 <= region.group < groups for region in shard.regions):
        yield f"{name} has layers of a KV cache group that is not one of its {groups}"


def _layer_reasons(name: str, shard: Shard) -> Iterator[str]:
    names = {(region.layer, region.part) for region in shard.regions}
    if len(names) != len(shard.regions):
        yield f"{name} lists a tensor of a layer twice"
    for region in shard.regions:
        strides = (region.block_stride_bytes, region.head_stride_bytes, region.token_stride_bytes)
        spans = (region.block_count, shard.kv_head_count, shard.block_size)
        end = region.base_address + sum(stride * span for stride, span in zip(strides, spans, strict=True))
        if min(*strides, region.base_address, region.layer, region.group) < 0 or end > MAX_ADDRESS:
            yield f"on {name} the cache of layer {region.layer} has addresses that cannot be"
        if region.content_bytes < 1 or region.block_count < 1:
            yield (
                f"on {name} layer {region.layer} has {region.block_count} blocks with {region.content_bytes} "
                "bytes for a token of a head"
            )
        if not region.tokens_sliceable and region.token_stride_bytes != region.content_bytes:
            yield (
                f"on {name} the tokens of layer {region.layer} lie {region.token_stride_bytes} bytes apart, "
                f"and blocks that must move whole need them {region.content_bytes} bytes apart"
            )


def _stage_reasons(side: str, directory: Directory) -> Iterator[str]:
    """Two ranks hold the same layers or none in common; the ranks of a stage hold every (head, token)."""
    stages: dict[tuple[int, ...], list[RankEntry]] = defaultdict(list)
    for entry in directory.ranks:
        stages[entry.shard.layers].append(entry)
    first_with: dict[int, RankEntry] = {}
    for layers, entries in stages.items():
        for layer in layers:
            other = first_with.setdefault(layer, entries[0])
            if other is not entries[0]:
                yield (
                    f"{side} ranks {other.rank} and {entries[0].rank} share layer {layer} without holding "
                    "the same layers"
                )
        if layers:
            yield from _head_reasons(side, layers[0], entries)


def _head_reasons(side: str, layer: int, entries: list[RankEntry]) -> Iterator[str]:
    shares: dict[HeadRange, set[int]] = defaultdict(set)
    holder: dict[HeadRange, RankEntry] = {}
    for entry in entries:
        shares[heads_of(entry.shard)].add(entry.shard.cp_rank)
        holder.setdefault(heads_of(entry.shard), entry)
    shard = entries[0].shard
    end, before = 0, None
    for heads in sorted(shares):
        if heads.first > end:
            yield f"no rank of the {side} side holds {HeadRange(end, heads.first)} of layer {layer}"
        if before is not None and heads.first < end:
            yield (
                f"{side} ranks {holder[before].rank} and {holder[heads].rank} share some layers and heads "
                f"without being replicas of each other ({before}; {heads})"
            )
        end, before = heads.end, heads
        if len(shares[heads]) < shard.cp_size:
            missing = min(set(range(shard.cp_size)) - shares[heads])
            yield (
                f"no rank of the {side} side holds the tokens of number {missing} of {shard.cp_size} that "
                f"split them, for {heads} of layer {layer}"
            )
    if end < shard.total_kv_heads:
        missing_heads = HeadRange(end, shard.total_kv_heads)
        yield f"no rank of the {side} side holds {missing_heads} of layer {layer}"


# The two together


def _region_reasons(prefill: Directory, decode: Directory) -> Iterator[str]:
    known: dict[tuple[int, str], Region] = {}
    for entry in (*prefill.ranks, *decode.ranks):
        for region in entry.shard.regions:
            first = known.setdefault((region.layer, region.part), region)
            if region.content_bytes != first.content_bytes:
                yield (
                    f"a token of a head takes {first.content_bytes} bytes in one and {region.content_bytes} "
                    f"bytes in the other in layer {region.layer} ({_cut(region.part)})"
                )
            if region.tokens_sliceable != first.tokens_sliceable:
                yield f"blocks of layer {region.layer} ({_cut(region.part)}) are arranged differently inside"
    known_parts: dict[int, set[str]] = {}
    for entry in (*prefill.ranks, *decode.ranks):
        parts: dict[int, set[str]] = defaultdict(set)
        for region in entry.shard.regions:
            parts[region.layer].add(region.part)
        for layer, mine in parts.items():
            other = known_parts.setdefault(layer, mine)
            if other != mine:
                yield f"layer {layer} is {_listed(other)} in one and {_listed(mine)} in the other"


def _common_reasons(prefill: Directory, decode: Directory) -> Iterator[str]:
    """Both sides have the same layers and heads: what is in one must be somewhere in the other."""
    heads = sorted({directory.ranks[0].shard.total_kv_heads for directory in (prefill, decode)})
    if len(heads) > 1:
        yield f"the number of KV heads differs ({heads[0]} and {heads[1]})"
    layers = [{layer for entry in side.ranks for layer in entry.shard.layers} for side in (prefill, decode)]
    for side, held in (("prefill", layers[0]), ("decode", layers[1])):
        missing = (layers[0] | layers[1]) - held
        if missing:
            yield f"the {side} side does not have layer {_listed(missing)}"


def _slab_reasons(prefill: Directory, decode: Directory) -> Iterator[str]:
    ours, theirs = prefill.ranks[0].shard, decode.ranks[0].shard
    group_of = {region.layer: region.group for entry in decode.ranks for region in entry.shard.regions}
    found: dict[tuple[int, int], Region] = {}
    for entry in prefill.ranks:
        for region in entry.shard.regions:
            if not region.tokens_sliceable:
                found.setdefault((region.group, group_of[region.layer]), region)
    for groups, region in found.items():
        if same_slabs(ours, theirs, groups):
            continue
        why = f"blocks of layer {region.layer} ({_cut(region.part)}) can only move whole"
        sizes = (ours.group(groups[0]).block_size, theirs.group(groups[1]).block_size)
        if sizes[0] != sizes[1]:
            yield (
                f"block sizes differ ({sizes[0]} and {sizes[1]} tokens) and {why}: start both with the same "
                "--block-size"
            )
        yield (
            f"{why}, and no block of one side holds the same tokens as a block of the other: start both with "
            "the same DCP, or with an interleave of a whole block"
        )


def _cut(text: str) -> str:
    """Return what a peer calls something, at a length that a log can take."""
    return text if len(text) <= MAX_WORDS else f"{text[:MAX_WORDS]}..."


def _listed(values: set[int] | set[str]) -> str:
    few = [_cut(str(value)) for value in sorted(values)]
    return ", ".join(few[:8]) + (f" and {len(few) - 8} more" if len(few) > 8 else "")
