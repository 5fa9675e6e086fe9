"""From the caches that vLLM hands over to the shard that this rank publishes.

vLLM 0.32 gives one tensor a layer, seen as (blocks, KV heads, tokens, content): K and V of one head and token
are one piece of content, and the strides tell how all of it really lies in memory. Nothing is assumed about
that order. What this file cannot describe truthfully it refuses, with the setting to change.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import PurePath

import torch
import vllm
from vllm.config import VllmConfig
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    KVQuantMode,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)

from ..protocol.parallel import CONVENTION_A, CONVENTION_B, ParallelSizes, check_sizes, place_of
from ..protocol.shards import Region, Shard

_HANDLED_SPECS = (FullAttentionSpec, MLAAttentionSpec)
_HANDLED_QUANTIZATION = (KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR)


def shard_of(
    kv_caches: Mapping[str, torch.Tensor],
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    tp_rank: int,
    pcp_rank: int = 0,
) -> Shard:
    """Return what this rank holds; raise ``ValueError`` naming what is not handled."""
    specs = _specs_of(kv_cache_config)
    total_heads = _total_kv_heads(vllm_config, specs)
    sizes = parallel_sizes(vllm_config)
    check_sizes(sizes, total_heads)
    _check_context_parallelism(sizes, specs)
    # Which layers the rank's stage has is seen in its caches.
    place = place_of(sizes, total_heads, 0, pcp_rank, tp_rank, range(0))
    block_sizes = {spec.block_size for spec in specs.values()}
    if len(block_sizes) != 1:
        raise ValueError(f"layers have different block sizes {sorted(block_sizes)}: set --block-size")
    regions = [
        _region(name, cache, specs[name], kv_cache_config.num_blocks, place.kv_head_count)
        for name, cache in _caches_with_specs(kv_caches, specs)
    ]
    _check_layers_are_distinct(kv_caches, regions)
    return Shard(
        total_kv_heads=total_heads,
        first_kv_head=place.first_kv_head,
        kv_head_count=place.kv_head_count,
        block_size=block_sizes.pop(),
        regions=tuple(sorted(regions, key=lambda region: (region.layer, region.part))),
        cp_size=place.cp_size,
        cp_rank=place.cp_rank,
        interleave=vllm_config.parallel_config.cp_kv_cache_interleave_size if place.cp_size > 1 else 1,
        convention=sizes.convention,
    )


def parallel_sizes(vllm_config: VllmConfig) -> ParallelSizes:
    """Return how one DP replica of the engine is split over ranks."""
    parallel = vllm_config.parallel_config
    return ParallelSizes(
        tp=parallel.tensor_parallel_size,
        pp=parallel.pipeline_parallel_size,
        pcp=parallel.prefill_context_parallel_size,
        dcp=parallel.decode_context_parallel_size,
        convention=convention_of(vllm.__version__),
    )


def convention_of(version: str) -> str:
    """Return by which convention a version of vLLM, and its plug-ins, split the tokens."""
    numbers = [int(number) for number in re.findall(r"\d+", version)[:2]]
    return CONVENTION_B if numbers >= [0, 30] else CONVENTION_A


def check_share(shard: Shard, dcp_size: int, dcp_rank: int, pcp_size: int, pcp_rank: int) -> None:
    """Raise ``ValueError`` if vLLM's process groups give this rank another share of the tokens."""
    size, rank = dcp_size, dcp_rank
    if shard.convention == CONVENTION_A:
        size, rank = dcp_size * pcp_size, pcp_rank * dcp_size + dcp_rank
    if (shard.cp_size, shard.cp_rank) != (size, rank):
        raise ValueError(
            f"this rank is number {shard.cp_rank} of {shard.cp_size} that split the tokens by convention "
            f"{shard.convention}, and vLLM's groups make it number {rank} of {size}: start it without "
            "context parallelism"
        )


