"""Layouts drawn at random, for Hypothesis: any two that one model can have."""

import itertools

from hypothesis import strategies as st

from .layouts import Engine

ORDERS = ["".join(order) for order in itertools.permutations("LBHN")]


@st.composite
def engines(draw, common: dict, layer_count: int, block_sizes: list[int], orders: list[str] = ORDERS):
    """An engine of a model with these heads and so many layers."""
    heads = common["heads"]
    tp = draw(st.sampled_from([tp for tp in (1, 2, 3, 4, 6, 8) if heads % tp == 0 or tp % heads == 0]))
    alike = max(1, tp // heads)
    convention = draw(st.sampled_from("ab"))
    pcp = draw(st.sampled_from([1, 1, 2, 3]))
    dcps = [dcp for dcp in range(1, alike + 1) if alike % dcp == 0]
    if convention == "b" and pcp > 1:
        dcps = [1, pcp] + ([tp * pcp] if alike == tp else [])
    block_size = draw(st.sampled_from(block_sizes))
    cuts = sorted(draw(st.sets(st.integers(1, layer_count - 1)))) if layer_count > 1 else []
    return Engine(
        **common,
        tp=tp,
        pcp=pcp,
        dcp=draw(st.sampled_from(dcps)),
        convention=convention,
        interleave=draw(st.sampled_from([i for i in range(1, block_size + 1) if block_size % i == 0])),
        block_size=block_size,
        order=draw(st.sampled_from(orders)),
        stages=tuple(end - start for start, end in itertools.pairwise([0, *cuts, layer_count])),
        blocks=24,
    )


@st.composite
def pairs(draw):
    """A prefill and a decode engine whose tokens can be sliced: nothing else may keep them apart."""
    common = {
        "heads": draw(st.sampled_from([1, 1, 2, 3, 4, 6])),
        "content": draw(st.sampled_from([1, 4, 6])),
        "parts": draw(st.sampled_from([("kv",), ("k", "v")])),
    }
    layer_count = draw(st.integers(1, 3))
    sizes = draw(st.sampled_from([[1, 2, 4], [2, 4, 8], [3, 6], [2, 3]]))
    return tuple(draw(engines(common, layer_count, sizes)) for _ in range(2))


@st.composite
def transfers(draw):
    """Two engines, a prompt, what of it the decode side has, and a transfer id."""
    prefill, decode = draw(pairs())
    prompt = draw(st.integers(1, 24))
    virtual = decode.virtual_block_size
    cached = draw(st.integers(0, prompt // virtual)) * virtual
    return prefill, decode, prompt, cached, draw(st.text(max_size=8))
