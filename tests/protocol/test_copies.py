"""The copies of a plan move what a decode rank needs, every byte and nothing else, whatever the layouts."""

import itertools
from dataclasses import replace as changed

import msgspec
import numpy as np
import pytest
from dfirst.protocol.copies import Copies, copies, join
from dfirst.protocol.plan import Leg
from dfirst.protocol.shards import CacheGroup, Shard
from hypothesis import given, settings
from hypothesis import strategies as st

from .drawn_layouts import transfers
from .layouts import (
    BLOCK_INTERLEAVED,
    HEADS_OUTER,
    TOKENS_OUTER,
    UNTOUCHED,
    Engine,
    Transfer,
    directory,
    run,
    transfer,
)
from .table import PAIRS

MLA = {"heads": 1, "content": 4}


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
    transfer(prefill, decode, prompt=11, cached=4)


@settings(max_examples=50, deadline=None)
@given(transfers(), st.integers(0, 1000))
def test_any_two_layouts_of_one_model_exchange_a_prompt(drawn, seed):
    prefill, decode, prompt, cached, transfer_id = drawn
    transfer(prefill, decode, prompt, cached, transfer_id=transfer_id, seed=seed)


@pytest.mark.parametrize(("prefill", "decode"), PAIRS)
@pytest.mark.parametrize(("prompt", "cached_blocks"), [(150, 0), (97, 1), (5, 0), (64, 9)])
def test_every_pair_of_the_table_exchanges_a_prompt(prefill, decode, prompt, cached_blocks):
    engines = [changed(engine, blocks=engine.blocks_for(prompt) + 2) for engine in (prefill, decode)]
    cached = min(cached_blocks, prompt // decode.virtual_block_size) * decode.virtual_block_size
    transfer(*engines, prompt, cached)


# Mistakes measured in other connectors


@pytest.mark.parametrize("interleave", [0, 1])
def test_the_layers_of_every_pipeline_stage_arrive_from_ranks_that_split_the_tokens(interleave):
    prefill = Engine(**MLA, tp=4, dcp=2, stages=(1, 1), interleave=interleave)
    transfer(prefill, Engine(**MLA, stages=(2,)), prompt=23)
    transfer(prefill, Engine(**MLA, tp=2, stages=(1, 1)), prompt=23)


@pytest.mark.parametrize("cached", [2, 4, 6, 10, 14])
@pytest.mark.parametrize("interleave", [8, 2, 1])
def test_tokens_keep_their_places_when_the_cached_prefix_ends_inside_a_larger_block_that_is_split(
    cached, interleave
):
    prefill = Engine(**MLA, tp=2, dcp=2, block_size=8, interleave=interleave)
    transfer(prefill, Engine(**MLA, block_size=2, blocks=16), prompt=25, cached=cached)
    transfer(prefill, Engine(**MLA, tp=2, dcp=2, block_size=1, blocks=16), prompt=25, cached=cached)


@pytest.mark.parametrize("order", [HEADS_OUTER, TOKENS_OUTER])
def test_heads_that_overlap_without_one_side_containing_the_other(order):
    for one, other in itertools.permutations((3, 2)):
        engines = (Engine(heads=6, tp=one, order=order), Engine(heads=6, tp=other, order=order))
        transfer(*engines, prompt=9)


def test_one_block_read_in_several_pieces_comes_from_and_goes_to_the_right_places():
    prefill, decode = Engine(heads=4, tp=4, block_size=8), Engine(heads=4, tp=1, block_size=2, blocks=16)
    made = Transfer(prefill, decode, prompt=8, blocks=([3], [7, 1, 0, 5]))
    source, target = made.sources[2].entry.shard, made.targets[0].entry.shard
    (leg,) = made.plan.legs_of_prefill(2)
    moves = made.copies_of(leg, range(2, 6), layers=[1])
    region, own = source.regions[1], target.regions[1]
    assert (moves.source_addresses - region.base_address - 3 * region.block_stride_bytes).tolist() == [12, 24]
    assert (moves.target_addresses - own.base_address - 2 * own.head_stride_bytes).tolist() == [
        1 * own.block_stride_bytes,
        0 * own.block_stride_bytes,
    ]


# What a range of tokens moves


def test_a_prompt_in_two_ranges_arrives_whole_wherever_the_first_one_ends():
    prefill = Engine(**MLA, tp=4, dcp=2, block_size=4, interleave=2)
    decode = Engine(**MLA, tp=3, dcp=3, block_size=6, interleave=3)
    for middle in range(1, 21):
        made = Transfer(prefill, decode, prompt=21)
        for leg in made.plan.legs:
            for tokens in (range(middle), range(middle, 21)):
                run(made.copies_of(leg, tokens), made.sources, made.targets, made.written)
        made.check()


def test_a_token_that_is_not_in_the_range_is_not_touched():
    prefill, decode = Engine(**MLA, block_size=8), Engine(**MLA, block_size=4)
    made = Transfer(prefill, decode, prompt=16, blocks=([0, 1], [0, 1, 2, 3]))
    (leg,) = made.plan.legs
    run(made.copies_of(leg, range(5, 7)), made.sources, made.targets, made.written)
    view = made.targets[0].views[0, "kv"]
    assert (view[1, 0, [0, 3]] == UNTOUCHED).all()
    assert (view[1, 0, [1, 2]] == made.sources[0].views[0, "kv"][0, 0, [5, 6]]).all()


def test_the_last_block_moves_whole_where_it_is_the_same_block_on_both_sides():
    engine = Engine(heads=4, order=HEADS_OUTER, stages=(1,))
    assert transfer(engine, engine, prompt=6, blocks=([2, 4], [1, 5])) == 2, "one run a block, not one a head"


def test_a_range_without_tokens_moves_nothing():
    made = Transfer(Engine(), Engine(), prompt=4)
    (leg,) = made.plan.legs
    assert len(made.copies_of(leg, range(4, 4))) == 0
    assert len(made.copies_of(leg, range(8, 4))) == 0


def test_one_layer_of_a_leg_can_be_moved_by_itself():
    engine = Engine(stages=(3,))
    made = Transfer(engine, engine, prompt=4, blocks=([2], [3]))
    (leg,) = made.plan.legs
    run(made.copies_of(leg, range(4), layers=[1]), made.sources, made.targets, made.written)
    views = made.targets[0].views
    assert (views[1, "kv"][3] == made.sources[0].views[1, "kv"][2]).all()
    assert (views[0, "kv"] == UNTOUCHED).all()
    assert (views[2, "kv"] == UNTOUCHED).all()


def test_layers_of_several_cache_groups_have_block_lists_of_their_own():
    made, shards = with_two_groups(CacheGroup(4))
    (leg,) = made.plan.legs
    with pytest.raises(ValueError, match="0 blocks of the prefill rank were given"):
        copies(leg, *shards, [0, 1], [2, 3], range(8))
    views = made.sources[0].views
    views[1, "kv"][4:6] = views[1, "kv"][0:2]
    moves = copies(leg, *shards, {0: [0, 1], 1: [4, 5]}, {0: [2, 3], 1: [0, 1]}, range(8))
    run(moves, made.sources, made.targets, made.written)
    got = made.targets[0].views
    assert (got[0, "kv"][2:4] == views[0, "kv"][0:2]).all()
    assert (got[1, "kv"][0:2] == views[1, "kv"][4:6]).all()
    assert (got[1, "kv"][2:4] == UNTOUCHED).all()


def with_two_groups(second: CacheGroup) -> tuple[Transfer, list[Shard]]:
    """A prompt of two blocks of four tokens, and shards whose second layer is in a group of its own."""
    engine = Engine(stages=(2,))
    made = Transfer(engine, engine, prompt=8, blocks=([0, 1], [2, 3]))
    shards = []
    for rank in (made.sources[0], made.targets[0]):
        shard = rank.entry.shard
        one, other = shard.regions
        regions = (one, msgspec.structs.replace(other, group=1))
        shards.append(msgspec.structs.replace(shard, regions=regions, groups=(CacheGroup(4), second)))
    return made, shards


def test_groups_may_have_blocks_of_different_sizes():
    made, shards = with_two_groups(CacheGroup(2))
    (leg,) = made.plan.legs
    views = made.sources[0].views
    views[1, "kv"][2:6, :, :2] = [[[[block * 10 + slot] * 6 for slot in (0, 1)]] * 4 for block in range(2, 6)]
    moves = copies(leg, *shards, {0: [0, 1], 1: [5, 2, 4, 3]}, {0: [2, 3], 1: [0, 1, 2, 3]}, range(8))
    run(moves, made.sources, made.targets, made.written)
    got = made.targets[0].views[1, "kv"]
    assert got[:, 0, :2, 0].tolist() == [[50, 51], [20, 21], [40, 41], [30, 31], *[[UNTOUCHED] * 2] * 2]


def test_blocks_out_of_a_window_are_neither_read_nor_written():
    made, shards = with_two_groups(CacheGroup(4, window=3))
    (leg,) = made.plan.legs
    moves = copies(leg, *shards, {0: [0, 1], 1: [0, 1]}, {0: [2, 3], 1: [0, 4]}, range(8), layers=[1])
    assert len(moves) == 1
    run(moves, made.sources, made.targets, made.written)
    got = made.targets[0].views[1, "kv"]
    assert (got[4] == made.sources[0].views[1, "kv"][1]).all()
    assert (got[:4] == UNTOUCHED).all()
    with pytest.raises(ValueError, match="given away blocks of tokens from 5 on"):
        copies(leg, *shards, {0: [0, 1], 1: [0, 0]}, {0: [2, 3], 1: [0, 4]}, range(8))
    given_away = copies(leg, *shards, {0: [0, 1], 1: [0, 1]}, {0: [2, 3], 1: [5, 4]}, range(8), layers=[1])
    assert given_away.bytes == moves.bytes, "what is out of the window is not needed"


# Blocks that must stay whole


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ({}, {"tp": 2}),
        ({"tp": 8, "dcp": 2}, {"tp": 4, "pcp": 2}),
        ({"tp": 8, "dcp": 2}, {}),
        ({"tp": 8, "dcp": 2, "interleave": 2}, {"tp": 4, "pcp": 2, "interleave": 2}),
    ],
)
def test_blocks_that_must_stay_whole_move_as_slabs(prefill, decode):
    engines = [Engine(sliceable=False, blocks=12, **changes) for changes in (prefill, decode)]
    transfer(*engines, prompt=29)
    transfer(*engines, prompt=29, cached=engines[1].virtual_block_size)


