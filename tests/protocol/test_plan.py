"""The plan moves every byte that a decode rank needs, and nothing else, whatever the two layouts are.

The caches here are plain memory. Prefill ranks hold values that only (layer, part, head, token) decides.
After the copies of a plan have run, decode ranks must hold the same values in their own layout, and every
other byte of theirs must be as it was.
"""

import ctypes
import itertools
from collections import Counter
from dataclasses import dataclass, field
from dataclasses import replace as changed

import msgspec
import numpy as np
import pytest
from dfirst.protocol.copies import Copies, copies, join
from dfirst.protocol.plan import LayoutMismatch, Leg, PairPlan, plan_pair
from dfirst.protocol.shards import Directory, RankEntry, Region, Shard
from hypothesis import given, settings
from hypothesis import strategies as st

HEADS_OUTER, TOKENS_OUTER, BLOCK_INTERLEAVED = "LBHN", "LBNH", "BLHN"
UNTOUCHED = 0xA5


@dataclass(frozen=True)
class Engine:
    """A layout to build ranks from; ``order`` names its axes layer, block, head, token from outside in."""

    heads: int = 4
    tp: int = 1
    stages: tuple[int, ...] = (2,)
    order: str = HEADS_OUTER
    block_size: int = 4
    content: int = 6
    parts: tuple[str, ...] = ("kv",)
    sliceable: bool = True
    blocks: int = 6
    model: str = "tiny"


@dataclass
class Rank:
    entry: RankEntry
    buffer: np.ndarray = field(repr=False)
    views: dict[tuple[int, str], np.ndarray] = field(repr=False)
    """(blocks, heads, tokens, content bytes) of each layer and part, views of ``buffer``."""


def build(engine: Engine) -> list[Rank]:
    ranks = []
    first_layer = 0
    for stage, layer_count in enumerate(engine.stages):
        layers = range(first_layer, first_layer + layer_count)
        first_layer += layer_count
        for tp_rank in range(engine.tp):
            ranks.append(build_rank(engine, stage * engine.tp + tp_rank, tp_rank, layers))
    return ranks


def build_rank(engine: Engine, rank: int, tp_rank: int, layers: range) -> Rank:
    head_count = max(1, engine.heads // engine.tp)
    extents = {"L": len(layers), "B": engine.blocks, "H": head_count, "N": engine.block_size}
    shape = [extents[axis] for axis in engine.order]
    buffers, views, regions = [], {}, []
    whole = np.full(len(engine.parts) * int(np.prod(shape)) * engine.content, UNTOUCHED, dtype=np.uint8)
    for part, buffer in zip(engine.parts, np.split(whole, len(engine.parts)), strict=True):
        buffers.append(buffer)
        logical = buffer.reshape(*shape, engine.content)
        logical = logical.transpose(*[engine.order.index(axis) for axis in "LBHN"], 4)
        for place, layer in enumerate(layers):
            view = logical[place]
            views[layer, part] = view
            regions.append(region_of(layer, part, view, engine))
    shard = Shard(
        total_kv_heads=engine.heads,
        first_kv_head=tp_rank * engine.heads // engine.tp,
        kv_head_count=head_count,
        block_size=engine.block_size,
        regions=tuple(regions),
    )
    entry = RankEntry(rank=rank, host="h", port=1, incarnation="i", data_address="h:2", shard=shard)
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


def directory(engine: Engine, ranks: list[Rank] | None = None, name: str = "engine") -> Directory:
    entries = tuple(rank.entry for rank in ranks or build(engine))
    layout = f"TP {engine.tp}, {engine.heads} KV heads, stages {engine.stages}"
    return Directory(engine_id=name, model=engine.model, layout=layout, ranks=entries)


def pair_of(prefill: Engine, decode: Engine) -> PairPlan:
    return plan_pair(directory(prefill, name="prefill-1"), directory(decode, name="decode-1"))


def value_of(layer: int, part: str, head: int, token: int, content: int) -> np.ndarray:
    seed = layer * 7919 + head * 104729 + token * 1299709 + ord(part[0]) * 15485863
    return ((seed + np.arange(content) * 31) % 251).astype(np.uint8)


def write_prompt(ranks: list[Rank], engine: Engine, blocks: list[int], first_block: int = 0) -> None:
    """Write what the ranks would hold if block ``first_block + i`` of a prompt were in ``blocks[i]``."""
    for rank in ranks:
        shard = rank.entry.shard
        for (layer, part), view in rank.views.items():
            for place, block in enumerate(blocks):
                for head, slot in itertools.product(range(shard.kv_head_count), range(engine.block_size)):
                    token = (first_block + place) * engine.block_size + slot
                    view[block, head, slot] = value_of(
                        layer, part, shard.first_kv_head + head, token, engine.content
                    )


def run(moves: Copies) -> None:
    for source, target, length in zip(
        moves.source_addresses, moves.target_addresses, moves.lengths, strict=True
    ):
        ctypes.memmove(int(target), int(source), int(length))


def transfer(
    prefill: Engine, decode: Engine, from_blocks: list[int], to_blocks: list[int], cached_blocks: int = 0
) -> int:
    """Move a prompt whose first ``cached_blocks`` the decode side has; check every byte; count the runs."""
    sources, targets, expected = build(prefill), build(decode), build(decode)
    write_prompt(sources, prefill, from_blocks)
    write_prompt(expected, decode, to_blocks, first_block=cached_blocks)
    size = prefill.block_size
    pair = plan_pair(directory(prefill, sources), directory(decode, targets))
    plan = pair.request("some-transfer", len(from_blocks) * size, cached_blocks * size)
    count = 0
    for leg in plan.legs:
        source, target = sources[leg.prefill_rank].entry.shard, targets[leg.decode_rank].entry.shard
        tokens = range(cached_blocks * size, len(from_blocks) * size)
        moves = copies(leg, source, target, from_blocks, [0] * cached_blocks + to_blocks, tokens)
        run(moves)
        count += len(moves)
    for got, want in zip(targets, expected, strict=True):
        np.testing.assert_array_equal(got.buffer, want.buffer)
    return count


@pytest.mark.parametrize("order", [HEADS_OUTER, TOKENS_OUTER, BLOCK_INTERLEAVED, "BHLN", "LHBN", "BLNH"])
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ({"tp": 1}, {"tp": 1}),
        ({"tp": 2}, {"tp": 4}),
        ({"tp": 4}, {"tp": 2}),
        ({"tp": 8}, {"tp": 2}),
        ({"tp": 2}, {"tp": 8}),
        ({"tp": 8}, {"tp": 16}),
        ({"heads": 6, "tp": 3}, {"heads": 6, "tp": 2}),
        ({"heads": 1, "tp": 4}, {"heads": 1, "tp": 2}),
        ({"stages": (3, 1)}, {"stages": (1, 2, 1)}),
        ({"stages": (1, 3), "tp": 2}, {"stages": (4,), "tp": 4}),
    ],
)
def test_every_byte_of_the_prompt_arrives_and_no_other_byte_changes(order, prefill, decode):
    prefill, decode = Engine(order=order, **prefill), Engine(order=order, **decode)
    if sum(prefill.stages) != sum(decode.stages):
        decode = changed(decode, stages=prefill.stages)
    transfer(prefill, decode, [4, 0, 2], [1, 5, 3])


