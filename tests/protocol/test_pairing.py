"""Two engines that cannot work together are refused with the reason (``test_plan.py`` plans any others)."""

import time
from dataclasses import replace as changed

import msgspec
import pytest
from dfirst.protocol.pairing import MAX_RANKS, LayoutMismatch, check_pair
from dfirst.protocol.plan import plan_pair
from dfirst.protocol.shards import CacheGroup, Directory, Shard

from .layouts import Engine, directory, pair_of

SPLIT = Engine(heads=1, tp=4, dcp=4)


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


def test_a_refusal_is_short_whatever_a_peer_calls_itself():
    good = directory(Engine())
    loud = msgspec.structs.replace(good, engine_id="e" * 9999, layout="l" * 9999, model="m" * 9999)
    with pytest.raises(LayoutMismatch, match="they serve different models") as refusal:
        plan_pair(good, loud)
    assert len(str(refusal.value)) < 1000


@pytest.mark.parametrize(
    ("decode", "reason"),
    [
        ({"block_size": 8}, r"block sizes differ \(4 and 8 tokens\) and blocks of layer 0"),
        ({"tp": 8, "dcp": 2, "interleave": 2}, "no block of one side holds the same tokens"),
    ],
)
def test_blocks_that_must_stay_whole_and_never_hold_the_same_tokens_are_refused(decode, reason):
    with pytest.raises(LayoutMismatch, match=reason):
        pair_of(Engine(sliceable=False, stages=(1, 1)), Engine(sliceable=False, **decode))


def with_shard(engine: Directory, rank: int, **changes: object) -> Directory:
    """The directory with another shard for one rank."""
    ranks = [
        msgspec.structs.replace(entry, shard=msgspec.structs.replace(entry.shard, **changes))
        if entry.rank == rank
        else entry
        for entry in engine.ranks
    ]
    return msgspec.structs.replace(engine, engine_id=f"{engine.engine_id}-changed", ranks=tuple(ranks))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"cp_size": 2}, "says that 2 ranks split the tokens, and its engine has 1"),
        ({"first_kv_head": 2}, "holds KV heads 2 to 5, but the model has 4"),
        ({"kv_head_count": 3}, "no rank of the decode side holds KV head 3 of layer 0"),
        ({"first_kv_head": 1, "kv_head_count": 3}, "no rank of the decode side holds KV head 0 of layer 0"),
        ({"kv_head_count": 0}, "says that it holds 0 KV heads"),
        ({"first_kv_head": -1}, "says that it holds 4 KV heads from number -1"),
        ({"block_size": 0}, "says that a block has 0 tokens"),
        ({"block_size": 1 << 40}, "says that a block has 1099511627776 tokens"),
        ({"total_kv_heads": 1 << 40}, "says that the model has 1099511627776 KV heads"),
        ({"interleave": 0}, "interleave of 0 tokens"),
        ({"interleave": 3}, "interleave of 3 tokens, which does not divide its blocks of 4"),
        ({"cp_rank": 1}, "number 1 of 1 ranks"),
        ({"convention": "c"}, "convention c of context parallelism"),
        ({"groups": (CacheGroup(4), CacheGroup(6))}, "which does not divide its blocks of 6"),
    ],
)
def test_a_shard_that_cannot_be_right_is_refused(changes, reason):
    with pytest.raises(LayoutMismatch, match=reason):
        plan_pair(directory(Engine()), with_shard(directory(Engine()), 0, **changes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"interleave": 2}, "the interleave is 2 on decode rank 3 and 4 on others"),
        ({"block_size": 8}, "the block size is 8 on decode rank 3 and 4 on others"),
        ({"cp_size": 3, "cp_rank": 0}, "the number of ranks that split the tokens is 3 on decode rank 3"),
        ({"convention": "b"}, "the convention of context parallelism is b on decode rank 3"),
        ({"cp_rank": 2}, "holds the tokens of number 3 of 4 that split them, for KV head 0 of layer 0"),
    ],
)
def test_ranks_of_one_engine_that_contradict_each_other_are_refused(changes, reason):
    decode = with_shard(directory(SPLIT), 3, **changes)
    with pytest.raises(LayoutMismatch, match=reason):
        plan_pair(directory(Engine(heads=1)), decode)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"base_address": -1}, "addresses that cannot be"),
        ({"base_address": 1 << 63}, "addresses that cannot be"),
        ({"block_count": 1 << 60}, "addresses that cannot be"),
        ({"head_stride_bytes": -6}, "addresses that cannot be"),
        ({"content_bytes": 0}, "0 bytes for a token of a head"),
        ({"block_count": 0}, "0 blocks"),
        ({"tokens_sliceable": False, "token_stride_bytes": 12}, "lie 12 bytes apart"),
    ],
)
def test_a_cache_that_cannot_be_is_refused(changes, reason):
    engine = directory(Engine(stages=(1,)))
    (region,) = engine.ranks[0].shard.regions
    wrong = with_shard(engine, 0, regions=(msgspec.structs.replace(region, **changes),))
    with pytest.raises(LayoutMismatch, match=reason):
        plan_pair(engine, wrong)


def test_ranks_that_overlap_without_being_replicas_are_refused():
    wide = with_shard(directory(Engine(tp=2)), 1, first_kv_head=1, kv_head_count=3)
    with pytest.raises(LayoutMismatch, match="prefill ranks 0 and 1 share some layers and heads without"):
        plan_pair(wide, directory(Engine()))
    stages = directory(Engine(stages=(1, 1)))
    both = directory(Engine(stages=(2,))).ranks[0].shard.regions
    with pytest.raises(LayoutMismatch, match="share layer 0 without holding the same layers"):
        plan_pair(directory(Engine()), with_shard(stages, 1, regions=both))


def test_an_engine_without_ranks_or_with_one_twice_is_refused():
    good = directory(Engine())
    for ranks, reason in (((), "no ranks"), (good.ranks * 2, "lists a rank twice")):
        with pytest.raises(LayoutMismatch, match=reason):
            plan_pair(msgspec.structs.replace(good, engine_id="other", ranks=ranks), good)


def test_a_directory_made_to_be_expensive_is_refused_or_planned_quickly():
    entry = directory(Engine(heads=1)).ranks[0]

    def ranks(count: int, shard: Shard) -> tuple:
        made = range(count)
        return tuple(
            msgspec.structs.replace(entry, rank=rank, shard=msgspec.structs.replace(shard, cp_rank=rank))
            for rank in made
        )

    odd = msgspec.structs.replace(entry.shard, cp_size=MAX_RANKS, block_size=1 << 19, interleave=1 << 19)
    engine = directory(Engine(heads=1))
    started = time.thread_time()
    with pytest.raises(LayoutMismatch, match="has 1025 ranks, more than 1024"):
        check_pair(
            engine, msgspec.structs.replace(engine, engine_id="many", ranks=ranks(MAX_RANKS + 1, entry.shard))
        )
    hostile = msgspec.structs.replace(engine, engine_id="odd", ranks=ranks(MAX_RANKS, odd))
    for prefill, decode in ((engine, hostile), (hostile, directory(Engine(heads=1, tp=6, dcp=3)))):
        pair = plan_pair(prefill, decode)
        plan = pair.request("t", 100_000, 0)
        assert plan.readers(pair.prefill_ranks[0])
        plan.writers(pair.decode_ranks[0])
        plan.releases_of(pair.decode_ranks[0])
    assert time.thread_time() - started < 3.0
