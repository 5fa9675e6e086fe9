"""A shard says truthfully where every byte of this rank's caches is, or vLLM's setting is refused by name."""

from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest
import torch
from dfirst.connector.layout import (
    check_share,
    convention_of,
    describe_layout,
    memory_ranges,
    model_fingerprint,
    shard_of,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    KVQuantMode,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

BLOCKS = 5
GQA = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.float32)
MLA = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)


def vllm_config(
    tp: int = 1,
    kv_heads: int = 2,
    pcp: int = 1,
    dcp: int = 1,
    model: str = "/models/tiny",
    interleave: int = 1,
):
    arch = SimpleNamespace(
        total_num_attention_heads=8, total_num_kv_heads=kv_heads, total_num_hidden_layers=3
    )
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=model,
            dtype=torch.float32,
            model_arch_config=arch,
            get_total_num_kv_heads=lambda: arch.total_num_kv_heads,
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=tp,
            pipeline_parallel_size=1,
            prefill_context_parallel_size=pcp,
            decode_context_parallel_size=dcp,
            cp_kv_cache_interleave_size=interleave,
        ),
        cache_config=SimpleNamespace(cache_dtype="auto"),
    )


def cache_config(spec, layers=(0, 1, 2), layout=KVCacheLayout.LBHNC) -> KVCacheConfig:
    names = [f"model.layers.{layer}.self_attn.attn" for layer in layers]
    page, count = spec.page_size_bytes, len(names)
    compact = layout.is_layer_compact
    tensor = KVCacheTensor(
        size=page * BLOCKS * count,
        layers=names,
        layer_stride=page * BLOCKS if compact else page,
        block_stride=page if compact else page * count,
    )
    return KVCacheConfig(BLOCKS, [tensor], [KVCacheGroupSpec(names, spec)])


def caches(config: KVCacheConfig, layout=KVCacheLayout.LBHNC, kernel_block_size=None):
    sizes = None if kernel_block_size is None else [kernel_block_size]
    return allocate_kv_cache(config, torch.device("cpu"), layout, sizes)


def address(region, block: int, head: int, token: int) -> int:
    return (
        region.base_address
        + block * region.block_stride_bytes
        + head * region.head_stride_bytes
        + token * region.token_stride_bytes
    )


@pytest.mark.parametrize("spec", [GQA, MLA], ids=["GQA", "MLA"])
@pytest.mark.parametrize("layout", [KVCacheLayout.LBHNC, KVCacheLayout.BLHNC, KVCacheLayout.LBNHC])
def test_regions_address_the_bytes_that_the_tensors_hold(spec, layout):
    config = cache_config(spec, layout=layout)
    tensors = caches(config, layout)
    shard = shard_of(tensors, vllm_config(), config, tp_rank=0)
    assert shard.block_size == spec.block_size
    assert shard.layers == (0, 1, 2)
    for region, tensor in zip(shard.regions, tensors.values(), strict=True):
        assert region.content_bytes == tensor[0, 0, 0].numel() * tensor.element_size()
        assert region.block_count == BLOCKS
        for place in [(0, 0, 0), (4, 0, 3), (2, spec.num_kv_heads - 1, spec.block_size - 1)]:
            assert address(region, *place) == tensor[place].data_ptr()


def test_blocks_of_cpu_attention_stay_whole_and_latents_may_be_sliced():
    config = cache_config(GQA)
    (first, *_) = shard_of(caches(config), vllm_config(), config, 0).regions
    assert not first.tokens_sliceable
    assert first.part.startswith("kv-"), "the instruction set decides how a block is arranged inside"
    config = cache_config(MLA)
    (first, *_) = shard_of(caches(config), vllm_config(), config, 0).regions
    assert first.tokens_sliceable
    assert first.part == "kv"


