"""Both sides work out the same plan: who has tokens for whom, whose DONE is awaited, who releases whom."""

import time
from collections import Counter

import pytest
from dfirst.protocol.plan import RequestPlan
from hypothesis import given, settings
from hypothesis import strategies as st

from .drawn_layouts import transfers
from .layouts import Engine, directory, held_tokens, pair_of
from .table import PAIRS

LONG = 4096


def check(prefill: Engine, decode: Engine, plan: RequestPlan, prompt: int, cached: int) -> None:
    """Hold a plan against the definition of what ranks hold."""
    readers = {entry.rank: entry.shard for entry in directory(decode).ranks}
    owners = {entry.rank: entry.shard for entry in directory(prefill).ranks}
    for rank, shard in readers.items():
        needed = {
            (layer, shard.first_kv_head + head, token)
            for layer in shard.layers
            for head in range(shard.kv_head_count)
            for token in held_tokens(shard, prompt)
            if token >= cached
        }
        got = Counter()
        for leg in plan.legs_of_decode(rank):
            owner = owners[leg.prefill_rank]
            heads = range(leg.first_kv_head, leg.first_kv_head + leg.head_count)
            tokens = set(held_tokens(owner, prompt)).intersection(held_tokens(shard, prompt))
            tokens = [token for token in tokens if token >= cached]
            assert tokens, "a leg without a token is none"
            assert set(leg.layers) <= set(owner.layers)
            assert heads.start >= owner.first_kv_head
            assert heads.stop <= owner.first_kv_head + owner.kv_head_count
            got.update((layer, head, token) for layer in leg.layers for head in heads for token in tokens)
        assert got == dict.fromkeys(needed, 1), "everything once and nothing else"
        assert plan.writers(rank) == {leg.prefill_rank for leg in plan.legs_of_decode(rank)}
        assert len(plan.writers(rank)) == len(plan.legs_of_decode(rank)), "one leg for a pair of ranks"
    assert {leg.decode_rank for leg in plan.legs} <= set(readers)
    for rank in owners:
        legs = plan.legs_of_prefill(rank)
        assert list(legs) == [leg for leg in plan.legs if leg.prefill_rank == rank]
        named = [reader for reader in readers if rank in plan.releases_of(reader)]
        assert len(named) == (not legs), "released by its readers, or by one that is named"
        assert plan.readers(rank) == {leg.decode_rank for leg in legs} | set(named)
        assert plan.releasers.get(rank) == (named[0] if named else None)


@settings(max_examples=80, deadline=None)
@given(transfers())
def test_every_layer_head_and_token_has_one_leg_and_every_prefill_rank_one_release(drawn):
    prefill, decode, prompt, cached, transfer_id = drawn
    plan = pair_of(prefill, decode).request(transfer_id, prompt, cached)
    check(prefill, decode, plan, prompt, cached)


@pytest.mark.parametrize(("prefill", "decode"), PAIRS)
def test_every_pair_of_the_table_is_released_once_whatever_the_prompt(prefill, decode):
    pair = pair_of(prefill, decode)
    virtual = decode.virtual_block_size
    for prompt in (1, 3, virtual, 2 * virtual + 1, 300):
        for cached in {0, prompt // virtual * virtual}:
            check(prefill, decode, pair.request(f"{prompt}", prompt, cached), prompt, cached)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ({"heads": 1, "tp": 8}, {"heads": 1, "tp": 1}),
        ({"heads": 1, "tp": 8}, {"heads": 1, "tp": 3}),
        ({"heads": 4, "tp": 8}, {"heads": 4, "tp": 4}),
        ({"heads": 4, "tp": 16}, {"heads": 4, "tp": 2}),
        ({"heads": 1, "tp": 4, "stages": (1, 1)}, {"heads": 1, "tp": 2}),
        ({"heads": 6, "tp": 2, "pcp": 2, "convention": "b"}, {"heads": 6, "tp": 3}),
        ({"heads": 1, "tp": 6, "stages": (4,)}, {"heads": 1, "tp": 2, "stages": (3, 1)}),
    ],
)
def test_replicas_carry_equal_load_over_many_transfers(prefill, decode):
    """``tests/plan/test_load.py`` has those of the table."""
    pair = pair_of(Engine(**prefill), Engine(**decode))
    load = Counter(dict.fromkeys(pair.prefill_ranks, 0))
    for number in range(1000):
        for leg in pair.request(f"transfer-{number}", LONG, 0).legs:
            load[leg.prefill_rank] += leg.head_count * len(leg.layers)
    for ranks in pair.replicas:
        carried = [load[rank] for rank in ranks]
        mean = sum(carried) / len(carried)
        assert max(carried) <= 1.2 * mean
        assert min(carried) >= 0.8 * mean


def test_readers_of_one_transfer_spread_over_the_replicas():
    pair = pair_of(Engine(heads=1, tp=8), Engine(heads=1, tp=4))
    for number in range(50):
        plan = pair.request(f"transfer-{number}", 8, 0)
        assert len({leg.prefill_rank for leg in plan.legs}) == 4


