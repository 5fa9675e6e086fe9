"""The core's own way from parallel sizes to ranks, held against the definition for every small layout."""

import itertools

import pytest
from dfirst.protocol.parallel import ParallelSizes, places
from vllm.distributed.utils import get_pp_indices

from .definition import BOTH_SPLIT, DCP_SPANS_PCP, Group, Parallel

SIZES = (1, 2, 3, 4, 6, 8)


@pytest.mark.parametrize("convention", [BOTH_SPLIT, DCP_SPANS_PCP])
@pytest.mark.parametrize("heads", SIZES)
def test_ranks_hold_what_the_definition_says_and_what_cannot_be_split_is_refused(
    heads: int, convention: str
) -> None:
    refused = 0
    for tp, pcp, dcp in itertools.product(SIZES, (1, 2, 3), (*SIZES, 12, 16)):
        ours = Parallel(
            heads=heads,
            stages=(1, 3),
            groups=(Group((0, 1, 2, 3), 4),),
            tp=tp,
            pcp=pcp,
            dcp=dcp,
            convention=convention,
        )
        sizes = ParallelSizes(tp=tp, pp=2, pcp=pcp, dcp=dcp, convention=convention)
        if not ours.allowed:
            refused += 1
            with pytest.raises(ValueError, match=r"TP|DCP"):
                places(sizes, heads, 4, (1, 3))
            continue
        found = places(sizes, heads, 4, (1, 3))
        assert [place.rank for place in found] == list(range(ours.rank_count)) == list(range(sizes.ranks))
        for place in found:
            rank = place.rank
            assert (place.pp_rank, place.pcp_rank, place.tp_rank) == ours.place(rank)
            assert (place.cp_size, place.cp_rank) == (ours.cp_size, ours.cp_rank(rank))
            heads_held = range(place.first_kv_head, place.first_kv_head + place.kv_head_count)
            assert tuple(heads_held) == ours.heads_of(rank)
            layers = range(place.first_layer, place.first_layer + place.layer_count)
            assert tuple(layers) == ours.layers_of(rank)
    assert refused, "some of these sizes do not go together"


@pytest.mark.parametrize("stages", range(1, 9))
def test_layers_are_dealt_out_to_pipeline_stages_as_vllm_does(stages: int) -> None:
    for layers in range(stages, 70):
        found = places(ParallelSizes(pp=stages), 1, layers)
        ends = [(place.first_layer, place.first_layer + place.layer_count) for place in found]
        assert ends == [get_pp_indices(layers, stage, stages) for stage in range(stages)]