def test_a_range_that_begins_inside_a_block_that_must_stay_whole_is_refused():
    made = Transfer(Engine(sliceable=False), Engine(sliceable=False), prompt=8)
    (leg,) = made.plan.legs
    with pytest.raises(ValueError, match="tokens 2 to 7 begin inside a block"):
        made.copies_of(leg, range(2, 8))


# Blocks and shards that cannot be what a peer says


def test_a_block_outside_the_cache_is_never_copied():
    shard = directory(Engine()).ranks[0].shard
    leg = Leg(prefill_rank=0, decode_rank=0, first_kv_head=0, head_count=4, layers=(0, 1))
    with pytest.raises(ValueError, match="block 6 is not one of the 6 blocks of the decode rank"):
        copies(leg, shard, shard, [0], [6], range(4))
    with pytest.raises(ValueError, match="block -1 is not one of the 6 blocks of the prefill rank"):
        copies(leg, shard, shard, [-1], [0], range(4))
    with pytest.raises(
        ValueError, match="1 blocks of the decode rank were given where the tokens reach into"
    ):
        copies(leg, shard, shard, [0, 1], [0], range(8))


def test_heads_and_layers_that_a_shard_does_not_have_are_never_copied():
    shard = directory(Engine()).ranks[0].shard
    leg = Leg(prefill_rank=0, decode_rank=0, first_kv_head=2, head_count=3, layers=(0,))
    with pytest.raises(ValueError, match="heads 2 to 4 are not in a shard of 4 heads from 0"):
        copies(leg, shard, shard, [0], [1], range(4))
    leg = Leg(prefill_rank=0, decode_rank=0, first_kv_head=0, head_count=4, layers=(0, 7))
    with pytest.raises(ValueError, match="layer 7 is not in both shards"):
        copies(leg, shard, shard, [0], [1], range(4))