def test_a_cached_prefix_is_not_moved():
    transfer(Engine(tp=2), Engine(tp=4), [3, 1, 0, 5], [2, 4], cached_blocks=2)


def test_blocks_that_must_stay_whole_move_as_slabs():
    engine = Engine(sliceable=False)
    runs = transfer(engine, changed(engine, tp=2), [4, 0], [1, 5])
    assert runs == 2 * 2 * 2, "one run for each block, layer and half of the heads"


@st.composite
def pairs_of_engines(draw):
    heads, layer_count = draw(st.sampled_from([1, 2, 3, 4, 6])), draw(st.integers(1, 4))
    common = {
        "heads": heads,
        "block_size": draw(st.sampled_from([1, 2, 4])),
        "content": draw(st.sampled_from([1, 4, 6])),
        "parts": draw(st.sampled_from([("kv",), ("k", "v")])),
        "sliceable": draw(st.booleans()),
    }

    def side():
        orders = ["".join(order) for order in itertools.permutations("LBHN")]
        if not common["sliceable"]:
            orders = [order for order in orders if order.endswith("N")]
        sizes = [tp for tp in (1, 2, 3, 4, 6, 8) if heads % tp == 0 or tp % heads == 0]
        cuts = sorted(draw(st.sets(st.integers(1, layer_count - 1)))) if layer_count > 1 else []
        edges = [0, *cuts, layer_count]
        return Engine(
            **common,
            tp=draw(st.sampled_from(sizes)),
            order=draw(st.sampled_from(orders)),
            stages=tuple(end - start for start, end in itertools.pairwise(edges)),
        )

    return side(), side()


@settings(max_examples=120, deadline=None)
@given(pairs_of_engines(), st.permutations(range(6)), st.permutations(range(6)), st.integers(1, 6), st.data())
def test_any_two_layouts_of_one_model_exchange_a_prompt(engines, from_order, to_order, count, data):
    cached = data.draw(st.integers(0, count))
    transfer(*engines, from_order[:count], to_order[: count - cached], cached_blocks=cached)


