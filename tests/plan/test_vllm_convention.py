"""What ``definition.py`` says of convention b, held against the code of the installed vLLM.

Process groups come from vLLM's own ``initialize_model_parallel`` (in a pretended world, where groups are
written down instead of made), slots from its own kernels (run by Triton's interpreter), heads from its own
loading of K's weights.
"""

import itertools
import types
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
import vllm.config
import vllm.distributed.parallel_state as parallel_state
import vllm.model_executor.layers.linear as linear
from pydantic import ValidationError
from triton.runtime import interpreter
from vllm.config import ParallelConfig
from vllm.v1.worker import block_table as first_runner
from vllm.v1.worker.gpu import block_table as second_runner

from .definition import DCP_SPANS_PCP, Group, Parallel, splits_heads

BLOCK_SIZE = 4
TOKENS = 53
TABLE = (7, 3, 9, 5, 1, 0, 8, 2, 4, 6, 11, 10, 13, 12)

TP_SIZES = (1, 2, 3, 4, 6, 8)
PCP_SIZES = (1, 2, 3, 4)
DCP_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
LAYOUTS = [
    (tp, pcp, dcp)
    for tp, pcp, dcp in itertools.product(TP_SIZES, PCP_SIZES, DCP_SIZES)
    if (tp % dcp == 0 if pcp == 1 else dcp in (1, pcp, tp * pcp))
]


def parallel_of(
    tp: int, pcp: int, dcp: int, stages: int = 1, heads: int = 1, interleave: int = 1
) -> Parallel:
    return Parallel(
        heads=heads,
        stages=(1,) * stages,
        groups=(Group(tuple(range(stages)), BLOCK_SIZE),),
        tp=tp,
        pcp=pcp,
        dcp=dcp,
        interleave=interleave,
        convention=DCP_SPANS_PCP,
    )


def vllm_groups(tp: int, pcp: int, dcp: int, stages: int, dp: int) -> dict[str, list[list[int]]]:
    """Return the ranks of every process group that vLLM would make, by the name of the kind of group."""
    made: dict[str, list[list[int]]] = {}

    def write_down(group_ranks: list[list[int]], *_: object, group_name: str, **__: object) -> object:
        made[group_name] = group_ranks
        return SimpleNamespace(rank_in_group=0)

    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            data_parallel_size=dp, enable_elastic_ep=False, enable_eplb=False, use_all2all=False
        ),
        engram_config=None,
        model_config=None,
    )
    world = SimpleNamespace(local_rank=0, device_group=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "is_initialized", lambda: True)
        patch.setattr(torch.distributed, "get_world_size", lambda: tp * pcp * stages * dp)
        patch.setattr(torch.distributed, "get_rank", lambda: 0)
        patch.setattr(torch.distributed, "get_backend", lambda _: "gloo")
        patch.setattr(vllm.config, "get_current_vllm_config", lambda: config)
        patch.setattr(parallel_state, "get_world_group", lambda: world)
        patch.setattr(parallel_state, "init_model_parallel_group", write_down)
        for name in ("_TP", "_ETP", "_ENGRAM_DP", "_DCP", "_PCP", "_PP", "_DP", "_EP", "_EPLB"):
            patch.setattr(parallel_state, name, None)
        parallel_state.initialize_model_parallel(tp, stages, pcp, dcp, "gloo")
    return made


@pytest.mark.parametrize("tp", TP_SIZES)
def test_the_layouts_of_this_test_are_those_that_vllm_accepts(tp: int) -> None:
    accepted = []
    for pcp, dcp in itertools.product(PCP_SIZES, DCP_SIZES):
        try:
            ParallelConfig(
                tensor_parallel_size=tp,
                prefill_context_parallel_size=pcp,
                decode_context_parallel_size=dcp,
                distributed_executor_backend="mp",
            )
        except ValidationError:
            continue
        accepted.append((tp, pcp, dcp))
    assert accepted == [layout for layout in LAYOUTS if layout[0] == tp]


@pytest.mark.parametrize(("stages", "dp"), [(1, 1), (2, 1), (3, 2)])
@pytest.mark.parametrize("tp", TP_SIZES)
def test_a_ranks_part_of_the_tokens_is_its_place_in_vllms_dcp_group(tp: int, stages: int, dp: int) -> None:
    for pcp, dcp in (layout[1:] for layout in LAYOUTS if layout[0] == tp):
        ours = parallel_of(tp, pcp, dcp, stages)
        groups = vllm_groups(tp, pcp, dcp, stages, dp)
        everybody = list(range(dp * ours.rank_count))
        assert sorted(rank for group in groups["dcp"] for rank in group) == everybody
        for group in groups["dcp"]:
            assert [ours.cp_rank(rank % ours.rank_count) for rank in group] == list(range(dcp))
            assert len({ours.place(rank % ours.rank_count)[0] for rank in group}) == 1, "of one stage"
        for kind, axis in (("pp", 0), ("pcp", 1), ("tp", 2)):
            assert sorted(rank for group in groups[kind] for rank in group) == everybody
            for group in groups[kind]:
                places = [ours.place(rank % ours.rank_count) for rank in group]
                assert [place[axis] for place in places] == list(range((stages, pcp, tp)[axis])), kind
                assert len({place[:axis] + place[axis + 1 :] for place in places}) == 1, kind
        for group in groups["dp"]:
            assert len({rank % ours.rank_count for rank in group}) == 1, "the same place in every replica"


