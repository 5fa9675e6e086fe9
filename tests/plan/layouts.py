"""Layouts drawn at random over everything that an engine may choose, and which pairs of them must work."""

from dataclasses import dataclass, replace
from itertools import pairwise, permutations

from hypothesis import strategies as st

from .definition import (
    BOTH_SPLIT,
    DCP_SPANS_PCP,
    Group,
    Parallel,
    holds_everything,
    same_slabs,
    splits_heads,
)
from .memory import Form, Part
from .request import GONE, Request, Side, blocks_needed

MAX_RANKS = 24
MAX_TOKENS = 80
BLOCK_COUNT = 83
"""A prime, so that any step scatters blocks without naming one twice."""

PARTS = (
    (Part("kv", 1),),
    (Part("kv", 2, 2),),
    (Part("kv", 5),),
    (Part("kv", 3, 2),),
    (Part("k", 2), Part("v", 2)),
    (Part("k", 3), Part("v", 1)),
)
ORDERS = tuple("".join(order) for order in permutations("LPBHT"))
WHOLE_SLAB_ORDERS = tuple(order for order in ORDERS if order.endswith("T"))


@dataclass(frozen=True)
class Case:
    """Two layouts of one model and a request between them."""

    prefill: Side
    decode: Side
    request: Request
    chunk_ends: tuple[int, ...]
    """Where the chunks of the prompt end: on whole virtual blocks of the prefill side, but for the last."""


def must_work(prefill: Side, decode: Side) -> bool:
    """Return whether whole numbers allow a pair: it must then not be refused."""
    one, other = prefill.parallel, decode.parallel
    if not all(splits_heads(side) and holds_everything(side) for side in (one, other)):
        return False
    if one.heads != other.heads or one.layer_count != other.layer_count:
        return False
    if prefill.form.parts != decode.form.parts or prefill.form.sliceable != decode.form.sliceable:
        return False
    for layer in range(one.layer_count):
        sizes = [engine.groups[engine.group_of(layer)].block_size for engine in (one, other)]
        if max(sizes) % min(sizes) or (not prefill.form.sliceable and not same_slabs(one, other, layer)):
            return False
    return True


def divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]


@st.composite
def stages(draw: st.DrawFn, layers: int, at_most: int) -> tuple[int, ...]:
    """Draw how many layers each pipeline stage has, evenly or not."""
    count = draw(st.integers(1, min(layers, at_most)))
    cuts = (
        sorted(draw(st.sets(st.integers(1, layers - 1), min_size=count - 1, max_size=count - 1)))
        if count > 1
        else []
    )
    edges = [0, *cuts, layers]
    return tuple(end - start for start, end in pairwise(edges))