@settings(max_examples=100, deadline=None)
@given(pairs_of_engines(), st.text(max_size=20), st.booleans())
def test_both_sides_agree_who_is_done_with_whom(engines, transfer_id, cached):
    plan = pair_of(*engines).request(transfer_id, 8, 8 if cached else 0)
    prefill, decode = build(engines[0]), build(engines[1])
    for rank in range(len(prefill)):
        read_by = {leg.decode_rank for leg in plan.legs_of_prefill(rank)}
        assert plan.readers(rank) == (read_by or {plan.releasers[rank]})
        named = [other for other in range(len(decode)) if rank in plan.releases_of(other)]
        assert len(named) == (not read_by), "released by one word if nobody reads it, else by its readers"
    for rank in range(len(decode)):
        legs = plan.legs_of_decode(rank)
        assert plan.writers(rank) == {leg.prefill_rank for leg in legs}
        assert len(legs) == len(plan.writers(rank)), "one leg for each pair of ranks"
        assert bool(legs) is not cached


def test_neighbouring_blocks_heads_and_layers_become_one_run():
    whole = Engine(order=BLOCK_INTERLEAVED, blocks=6, stages=(3,))
    assert transfer(whole, whole, [1, 2, 3], [3, 4, 5]) == 1
    assert transfer(whole, whole, [1, 2, 4], [3, 4, 5]) == 2
    heads_outer = Engine(order=HEADS_OUTER, stages=(3,))
    assert transfer(heads_outer, heads_outer, [1, 2, 3], [3, 4, 5]) == 3, "one for each layer"


def test_all_blocks_of_all_layers_become_one_run_when_both_caches_are_whole():
    engine = Engine(order=HEADS_OUTER, stages=(3,), blocks=3)
    assert transfer(engine, engine, [0, 1, 2], [0, 1, 2]) == 1


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ({"heads": 1, "tp": 8}, {"heads": 1, "tp": 1}),
        ({"heads": 1, "tp": 8}, {"heads": 1, "tp": 3}),
        ({"heads": 4, "tp": 8}, {"heads": 4, "tp": 4}),
        ({"heads": 4, "tp": 16}, {"heads": 4, "tp": 2}),
        ({"heads": 1, "tp": 4, "stages": (1, 1)}, {"heads": 1, "tp": 2}),
    ],
)
def test_replicas_carry_equal_load_over_many_transfers(prefill, decode):
    pair = pair_of(Engine(**prefill), Engine(**decode))
    load = Counter(dict.fromkeys(pair.prefill_ranks, 0))
    for number in range(1000):
        for leg in pair.request(f"transfer-{number}", 8, 0).legs:
            load[leg.prefill_rank] += leg.head_count * len(leg.layers)
    assert max(load.values()) <= 1.2 * sum(load.values()) / len(load)
    assert min(load.values()) >= 0.8 * sum(load.values()) / len(load)


def test_readers_of_one_transfer_spread_over_the_replicas():
    pair = pair_of(Engine(heads=1, tp=8), Engine(heads=1, tp=4))
    for number in range(50):
        plan = pair.request(f"transfer-{number}", 8, 0)
        assert len({leg.prefill_rank for leg in plan.legs}) == 4


def test_ranks_that_nobody_reads_are_released_by_decode_ranks_in_turn():
    pair = pair_of(Engine(heads=1, tp=8), Engine(heads=1, tp=4))
    plan = pair.request("whole-prompt-cached", 8, 8)
    assert plan.legs == ()
    assert sorted(plan.releasers) == list(range(8))
    assert sorted(Counter(plan.releasers.values()).values()) == [2, 2, 2, 2]
    assert [plan.writers(rank) for rank in range(4)] == [frozenset()] * 4


def test_the_plan_is_the_same_in_every_process():
    legs = pair_of(Engine(heads=1, tp=4), Engine(heads=1, tp=2)).request("a-fixed-name", 8, 0).legs
    assert [(leg.prefill_rank, leg.decode_rank) for leg in legs] == [(1, 0), (2, 1)]


def test_cached_tokens_are_whole_blocks():
    pair = pair_of(Engine(), Engine())
    with pytest.raises(ValueError, match="whole number of blocks"):
        pair.request("t", 8, 3)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": "other"}, "different models"),
        ({"heads": 8}, "number of KV heads differs"),
        ({"parts": ("k", "v")}, "in one and k, v in the other"),
        ({"content": 8}, "bytes in the other"),
        ({"sliceable": False}, "arranged differently"),
        ({"stages": (3,)}, "prefill side does not have layer 2"),
        ({"stages": (1,)}, "decode side does not have layer 1"),
    ],
)
def test_engines_that_cannot_work_together_are_refused_with_both_layouts_and_the_reason(changes, reason):
    decode = changed(Engine(tp=2), **changes)
    with pytest.raises(LayoutMismatch, match=reason) as refusal:
        pair_of(Engine(), decode)
    message = str(refusal.value)
    assert "prefill-1 (TP 1, 4 KV heads" in message
    assert "decode-1 (TP 2," in message


