"""What each rank of an engine holds, by its parallel sizes and either convention of context parallelism."""

import pytest
from dfirst.protocol.parallel import ParallelSizes, places


def held(sizes: ParallelSizes, heads: int, *what: str) -> list[tuple[int, ...]]:
    return [tuple(getattr(place, name) for name in what) for place in places(sizes, heads, 4)]


def test_ranks_are_numbered_by_stage_then_context_then_tensor():
    sizes = ParallelSizes(pp=2, pcp=2, tp=2, convention="a")
    found = held(sizes, 2, "rank", "pp_rank", "pcp_rank", "tp_rank", "first_layer", "layer_count")
    assert found == [
        (0, 0, 0, 0, 0, 2),
        (1, 0, 0, 1, 0, 2),
        (2, 0, 1, 0, 0, 2),
        (3, 0, 1, 1, 0, 2),
        (4, 1, 0, 0, 2, 2),
        (5, 1, 0, 1, 2, 2),
        (6, 1, 1, 0, 2, 2),
        (7, 1, 1, 1, 2, 2),
    ]


def test_in_convention_a_both_kinds_of_context_parallelism_split_the_tokens():
    sizes = ParallelSizes(tp=4, pcp=2, dcp=2, convention="a")
    assert held(sizes, 2, "first_kv_head", "cp_rank") == [
        *[(0, 0), (0, 1), (1, 0), (1, 1)],
        *[(0, 2), (0, 3), (1, 2), (1, 3)],
    ]
    assert {place.cp_size for place in places(sizes, 2, 4)} == {4}


def test_in_convention_b_a_group_runs_over_the_context_axis_first():
    whole = ParallelSizes(tp=2, pcp=2, dcp=4, convention="b")
    assert held(whole, 1, "pcp_rank", "tp_rank", "cp_rank") == [(0, 0, 0), (0, 1, 2), (1, 0, 1), (1, 1, 3)]
    axis = ParallelSizes(tp=2, pcp=2, dcp=2, convention="b")
    assert held(axis, 2, "pcp_rank", "first_kv_head", "cp_rank") == [
        (0, 0, 0),
        (0, 1, 0),
        (1, 0, 1),
        (1, 1, 1),
    ]
    alone = ParallelSizes(tp=2, pcp=2, convention="b")
    assert held(alone, 2, "first_kv_head", "cp_rank", "cp_size") == [(0, 0, 1), (1, 0, 1)] * 2


def test_heads_are_split_until_each_rank_has_one():
    assert held(ParallelSizes(tp=2), 6, "first_kv_head", "kv_head_count") == [(0, 3), (3, 3)]
    assert held(ParallelSizes(tp=4), 2, "first_kv_head", "kv_head_count") == [(0, 1), (0, 1), (1, 1), (1, 1)]


def test_layers_are_dealt_out_as_told_or_with_the_rest_in_front_of_the_last_stage():
    def counts(*split: int) -> list[int]:
        return [place.layer_count for place in places(ParallelSizes(pp=4), 1, 10, split)]

    assert counts() == [2, 3, 3, 2]
    assert counts(1, 2, 3, 4) == [1, 2, 3, 4]
    with pytest.raises(ValueError, match="10 layers cannot be split over PP 4 as 5, 5"):
        counts(5, 5)
    with pytest.raises(ValueError, match="one number of layers, at least 1, for each stage"):
        counts(0, 5, 3, 2)


@pytest.mark.parametrize(
    ("sizes", "heads", "reason"),
    [
        ({"tp": 3}, 4, "4 KV heads cannot be split over TP 3: one must divide the other"),
        ({"tp": 4, "dcp": 2}, 4, "DCP 2 needs a multiple of 2 TP ranks that hold the same KV heads"),
        ({"tp": 8, "dcp": 3}, 1, "of TP 8 with 1 KV heads 8 do"),
        ({"tp": 4, "pcp": 2, "dcp": 4, "convention": "b"}, 1, "use 1, 2 or 8"),
        ({"tp": 2, "pcp": 2, "dcp": 4, "convention": "b"}, 2, "TP ranks that hold different KV heads"),
        ({"tp": 0}, 1, "TP 0 is no number of ranks"),
        ({}, 0, "0 KV heads are no model"),
        ({"convention": "c"}, 1, "convention c is not known: use a or b"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused_in_a_sentence(sizes, heads, reason):
    with pytest.raises(ValueError, match=reason):
        places(ParallelSizes(**sizes), heads, 4)


def test_sizes_are_told_in_words():
    assert str(ParallelSizes(tp=2)) == "TP 2"
    assert str(ParallelSizes(tp=8, pp=2, pcp=2, dcp=4, convention="a")) == (
        "TP 8, PP 2, PCP 2, DCP 4 (convention a)"
    )