def test_large_and_small_readers_are_dealt_out_so_that_replicas_do_the_same_work():
    pair = pair_of(Engine(heads=1, tp=2, stages=(4,)), Engine(heads=1, tp=2, stages=(3, 1)))
    for number in range(20):
        load = Counter()
        for leg in pair.request(f"transfer-{number}", 8, 0).legs:
            load[leg.prefill_rank] += len(leg.layers)
        assert set(load.values()) == {4}


def test_ranks_that_nobody_reads_are_released_by_decode_ranks_in_turn():
    pair = pair_of(Engine(heads=1, tp=8), Engine(heads=1, tp=4))
    plan = pair.request("whole-prompt-cached", 8, 8)
    assert plan.legs == ()
    assert sorted(plan.releasers) == list(range(8))
    assert sorted(Counter(plan.releasers.values()).values()) == [2, 2, 2, 2]
    assert [plan.writers(rank) for rank in range(4)] == [frozenset()] * 4


# Mistakes measured in other connectors


def test_a_decode_rank_without_a_token_of_a_short_prompt_awaits_nobody():
    pair = pair_of(Engine(heads=1), Engine(heads=1, tp=4, dcp=4))
    plan = pair.request("t", 6, 0)
    assert [plan.writers(rank) for rank in range(4)] == [{0}, {0}, set(), set()]
    assert plan.readers(0) == {0, 1}
    assert [plan.releases_of(rank) for rank in range(4)] == [()] * 4


def test_a_prefill_rank_awaits_only_those_that_the_cached_prefix_leaves_something_to_read():
    pair = pair_of(Engine(heads=1, tp=4, dcp=4), Engine(heads=1))
    plan = pair.request("t", 16, 0)
    assert [len(plan.legs_of_prefill(rank)) for rank in range(4)] == [1, 1, 1, 1]
    plan = pair.request("t", 16, 8)
    assert [len(plan.legs_of_prefill(rank)) for rank in range(4)] == [0, 0, 1, 1]
    assert plan.writers(0) == {2, 3}
    assert plan.releases_of(0) == (0, 1)


@pytest.mark.parametrize(("prefill", "decode"), PAIRS)
def test_the_replicas_of_a_transfer_are_those_of_its_id_however_long_the_prompt_and_its_cached_part(
    prefill, decode
):
    pair = pair_of(prefill, decode)
    for number in range(10):
        first = pair.request(f"transfer-{number}", LONG, 0).legs
        for prompt in (LONG + 1, 2 * LONG):
            for cached in (0, decode.virtual_block_size):
                assert pair.request(f"transfer-{number}", prompt, cached).legs == first


def test_readers_differ_from_rank_to_rank_of_one_engine():
    plan = pair_of(Engine(heads=2, tp=2), Engine(heads=2, tp=4)).request("t", 8, 0)
    assert plan.readers(0) == {0, 1}
    assert plan.readers(1) == {2, 3}


def test_what_a_rank_is_told_does_not_depend_on_what_it_asked_before():
    prefill, decode = Engine(heads=1, tp=4, dcp=2, pcp=2), Engine(heads=1, tp=2)
    asked = [("a", 3, 0), ("b", 300, 0), ("a", 300, 4), ("a", 3, 0), ("b", 5, 4), ("b", 300, 0)]
    pair = pair_of(prefill, decode)
    for request in asked:
        fresh = pair_of(prefill, decode).request(*request)
        kept = pair.request(*request)
        assert kept.legs_of_prefill(3) == fresh.legs_of_prefill(3)
        assert kept.legs == fresh.legs
        assert kept.releasers == fresh.releasers


def test_the_plan_is_the_same_in_every_process():
    legs = pair_of(Engine(heads=1, tp=4), Engine(heads=1, tp=2)).request("a-fixed-name", 8, 0).legs
    assert [(leg.prefill_rank, leg.decode_rank) for leg in legs] == [(1, 0), (2, 1)]


@given(st.integers(0, 40), st.integers(0, 40))
def test_cached_tokens_are_whole_blocks_of_all_ranks_that_split_the_tokens(prompt, cached):
    pair = pair_of(Engine(heads=1), Engine(heads=1, tp=2, dcp=2))
    if cached % 8:
        with pytest.raises(ValueError, match="whole number of blocks of 8 tokens"):
            pair.request("t", prompt, cached)
    else:
        assert bool(pair.request("t", prompt, cached).legs) is (cached < prompt)


def test_a_plan_of_two_large_engines_costs_a_rank_little():
    prefill = Engine(heads=1, tp=16, pcp=16, dcp=8, stages=(1, 1, 1, 1), blocks=1)
    decode = Engine(heads=1, tp=64, dcp=16, stages=(1, 1, 1, 1), blocks=1)
    pair = pair_of(prefill, decode)
    started = time.thread_time()
    for number in range(100):
        plan = pair.request(f"transfer-{number}", LONG, 0)
        assert plan.writers(17)
        plan.releases_of(17)
    assert time.thread_time() - started < 2.0