@pytest.mark.parametrize(
    ("kv_heads", "tp", "firsts", "count"),
    [(8, 1, [0], 8), (8, 4, [0, 2, 4, 6], 2), (2, 4, [0, 0, 1, 1], 1), (1, 2, [0, 0], 1)],
)
def test_each_rank_holds_the_heads_that_vllm_gives_it(kv_heads, tp, firsts, count):
    config = cache_config(replace(GQA, num_kv_heads=count))
    for rank, first in enumerate(firsts):
        shard = shard_of(caches(config), vllm_config(tp=tp, kv_heads=kv_heads), config, rank)
        assert (shard.total_kv_heads, shard.first_kv_head, shard.kv_head_count) == (kv_heads, first, count)


def test_every_rank_holds_the_latent_of_mla_whole():
    config = cache_config(MLA)
    shard = shard_of(caches(config), vllm_config(tp=8, kv_heads=16), config, tp_rank=5)
    assert (shard.total_kv_heads, shard.first_kv_head, shard.kv_head_count) == (1, 0, 1)


def test_each_rank_holds_the_share_of_the_tokens_that_vllm_gives_it():
    config = cache_config(MLA)
    wide = vllm_config(tp=2, pcp=2, dcp=4, interleave=8)
    shares = []
    for pcp_rank in range(2):
        for tp_rank in range(2):
            shard = shard_of(caches(config), wide, config, tp_rank, pcp_rank)
            assert (shard.cp_size, shard.interleave, shard.convention) == (4, 8, "b")
            shares.append(shard.cp_rank)
    assert shares == [0, 2, 1, 3]
    config = cache_config(replace(GQA, num_kv_heads=1))
    split = vllm_config(tp=4, kv_heads=2, dcp=2)
    shards = [shard_of(caches(config), split, config, rank) for rank in range(4)]
    assert [(shard.first_kv_head, shard.cp_rank) for shard in shards] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert shard_of(caches(config), vllm_config(tp=2, interleave=8), config, 0).interleave == 1


def test_a_share_that_is_not_that_of_vllms_groups_is_refused():
    config = cache_config(MLA)
    shard = shard_of(caches(config), vllm_config(tp=2, pcp=2, dcp=4), config, tp_rank=1, pcp_rank=0)
    check_share(shard, dcp_size=4, dcp_rank=2, pcp_size=2, pcp_rank=0)
    with pytest.raises(ValueError, match=r"number 2 of 4 that split .* make it number 1 of 4"):
        check_share(shard, dcp_size=4, dcp_rank=1, pcp_size=2, pcp_rank=0)
    both = msgspec.structs.replace(shard, cp_size=4, cp_rank=3, convention="a")
    check_share(both, dcp_size=2, dcp_rank=1, pcp_size=2, pcp_rank=1)
    with pytest.raises(ValueError, match=r"number 3 of 4 that split .* make it number 1 of 4"):
        check_share(both, dcp_size=2, dcp_rank=1, pcp_size=2, pcp_rank=0)


@pytest.mark.parametrize(
    ("version", "convention"),
    [("0.13.0rc1", "a"), ("0.29.1", "a"), ("0.30.0", "b"), ("0.32.0+cpu", "b"), ("1.0", "b")],
)
def test_the_convention_is_that_of_the_installed_version(version, convention):
    assert convention_of(version) == convention


def test_a_later_pipeline_stage_keeps_the_models_layer_numbers():
    config = cache_config(GQA, layers=(7, 5, 6))
    assert shard_of(caches(config), vllm_config(), config, 0).layers == (5, 6, 7)


def test_one_storage_is_registered_once():
    config = cache_config(GQA)
    tensors = caches(config)
    assert memory_ranges(tensors) == [
        (next(iter(tensors.values())).data_ptr(), GQA.page_size_bytes * BLOCKS * 3)
    ]


def test_separate_storages_are_registered_each():
    tensors = {str(number): torch.zeros(64) for number in range(3)}
    assert memory_ranges(tensors) == sorted((tensor.data_ptr(), 256) for tensor in tensors.values())