def describe_layout(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """Return the layout in words, for messages: ``TP 2, GQA with 4 KV heads, block size 32``."""
    specs = _specs_of(kv_cache_config)
    heads = _total_kv_heads(vllm_config, specs)
    if _is_mla(specs):
        kind = "MLA"
    elif heads == vllm_config.model_config.model_arch_config.total_num_attention_heads:
        kind = f"MHA with {heads} heads"
    else:
        kind = f"GQA with {heads} KV heads" if heads > 1 else "MQA"
    block_size = next(iter(specs.values())).block_size
    sizes = parallel_sizes(vllm_config)
    interleave = vllm_config.parallel_config.cp_kv_cache_interleave_size
    split = f", interleave {interleave}" if sizes.cp_size > 1 else ""
    return f"{sizes}, {kind}, block size {block_size}{split}"


def model_fingerprint(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """Return, readably, what must be equal on both sides for the caches to mean the same.

    Of the model's path only the last part counts: the engines may have it in different places.
    """
    model = vllm_config.model_config
    specs = _specs_of(kv_cache_config)
    spec = next(iter(specs.values()))
    cache_dtype = vllm_config.cache_config.cache_dtype
    return ", ".join(
        [
            PurePath(model.model).name,
            f"{model.model_arch_config.total_num_hidden_layers} layers",
            f"{_total_kv_heads(vllm_config, specs)} KV heads of {spec.head_size}",
            _dtype_name(model.dtype),
            f"cache {_dtype_name(spec.dtype) if cache_dtype == 'auto' else cache_dtype}",
        ]
    )


def memory_ranges(kv_caches: Mapping[str, torch.Tensor]) -> list[tuple[int, int]]:
    """Return the (address, bytes) ranges that hold the caches: each storage once, overlapping ones as one."""
    ranges: list[tuple[int, int]] = []
    storages = {
        (storage.data_ptr(), storage.nbytes())
        for storage in (cache.untyped_storage() for cache in kv_caches.values())
    }
    for address, length in sorted(storages):
        end = ranges[-1][0] + ranges[-1][1] if ranges else 0
        if ranges and address < end:
            ranges[-1] = (ranges[-1][0], max(end, address + length) - ranges[-1][0])
        else:
            ranges.append((address, length))
    return ranges


def flat_tensors(kv_caches: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return the storages that hold the caches as bytes, each once."""
    storages = {storage.data_ptr(): storage for storage in (c.untyped_storage() for c in kv_caches.values())}
    device = next(iter(kv_caches.values())).device
    return [torch.empty(0, dtype=torch.uint8, device=device).set_(storage) for storage in storages.values()]


def _specs_of(kv_cache_config: KVCacheConfig) -> dict[str, AttentionSpec]:
    """Return the spec of each layer; refuse what holds anything else than all tokens of plain attention."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise ValueError(
            f"the model has {len(groups)} KV cache groups and dfirst handles one: start vLLM with "
            "--disable-hybrid-kv-cache-manager, or use a model whose layers all keep the whole context"
        )
    (group,) = groups
    spec = group.kv_cache_spec
    by_name: dict[str, KVCacheSpec]
    if isinstance(spec, UniformTypeKVCacheSpecs):
        by_name = {name: spec.kv_cache_specs[name] for name in group.layer_names}
    else:
        by_name = dict.fromkeys(group.layer_names, spec)
    for name, one in by_name.items():
        _check_spec(name, one)
    return by_name  # type: ignore[return-value]  # all are AttentionSpec now


def _check_spec(name: str, spec: KVCacheSpec) -> None:
    if type(spec) not in _HANDLED_SPECS:
        raise ValueError(
            f"layer {name} has a {type(spec).__name__} and dfirst handles full attention and MLA only: "
            "use another connector for this model"
        )
    assert isinstance(spec, AttentionSpec)
    if spec.kv_quant_mode not in _HANDLED_QUANTIZATION:
        raise ValueError(
            f"layer {name} has a KV cache quantized as {spec.kv_quant_mode.name}, whose scales dfirst does "
            "not move: use --kv-cache-dtype auto or fp8"
        )
    if spec.tokens_per_state != 1 or spec.num_heads != spec.num_kv_heads:
        raise ValueError(
            f"layer {name} packs {spec.tokens_per_state} tokens into a state and {spec.num_kv_heads} KV "
            f"heads into {spec.num_heads} slots, which dfirst does not handle: choose another attention "
            "backend"
        )


def _check_context_parallelism(sizes: ParallelSizes, specs: Mapping[str, AttentionSpec]) -> None:
    if sizes.pcp > 1 and sizes.dcp == 1:
        raise ValueError(
            f"with --prefill-context-parallel-size {sizes.pcp} alone vLLM tells a connector of one rank in "
            f"{sizes.pcp} only: start it with --decode-context-parallel-size {sizes.pcp}"
        )
    whole = next((name for name, spec in specs.items() if not spec.dcp_sharded), None)
    if sizes.cp_size > 1 and whole is not None:
        raise ValueError(
            f"every rank holds all tokens of layer {whole} while {sizes.cp_size} ranks split those of "
            "others, which dfirst does not handle: use the model without its draft model"
        )


def _is_mla(specs: Mapping[str, AttentionSpec]) -> bool:
    return any(isinstance(spec, MLAAttentionSpec) for spec in specs.values())


def _total_kv_heads(vllm_config: VllmConfig, specs: Mapping[str, AttentionSpec]) -> int:
    # The latent of MLA is one head that every rank holds whole, whatever the model's config counts.
    return 1 if _is_mla(specs) else int(vllm_config.model_config.get_total_num_kv_heads())


def _caches_with_specs(
    kv_caches: Mapping[str, torch.Tensor], specs: Mapping[str, AttentionSpec]
) -> Iterator[tuple[str, torch.Tensor]]:
    for name in specs:
        if name not in kv_caches:
            raise ValueError(
                f"vLLM names layer {name} in its cache configuration and hands over no cache for it"
            )
        yield name, kv_caches[name]


def _region(name: str, cache: torch.Tensor, spec: AttentionSpec, block_count: int, head_count: int) -> Region:
    _check_shape(name, cache, spec, block_count, head_count)
    element = cache.element_size()
    block_stride, head_stride, token_stride, _ = (stride * element for stride in cache.stride())
    content = cache.shape[3] * element
    return Region(
        layer=_layer_number(name),
        part=_part(cache, spec),
        base_address=cache.data_ptr(),
        block_count=block_count,
        block_stride_bytes=block_stride,
        head_stride_bytes=head_stride,
        token_stride_bytes=token_stride,
        content_bytes=content,
        # CPU attention keeps K dim-major inside a block: only whole slabs of a head mean anything there.
        tokens_sliceable=not _is_cpu_attention(cache, spec),
    )


def _check_shape(
    name: str, cache: torch.Tensor, spec: AttentionSpec, block_count: int, head_count: int
) -> None:
    shape = tuple(cache.shape)
    if cache.ndim != 4:
        raise ValueError(
            f"the cache of layer {name} has the shape {shape} instead of (blocks, heads, tokens, content): "
            "dfirst needs vLLM 0.32 or a version that hands caches over in the same way"
        )
    if shape[2] != spec.block_size and shape[0] * shape[2] == block_count * spec.block_size:
        raise ValueError(
            f"the attention backend splits blocks of {spec.block_size} tokens into kernel blocks of "
            f"{shape[2]}: start vLLM with --block-size {shape[2]}"
        )
    content = shape[3] * cache.element_size()
    expected = (block_count, head_count, spec.block_size, spec.state_content_size_bytes)
    if (*shape[:3], content) != expected or spec.num_kv_heads != head_count:
        raise ValueError(
            f"the cache of layer {name} has the shape {(*shape[:3], content)} (blocks, heads, tokens, bytes) "
            f"and the spec says {expected}: dfirst does not handle this attention backend"
        )
    if cache.stride(3) != 1:
        raise ValueError(
            f"the cache of layer {name} has the strides {cache.stride()}, so the content of a token is not "
            "contiguous: unset VLLM_KV_CACHE_LAYOUT"
        )


def _layer_number(name: str) -> int:
    try:
        return extract_layer_index(name)
    except AssertionError as error:
        raise ValueError(f"the layer name {name} does not hold one number: {error}") from error


def _check_layers_are_distinct(kv_caches: Mapping[str, torch.Tensor], regions: list[Region]) -> None:
    numbers = [region.layer for region in regions]
    twice = sorted({number for number in numbers if numbers.count(number) > 1})
    if twice:
        names = [name for name in kv_caches if _layer_number(name) in twice]
        raise ValueError(
            f"layers {', '.join(names)} share a number and dfirst tells them apart by it: use the model "
            "without its draft model or indexer"
        )


def _is_cpu_attention(cache: torch.Tensor, spec: AttentionSpec) -> bool:
    return cache.device.type == "cpu" and not isinstance(spec, MLAAttentionSpec)


def _part(cache: torch.Tensor, spec: AttentionSpec) -> str:
    """Name the tensor; on the CPU also the instruction set, which decides how a block is arranged inside."""
    if not _is_cpu_attention(cache, spec):
        return "kv"
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    return f"kv-{_get_attn_isa(spec.dtype, spec.block_size, spec.head_size)}"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