# As few runs as the two memories allow


def test_neighbouring_blocks_heads_and_layers_become_one_run():
    whole = Engine(order=BLOCK_INTERLEAVED, stages=(3,))
    assert transfer(whole, whole, prompt=12, blocks=([1, 2, 3], [3, 4, 5])) == 1
    assert transfer(whole, whole, prompt=12, blocks=([1, 2, 4], [3, 4, 5])) == 2
    heads_outer = Engine(order=HEADS_OUTER, stages=(3,))
    moved = transfer(heads_outer, heads_outer, prompt=12, blocks=([1, 2, 3], [3, 4, 5]))
    assert moved == 3, "one for each layer"


def test_all_blocks_of_all_layers_become_one_run_when_both_caches_are_whole():
    engine = Engine(order=HEADS_OUTER, stages=(3,), blocks=3)
    assert transfer(engine, engine, prompt=12, blocks=([0, 1, 2], [0, 1, 2])) == 1


def test_tokens_of_several_small_blocks_that_follow_each_other_become_one_run_of_a_large_one():
    small, large = Engine(**MLA, block_size=2, stages=(1,)), Engine(**MLA, block_size=8, stages=(1,))
    assert transfer(small, large, prompt=8, blocks=([1, 2, 3, 4], [5])) == 1
    assert transfer(small, large, prompt=8, blocks=([1, 2, 4, 5], [5])) == 2


def test_shares_split_alike_move_in_whole_blocks_whatever_the_interleave():
    engine = Engine(**MLA, tp=2, dcp=2, interleave=1, stages=(1,))
    assert transfer(engine, engine, prompt=24, blocks=([0, 1, 2], [3, 4, 5])) == 2, "one for each share"


# Batches


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