def test_layout_and_model_are_told_in_words():
    config = cache_config(GQA)
    assert describe_layout(vllm_config(tp=2, kv_heads=4), config) == (
        "TP 2, GQA with 4 KV heads, block size 32"
    )
    assert describe_layout(vllm_config(kv_heads=8), config) == "TP 1, MHA with 8 heads, block size 32"
    assert describe_layout(vllm_config(kv_heads=1), config) == "TP 1, MQA, block size 32"
    assert describe_layout(vllm_config(), cache_config(MLA)) == "TP 1, MLA, block size 16"
    assert describe_layout(vllm_config(tp=2, pcp=2, dcp=4, interleave=4), cache_config(MLA)) == (
        "TP 2, PCP 2, DCP 4 (convention b), MLA, block size 16, interleave 4"
    )
    assert (
        model_fingerprint(vllm_config(), config) == "tiny, 3 layers, 2 KV heads of 64, float32, cache float32"
    )


def test_the_place_and_the_parallelism_of_a_model_are_no_part_of_what_it_is():
    config = cache_config(GQA)
    one, other = vllm_config(tp=1), vllm_config(tp=2, model="elsewhere/tiny")
    assert model_fingerprint(one, config) == model_fingerprint(other, config)


WINDOW = SlidingWindowSpec(
    block_size=32, num_kv_heads=2, head_size=64, dtype=torch.float32, sliding_window=128
)


@pytest.mark.parametrize(
    ("spec", "settings", "message"),
    [
        (WINDOW, {}, "SlidingWindowSpec"),
        (replace(GQA, kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD), {}, "INT8_PER_TOKEN_HEAD"),
        (replace(GQA, tokens_per_state=4), {}, "packs 4 tokens"),
        (MLA, {"pcp": 2}, "start it with --decode-context-parallel-size 2"),
        (GQA, {"dcp": 2}, "DCP 2 needs a multiple of 2 TP ranks that hold the same KV heads"),
        (replace(MLA, dcp_sharded=False), {"tp": 2, "dcp": 2}, "every rank holds all tokens of layer model"),
        (GQA, {"kv_heads": 6, "tp": 4}, "6 KV heads cannot be split over TP 4"),
        (GQA, {"kv_heads": 8}, "and the spec says"),
    ],
)
def test_what_is_not_handled_is_refused_by_name(spec, settings, message):
    config = cache_config(GQA)
    tensors = caches(config)
    config.kv_cache_groups[0].kv_cache_spec = spec
    with pytest.raises(ValueError, match=message):
        shard_of(tensors, vllm_config(**settings), config, 0)


def test_two_groups_of_layers_are_refused():
    config = cache_config(GQA)
    config.kv_cache_groups.append(KVCacheGroupSpec(["model.layers.9.self_attn.attn"], WINDOW))
    with pytest.raises(ValueError, match="2 KV cache groups"):
        shard_of({}, vllm_config(), config, 0)


def test_kernel_blocks_smaller_than_blocks_are_refused():
    config = cache_config(replace(GQA, block_size=64))
    with pytest.raises(ValueError, match="--block-size 32"):
        shard_of(caches(config, kernel_block_size=32), vllm_config(), config, 0)


def test_tensors_of_another_shape_are_refused():
    config = cache_config(GQA)
    flat = {name: cache.flatten(2) for name, cache in caches(config).items()}
    with pytest.raises(ValueError, match="instead of"):
        shard_of(flat, vllm_config(), config, 0)
    turned = {
        name: torch.zeros(BLOCKS, 2, 128, 32).transpose(2, 3)
        for name in config.kv_cache_groups[0].layer_names
    }
    with pytest.raises(ValueError, match="not contiguous"):
        shard_of(turned, vllm_config(), config, 0)


def test_two_caches_of_one_layer_number_are_refused():
    config = cache_config(GQA)
    tensors = caches(config)
    config.kv_cache_groups[0].layer_names.append("draft.layers.0.self_attn.attn")
    tensors["draft.layers.0.self_attn.attn"] = tensors["model.layers.0.self_attn.attn"]
    with pytest.raises(ValueError, match="share a number"):
        shard_of(tensors, vllm_config(), config, 0)