def test_blocks_of_different_sizes_that_must_stay_whole_are_refused():
    with pytest.raises(LayoutMismatch, match=r"block sizes differ \(4 and 8 tokens\) and blocks of layer 0"):
        pair_of(Engine(sliceable=False), Engine(sliceable=False, block_size=8))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"cp_size": 2}, "says that 2 ranks split the tokens, and its engine has 1"),
        ({"first_kv_head": 2}, "holds KV heads 2 to 5, but the model has 4"),
        ({"kv_head_count": 3}, "no rank of the decode side holds KV head 3 of layer 0"),
        ({"kv_head_count": 0}, "says that it holds 0 KV heads"),
    ],
)
def test_a_shard_that_cannot_be_right_is_refused(changes, reason):
    (entry,) = directory(Engine()).ranks
    wrong = msgspec.structs.replace(entry, shard=msgspec.structs.replace(entry.shard, **changes))
    decode = msgspec.structs.replace(directory(Engine()), ranks=(wrong,))
    with pytest.raises(LayoutMismatch, match=reason):
        plan_pair(directory(Engine()), decode)


def test_prefill_ranks_that_overlap_without_being_replicas_are_refused():
    prefill = directory(Engine(tp=2))
    second = prefill.ranks[1]
    wide = msgspec.structs.replace(second.shard, first_kv_head=1, kv_head_count=3)
    ranks = (prefill.ranks[0], msgspec.structs.replace(second, shard=wide))
    with pytest.raises(LayoutMismatch, match="without being replicas"):
        plan_pair(msgspec.structs.replace(prefill, ranks=ranks), directory(Engine()))


def test_a_block_outside_the_cache_is_never_copied():
    shard = directory(Engine()).ranks[0].shard
    leg = Leg(prefill_rank=0, decode_rank=0, first_kv_head=0, head_count=4, layers=(0, 1))
    with pytest.raises(ValueError, match="block 6 is not one of the 6 blocks of the decode rank"):
        copies(leg, shard, shard, [0], [6], range(4))
    with pytest.raises(ValueError, match="block -1 is not one"):
        copies(leg, shard, shard, [-1], [0], range(4))
    with pytest.raises(
        ValueError, match="1 blocks of the decode rank were given where the tokens reach into block 2"
    ):
        copies(leg, shard, shard, [0, 1], [0], range(8))


def test_one_layer_of_a_leg_can_be_moved_by_itself():
    rank, target = build(Engine(stages=(3,)))[0], build(Engine(stages=(3,)))[0]
    write_prompt([rank], Engine(stages=(3,)), [2])
    leg = Leg(prefill_rank=0, decode_rank=0, first_kv_head=0, head_count=4, layers=(0, 1, 2))
    run(copies(leg, rank.entry.shard, target.entry.shard, [2], [3], range(4), layers=[1]))
    assert (target.views[1, "kv"][3] == rank.views[1, "kv"][2]).all()
    assert (target.views[0, "kv"] == UNTOUCHED).all()
    assert (target.views[2, "kv"] == UNTOUCHED).all()


@given(st.lists(st.integers(1, 50), max_size=20), st.integers(1, 5), st.integers(1, 30) | st.none())
def test_batches_hold_the_same_bytes_within_both_limits(lengths, max_count, max_bytes):
    sizes = np.array(lengths, dtype=np.int64)
    starts = np.cumsum(sizes) - sizes
    whole = Copies(starts * 3, starts, sizes)
    batches = list(whole.split(max_count, max_bytes))
    assert all(1 <= len(batch) <= max_count for batch in batches)
    assert max_bytes is None or all(batch.bytes <= max_bytes for batch in batches)
    bytes_moved = [
        (source + offset, target + offset)
        for batch in batches
        for source, target, length in zip(
            batch.source_addresses, batch.target_addresses, batch.lengths, strict=True
        )
        for offset in range(length)
    ]
    assert bytes_moved == [
        (3 * start + offset, start + offset)
        for start, size in zip(starts, sizes, strict=True)
        for offset in range(size)
    ]


def test_joined_pieces_keep_every_byte_and_lose_the_seams():
    one = Copies(np.array([100]), np.array([500]), np.array([10]))
    next_to_it = Copies(np.array([110]), np.array([510]), np.array([5]))
    elsewhere = Copies(np.array([115]), np.array([600]), np.array([5]))
    joined = join([elsewhere, next_to_it, one])
    assert joined.lengths.tolist() == [15, 5]
    assert joined.bytes == 20
