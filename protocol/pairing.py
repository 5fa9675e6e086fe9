"""Whether two engines can work together, asked once when they first meet.

Each check names the first reason found. A pair that passes has, for every (layer, head), bytes of one meaning
on both sides, and prefill ranks that either hold the same or hold nothing in common.
"""

from collections.abc import Iterator

from .shards import Directory, RankEntry, Region, Shard


class LayoutMismatch(ValueError):
    """Two engines whose caches cannot be copied into each other."""

    def __init__(self, prefill: Directory, decode: Directory, reason: str) -> None:
        super().__init__(
            f"prefill engine {prefill.engine_id} ({prefill.layout}) and decode engine {decode.engine_id} "
            f"({decode.layout}) cannot work together: {reason}"
        )


def check_pair(prefill: Directory, decode: Directory) -> None:
    """Raise ``LayoutMismatch`` with the first reason why these two cannot work together."""
    reason = next(_reasons(prefill, decode), None)
    if reason is not None:
        raise LayoutMismatch(prefill, decode, reason)


def _reasons(prefill: Directory, decode: Directory) -> Iterator[str]:
    if prefill.model != decode.model:
        yield f"they serve different models ({prefill.model} and {decode.model})"
    for side, directory in (("prefill", prefill), ("decode", decode)):
        yield from _engine_reasons(side, directory)
    yield from _size_reasons(prefill, decode)
    yield from _region_reasons(prefill, decode)
    yield from _coverage_reasons(prefill, decode)
    yield from _overlap_reasons(prefill)


def _engine_reasons(side: str, directory: Directory) -> Iterator[str]:
    if not directory.ranks:
        yield f"the {side} engine has no ranks"
    if len({entry.rank for entry in directory.ranks}) != len(directory.ranks):
        yield f"the {side} engine lists a rank twice"
    for entry in directory.ranks:
        shard = entry.shard
        if shard.cp_size > 1:
            yield f"context parallelism on the {side} side (of size {shard.cp_size}) is not handled yet"
        if shard.kv_head_count < 1 or shard.first_kv_head < 0:
            yield f"{side} rank {entry.rank} says that it holds {_heads(shard)}"
        if shard.first_kv_head + shard.kv_head_count > shard.total_kv_heads:
            yield f"{side} rank {entry.rank} holds {_heads(shard)}, but the model has {shard.total_kv_heads}"
        yield from _shard_reasons(side, entry)


def _shard_reasons(side: str, entry: RankEntry) -> Iterator[str]:
    names = [(region.layer, region.part) for region in entry.shard.regions]
    if len(set(names)) != len(names):
        yield f"{side} rank {entry.rank} lists a tensor of a layer twice"
    for region in entry.shard.regions:
        if not region.tokens_sliceable and region.token_stride_bytes != region.content_bytes:
            yield (
                f"on {side} rank {entry.rank} the tokens of layer {region.layer} lie "
                f"{region.token_stride_bytes} bytes apart, and blocks that must move whole need them "
                f"{region.content_bytes} bytes apart"
            )


def _size_reasons(prefill: Directory, decode: Directory) -> Iterator[str]:
    shards = [entry.shard for entry in (*prefill.ranks, *decode.ranks)]
    block_sizes = sorted({shard.block_size for shard in shards})
    if len(block_sizes) > 1:
        yield f"block sizes differ ({_listed(block_sizes)} tokens): start both with the same --block-size"
    heads = sorted({shard.total_kv_heads for shard in shards})
    if len(heads) > 1:
        yield f"the number of KV heads differs ({_listed(heads)})"


def _region_reasons(prefill: Directory, decode: Directory) -> Iterator[str]:
    known: dict[tuple[int, str], Region] = {}
    for entry in (*prefill.ranks, *decode.ranks):
        for region in entry.shard.regions:
            first = known.setdefault((region.layer, region.part), region)
            if region.content_bytes != first.content_bytes:
                yield (
                    f"a token of a head takes {first.content_bytes} bytes in one and {region.content_bytes} "
                    f"bytes in the other in layer {region.layer} ({region.part})"
                )
            if region.tokens_sliceable != first.tokens_sliceable:
                yield f"blocks of layer {region.layer} ({region.part}) are arranged differently inside"
    parts: dict[int, tuple[str, ...]] = {}
    for entry in (*prefill.ranks, *decode.ranks):
        for layer in entry.shard.layers:
            mine = tuple(sorted(region.part for region in entry.shard.regions if region.layer == layer))
            other = parts.setdefault(layer, mine)
            if other != mine:
                yield f"layer {layer} is {_listed(other)} in one and {_listed(mine)} in the other"


def _coverage_reasons(prefill: Directory, decode: Directory) -> Iterator[str]:
    """A model's every layer and head must be somewhere on both sides."""
    sides = {"prefill": _held(prefill), "decode": _held(decode)}
    layers = sorted({layer for held in sides.values() for layer in held})
    total = prefill.ranks[0].shard.total_kv_heads
    for side, held in sides.items():
        missing = [layer for layer in layers if layer not in held]
        if missing:
            yield f"the {side} side does not have layer {_listed(missing)}"
        for layer in layers:
            heads = [head for head in range(total) if head not in held.get(layer, set())]
            if heads:
                yield f"no rank of the {side} side holds KV head {_listed(heads)} of layer {layer}"


def _held(directory: Directory) -> dict[int, set[int]]:
    """Return the heads that some rank of the engine holds, for each layer."""
    held: dict[int, set[int]] = {}
    for entry in directory.ranks:
        first = entry.shard.first_kv_head
        for layer in entry.shard.layers:
            held.setdefault(layer, set()).update(range(first, first + entry.shard.kv_head_count))
    return held


def _overlap_reasons(prefill: Directory) -> Iterator[str]:
    """Two prefill ranks are replicas or have nothing in common: only then is taking turns a rule."""
    distinct: dict[tuple[tuple[int, ...], int, int], RankEntry] = {}
    for entry in prefill.ranks:
        shard = entry.shard
        distinct.setdefault((shard.layers, shard.first_kv_head, shard.kv_head_count), entry)
    entries = list(distinct.values())
    for place, one in enumerate(entries):
        for other in entries[place + 1 :]:
            if _heads_meet(one.shard, other.shard) and not set(one.shard.layers).isdisjoint(
                other.shard.layers
            ):
                yield (
                    f"prefill ranks {one.rank} and {other.rank} share some layers and heads without being "
                    f"replicas of each other ({_heads(one.shard)}; {_heads(other.shard)})"
                )


def _heads_meet(one: Shard, other: Shard) -> bool:
    first = max(one.first_kv_head, other.first_kv_head)
    return first < min(one.first_kv_head + one.kv_head_count, other.first_kv_head + other.kv_head_count)


def _heads(shard: Shard) -> str:
    return f"{shard.kv_head_count} KV heads from number {shard.first_kv_head}"


def _listed(values: list[int] | tuple[str, ...]) -> str:
    return ", ".join(str(value) for value in values) or "none"
