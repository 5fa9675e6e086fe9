"""Who holds a token, and where, is what the definition says, worked out for ranges instead of one by one."""

import numpy as np
from dfirst.protocol.shards import Shard
from dfirst.protocol.shares import Shares, split_of
from dfirst.protocol.tokens import blocks_needed, common_pieces, common_runs, places_of
from hypothesis import given, settings
from hypothesis import strategies as st

from .layouts import held_tokens


@st.composite
def shards(draw):
    block_size = draw(st.integers(1, 8))
    cp_size = draw(st.integers(1, 5))
    return Shard(
        total_kv_heads=1,
        first_kv_head=0,
        kv_head_count=1,
        block_size=block_size,
        regions=(),
        cp_size=cp_size,
        cp_rank=draw(st.integers(0, cp_size - 1)),
        interleave=draw(st.sampled_from([i for i in range(1, block_size + 1) if block_size % i == 0])),
    )


@st.composite
def ranges(draw):
    first = draw(st.integers(0, 40))
    return range(first, draw(st.integers(0, 80)))


@settings(max_examples=500)
@given(shards(), shards(), ranges())
def test_pieces_are_the_common_tokens_each_in_one_block_of_both(one, other, tokens):
    places = [{token: place for place, token in enumerate(held_tokens(shard, 80))} for shard in (one, other)]
    wanted = [
        (places[0][token], places[1][token]) for token in tokens if token in places[0] and token in places[1]
    ]
    pieces = common_pieces(one, other, tokens)
    got = []
    for source, target, length in zip(*(column.tolist() for column in pieces), strict=True):
        assert length > 0
        assert source // one.block_size == (source + length - 1) // one.block_size
        assert target // other.block_size == (target + length - 1) // other.block_size
        got.extend((source + offset, target + offset) for offset in range(length))
    assert got == wanted


@given(shards(), shards(), ranges())
def test_runs_are_the_common_tokens_in_order(one, other, tokens):
    starts, lengths = common_runs(one, other, tokens)
    got = [start + offset for start, length in zip(starts, lengths, strict=True) for offset in range(length)]
    common = set(held_tokens(one, 80)).intersection(held_tokens(other, 80), tokens)
    assert got == sorted(common)


@given(shards(), st.integers(0, 80))
def test_a_place_is_the_number_of_tokens_held_before(shard, end):
    held = held_tokens(shard, end)
    assert places_of(shard, np.array(held, dtype=np.int64)).tolist() == list(range(len(held)))
    assert blocks_needed(shard, end) == -(-end // (shard.block_size * shard.cp_size))
    assert len(held) <= blocks_needed(shard, end) * shard.block_size


@settings(max_examples=300)
@given(shards(), shards(), ranges())
def test_shares_that_have_a_token_of_a_range_in_common_are_found_without_looking_at_all_tokens(
    one, other, tokens
):
    shares = Shares(split_of(one), split_of(other))
    period = set(held_tokens(one, shares.period)).intersection(held_tokens(other, shares.period))
    assert shares.count(one.cp_rank, other.cp_rank) == len(period)
    assert shares.common(one.cp_rank, other.cp_rank) is bool(period)
    if tokens:
        common = set(held_tokens(one, 80)).intersection(held_tokens(other, 80), tokens)
        for _ in range(2):
            assert shares.window(tokens).common(one.cp_rank, other.cp_rank) is bool(common)