@cache
def interpreted(kernel: Callable[..., Any], **replaced: Any) -> Any:
    """Return a kernel of vLLM's for Triton's interpreter; without a GPU vLLM leaves it a plain function."""
    names = {**kernel.__globals__, "tl": tl, "triton": triton, **replaced}
    return interpreter.InterpretedFunction(
        types.FunctionType(kernel.__code__, names, kernel.__name__, kernel.__defaults__)
    )


@pytest.fixture
def _masks_are_bool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter makes small integers of ``~a | b`` and then refuses them as a mask."""
    load = interpreter.InterpreterBuilder.create_masked_load

    def load_with_bool_mask(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        mask.data = mask.data.astype(bool)
        return load(self, pointers, mask, *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_masked_load", load_with_bool_mask)


def slots_of_first_runner(cp_size: int, cp_rank: int, interleave: int) -> list[int]:
    table = torch.tensor([TABLE], dtype=torch.int32)
    out = torch.zeros(TOKENS + 3, dtype=torch.int64)
    interpreted(first_runner.ComputeSlotMappingKernel.kernel)[(2,)](
        TOKENS,
        len(out),
        torch.tensor([0, TOKENS], dtype=torch.int32),
        torch.arange(TOKENS),
        table,
        table.stride(0),
        out,
        KV_CACHE_BLOCK_SIZE=BLOCK_SIZE,
        TOTAL_CP_WORLD_SIZE=cp_size,
        TOTAL_CP_RANK=cp_rank,
        CP_KV_CACHE_INTERLEAVE_SIZE=interleave,
        PAD_ID=first_runner.PAD_SLOT_ID,
        BLOCK_SIZE=64,
    )
    return out[:TOKENS].tolist()


def slots_of_second_runner(cp_size: int, cp_rank: int, interleave: int) -> list[int]:
    table = torch.tensor([TABLE], dtype=torch.int32)
    out = torch.zeros((1, TOKENS + 3), dtype=torch.int64)
    kernel = interpreted(
        second_runner._compute_slot_mappings_kernel, _load_ptr=interpreted(second_runner._load_ptr)
    )
    kernel[(1, 2)](
        out.shape[1],
        torch.tensor([0], dtype=torch.int32),
        torch.tensor([0, TOKENS], dtype=torch.int32),
        torch.arange(TOKENS),
        torch.tensor([table.data_ptr()], dtype=torch.uint64),
        torch.tensor([table.stride(0)]),
        torch.tensor([BLOCK_SIZE], dtype=torch.int32),
        torch.tensor([True]),
        torch.tensor([True]),
        out,
        out.stride(0),
        cp_rank,
        CP_SIZE=cp_size,
        CP_INTERLEAVE=interleave,
        PAD_ID=second_runner.PAD_SLOT_ID,
        TRITON_BLOCK_SIZE=64,
    )
    return out[0, :TOKENS].tolist()


@pytest.mark.usefixtures("_masks_are_bool")
@pytest.mark.parametrize("interleave", [1, 2, 4])
@pytest.mark.parametrize("cp_size", [1, 2, 3, 4, 8])
def test_a_token_lies_where_vllms_kernels_put_it(cp_size: int, interleave: int) -> None:
    ours = parallel_of(cp_size, 1, cp_size, interleave=interleave)
    (group,) = ours.groups
    for rank in range(cp_size):
        expected = [
            TABLE[ours.table_entry(group, token)] * BLOCK_SIZE + ours.slot(group, token)
            if ours.holds_token(rank, token)
            else second_runner.PAD_SLOT_ID
            for token in range(TOKENS)
        ]
        assert slots_of_first_runner(cp_size, ours.cp_rank(rank), interleave) == expected
        assert slots_of_second_runner(cp_size, ours.cp_rank(rank), interleave) == expected


@pytest.fixture(scope="module")
def vllm_config() -> vllm.config.VllmConfig:
    return vllm.config.VllmConfig()


@pytest.mark.parametrize("tp", [*TP_SIZES, 12])
def test_a_rank_holds_the_heads_whose_weights_vllm_gives_it(
    tp: int, vllm_config: vllm.config.VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for heads in (1, 2, 3, 4, 6, 8, 12):
        ours = parallel_of(tp, 1, 1, heads=heads)
        for rank in range(tp):
            monkeypatch.setattr(parallel_state, "_TP", SimpleNamespace(world_size=tp, rank_in_group=rank))
            with vllm.config.set_current_vllm_config(vllm_config):
                if splits_heads(ours):
                    assert loaded_heads(heads) == list(ours.heads_of(rank))
                else:
                    with pytest.raises(AssertionError, match="not divisible"):
                        loaded_heads(heads)


def loaded_heads(heads: int) -> list[int]:
    """Return the KV heads whose weights vLLM's own projection keeps on a rank, of weights that name them."""
    layer = linear.QKVParallelLinear(1, 1, 24 * heads, heads, bias=False, params_dtype=torch.float32)
    layer.weight_loader(layer.weight, torch.arange(heads, dtype=torch.float32)[:, None], "k")
    first = layer.num_heads
    return [int(head) for head in layer.weight[first : first + layer.num_kv_heads, 0]]