@st.composite
def parallels(draw: st.DrawFn, heads: int, layers: int, block_sizes: st.SearchStrategy[int]) -> Parallel:
    """Draw an engine's parallel sizes; a DCP group holds the same heads, as both conventions demand."""
    convention = draw(st.sampled_from([BOTH_SPLIT, DCP_SPANS_PCP]))
    tp = draw(st.sampled_from([tp for tp in (1, 2, 3, 4, 6, 8, 12) if heads % tp == 0 or tp % heads == 0]))
    same_heads = max(1, tp // heads)
    pcp = draw(st.sampled_from([1, 2, 3]))
    if convention == BOTH_SPLIT or pcp == 1:
        dcp = draw(st.sampled_from(divisors(same_heads)))
    else:
        dcp = draw(st.sampled_from([1, pcp, tp * pcp] if same_heads == tp else [1, pcp]))
    block_size = draw(block_sizes)
    return Parallel(
        heads=heads,
        stages=draw(stages(layers, max(1, MAX_RANKS // (tp * pcp)))),
        groups=(Group(tuple(range(layers)), block_size),),
        tp=tp,
        pcp=pcp,
        dcp=dcp,
        interleave=draw(st.sampled_from(divisors(block_size)[::-1])),
        convention=convention,
    )


@st.composite
def wild(draw: st.DrawFn, heads: int, layers: int) -> Parallel:
    """Draw an engine that may not hold all of the cache: no DCP group is asked for its heads."""
    tp = draw(st.sampled_from([tp for tp in (1, 2, 4, 6) if heads % tp == 0 or tp % heads == 0]))
    block_size = draw(st.sampled_from([1, 2, 3, 4, 6]))
    return Parallel(
        heads=heads,
        stages=draw(stages(layers, 2)),
        groups=(Group(tuple(range(layers)), block_size),),
        tp=tp,
        pcp=draw(st.sampled_from([1, 2])),
        dcp=draw(st.sampled_from(divisors(tp))),
        interleave=draw(st.sampled_from(divisors(block_size)[::-1])),
        convention=draw(st.sampled_from([BOTH_SPLIT, DCP_SPANS_PCP])),
    )


@st.composite
def forms(draw: st.DrawFn, parts: tuple[Part, ...], sliceable: bool) -> Form:
    """Draw how an engine lays its caches out in memory."""
    order = draw(st.sampled_from(ORDERS if sliceable else WHOLE_SLAB_ORDERS))
    padding = draw(st.tuples(*[st.integers(0, 2)] * 6))
    if not sliceable:
        padding = (*padding[:4], 0, 0)
    return Form(parts=parts, order=order, padding=padding, block_count=BLOCK_COUNT, sliceable=sliceable)


@st.composite
def tables(draw: st.DrawFn, parallel: Parallel, tokens: int) -> tuple[tuple[int, ...], ...]:
    """Draw the blocks of a request: in a row, backwards or scattered."""
    start, step = draw(st.integers(0, BLOCK_COUNT - 1)), draw(st.sampled_from([1, BLOCK_COUNT - 1, 2, 7, 40]))
    return tuple(
        tuple((start + step * place) % BLOCK_COUNT for place in range(blocks_needed(parallel, group, tokens)))
        for group in range(len(parallel.groups))
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw two layouts of one model, most of which must work together, and a request."""
    heads, layers = draw(st.sampled_from([1, 2, 4, 3, 6, 8])), draw(st.integers(1, 4))
    sliceable = draw(st.sampled_from([True, True, True, False]))
    parts = draw(st.sampled_from(PARTS if sliceable else PARTS[:5]))
    base = draw(st.sampled_from([1, 2, 4, 3]))
    factors = st.sampled_from([1, 2, 4]) if draw(st.booleans()) else st.just(draw(st.sampled_from([1, 2, 4])))
    block_sizes = factors.map(lambda factor: base * factor)
    engines = parallels(heads, layers, block_sizes)
    if draw(st.sampled_from([False] * 7 + [True])):
        engines = st.one_of(engines, wild(heads, layers))
    prefill = Side(draw(engines), draw(forms(parts, sliceable)))
    decode = Side(draw(engines), draw(forms(parts, sliceable)))
    return Case(prefill, decode, *draw(requests(prefill, decode)))


@st.composite
def requests(draw: st.DrawFn, prefill: Side, decode: Side) -> tuple[Request, tuple[int, ...]]:
    """Draw a request between two layouts, and the ends of its chunks."""
    tokens = draw(st.integers(1, MAX_TOKENS))
    step, chunk = decode.parallel.prefix_step, prefill.parallel.prefix_step
    cached = draw(st.integers(0, tokens // step)) * step
    request = Request(
        tokens=tokens,
        cached=cached,
        prefill_blocks=draw(tables(prefill.parallel, tokens)),
        decode_blocks=draw(tables(decode.parallel, tokens)),
        transfer_id=draw(st.text("abc", max_size=3)),
    )
    ends = draw(st.sets(st.integers(1, max(1, tokens // chunk)), max_size=3))
    return request, (*sorted(end * chunk for end in ends if end * chunk < tokens), tokens)


@st.composite
def grouped_cases(draw: st.DrawFn) -> Case:
    """Draw two layouts whose layers fall into KV cache groups, with a request that may have lost blocks."""
    case = draw(cases())
    layers = case.prefill.parallel.layer_count
    kinds = draw(st.lists(st.integers(0, 2), min_size=layers, max_size=layers))
    windows = draw(st.tuples(*[st.sampled_from([0, 1, 3, 8, 20])] * 3))
    shared = draw(st.booleans())
    prefill, decode = (draw(grouped(side, kinds, windows, shared)) for side in (case.prefill, case.decode))
    tokens, step = case.request.tokens, decode.parallel.prefix_step
    while any(all_blocks(side.parallel, tokens) >= BLOCK_COUNT for side in (prefill, decode)):
        tokens //= 2
    request = Request(
        tokens=tokens,
        cached=draw(st.integers(0, tokens // step)) * step,
        prefill_blocks=(),
        decode_blocks=(),
        transfer_id=case.request.transfer_id,
    )
    request = replace(
        request,
        prefill_blocks=draw(windowed_tables(prefill.parallel, tokens)),
        decode_blocks=draw(windowed_tables(decode.parallel, tokens)),
    )
    return Case(prefill, decode, request, (tokens,))


def all_blocks(parallel: Parallel, tokens: int) -> int:
    """Return how many blocks a request has over all groups."""
    return sum(blocks_needed(parallel, number, tokens) for number in range(len(parallel.groups)))


@st.composite
def grouped(draw: st.DrawFn, side: Side, kinds: list[int], windows: tuple[int, ...], shared: bool) -> Side:
    """Draw the groups of a side: which kinds of layers share block tables is given, their order is not."""
    plain = side.parallel.groups[0].block_size
    order = draw(st.permutations(sorted(set(kinds))))
    # What shares bytes has blocks of one size.
    factors = [1 if shared else draw(st.sampled_from([1, 1, 2])) for _ in order]
    groups = tuple(
        Group(tuple(layer for layer, kind in enumerate(kinds) if kind == mine), plain * factor, windows[mine])
        for mine, factor in zip(order, factors, strict=True)
    )
    return Side(replace(side.parallel, groups=groups), replace(side.form, shared=shared))


@st.composite
def windowed_tables(draw: st.DrawFn, parallel: Parallel, tokens: int) -> tuple[tuple[int, ...], ...]:
    """Draw block tables of which no two name one block, and whose first blocks may be out of the window."""
    start, step = draw(st.integers(0, BLOCK_COUNT - 2)), draw(st.sampled_from([1, 3, 25]))
    given_out = 0
    drawn = []
    for number, group in enumerate(parallel.groups):
        count = blocks_needed(parallel, number, tokens)
        # 82 is no prime, but 1, 3 and 25 have no factor in common with it; block 0 is nobody's.
        places = range(given_out, given_out + count)
        table = [1 + (start + step * place) % (BLOCK_COUNT - 1) for place in places]
        given_out += count
        lost = max(0, tokens - group.window) // parallel.virtual_block(group) if group.window else 0
        gone = draw(st.integers(0, lost))
        drawn.append((*[GONE] * gone, *table[gone:]))
    return tuple(drawn)
