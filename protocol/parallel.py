"""From an engine's parallel sizes to what each rank holds: layers, KV heads and a share of the tokens.

Ranks are numbered pipeline stage first, then prefill context parallelism (PCP), then tensor parallelism (TP).
TP splits the KV heads; above their number, consecutive TP ranks hold the same one. Two conventions are in use
for who splits the tokens:

* a: PCP and DCP both split them, ``cp_rank = pcp_rank * dcp_size + dcp_rank``. A DCP group is consecutive TP
  ranks that hold the same heads. (vLLM up to 0.29 and its Ascend plug-in.)
* b: DCP alone splits them. Its groups run over the PCP axis first, then over TP; with PCP, DCP is 1, PCP or
  TP x PCP. PCP by itself splits nothing: its ranks are replicas. (vLLM 0.30 and later.)
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate

import msgspec

CONVENTION_A, CONVENTION_B = "a", "b"
CONVENTIONS = (CONVENTION_A, CONVENTION_B)


class ParallelSizes(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine (one DP replica) is split over ranks."""

    tp: int = 1
    pp: int = 1
    pcp: int = 1
    dcp: int = 1
    """Reuses the ranks of TP (and, in convention b, of PCP): it adds none."""
    convention: str = CONVENTION_B

    @property
    def ranks(self) -> int:
        """Ranks of the engine."""
        return self.pp * self.pcp * self.tp

    @property
    def cp_size(self) -> int:
        """Ranks that split the tokens between them."""
        return self.pcp * self.dcp if self.convention == CONVENTION_A else self.dcp

    def __str__(self) -> str:
        sizes = [("TP", self.tp), ("PP", self.pp), ("PCP", self.pcp), ("DCP", self.dcp)]
        words = ", ".join(f"{name} {size}" for name, size in sizes if size > 1 or name == "TP")
        splits = self.pcp > 1 or self.dcp > 1
        return f"{words} (convention {self.convention})" if splits else words


class RankPlace(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of an engine, and what it holds."""

    rank: int
    """``(pp_rank * pcp + pcp_rank) * tp + tp_rank``."""
    pp_rank: int
    pcp_rank: int
    tp_rank: int
    first_layer: int
    layer_count: int
    first_kv_head: int
    kv_head_count: int
    cp_size: int
    cp_rank: int


def check_sizes(sizes: ParallelSizes, total_kv_heads: int) -> None:
    """Raise ``ValueError``, in one sentence, if a model of so many KV heads (1 for MLA) can't be split so."""
    reason = next(_reasons(sizes, total_kv_heads), None)
    if reason is not None:
        raise ValueError(reason)


def place_of(
    sizes: ParallelSizes, total_kv_heads: int, pp_rank: int, pcp_rank: int, tp_rank: int, layers: range
) -> RankPlace:
    """Return what one rank holds; ``layers`` are those of its pipeline stage. The sizes are checked."""
    if sizes.convention == CONVENTION_A:
        cp_rank = pcp_rank * sizes.dcp + tp_rank % sizes.dcp
    else:
        cp_rank = (tp_rank * sizes.pcp + pcp_rank) % sizes.dcp
    return RankPlace(
        rank=(pp_rank * sizes.pcp + pcp_rank) * sizes.tp + tp_rank,
        pp_rank=pp_rank,
        pcp_rank=pcp_rank,
        tp_rank=tp_rank,
        first_layer=layers.start,
        layer_count=len(layers),
        first_kv_head=tp_rank * total_kv_heads // sizes.tp,
        kv_head_count=max(1, total_kv_heads // sizes.tp),
        cp_size=sizes.cp_size,
        cp_rank=cp_rank,
    )


def places(
    sizes: ParallelSizes, total_kv_heads: int, layers: int, split: Sequence[int] = ()
) -> tuple[RankPlace, ...]:
    """Return all ranks of an engine, by their numbers.

    ``split`` gives the layers of each pipeline stage; without it they are dealt out as vLLM does. Raises
    ``ValueError`` if the sizes do not go together.
    """
    check_sizes(sizes, total_kv_heads)
    counts = list(split) or _dealt(layers, sizes.pp)
    if len(counts) != sizes.pp or sum(counts) != layers or min(counts) < 1:
        raise ValueError(
            f"{layers} layers cannot be split over PP {sizes.pp} as {', '.join(map(str, counts))}: give one "
            "number of layers, at least 1, for each stage"
        )
    starts = [0, *accumulate(counts)]
    return tuple(
        place_of(sizes, total_kv_heads, pp, pcp, tp, range(starts[pp], starts[pp + 1]))
        for pp in range(sizes.pp)
        for pcp in range(sizes.pcp)
        for tp in range(sizes.tp)
    )


def _reasons(sizes: ParallelSizes, heads: int) -> Iterator[str]:
    if sizes.convention not in CONVENTIONS:
        yield f"convention {sizes.convention} is not known: use {' or '.join(CONVENTIONS)}"
    for name, size in (("TP", sizes.tp), ("PP", sizes.pp), ("PCP", sizes.pcp), ("DCP", sizes.dcp)):
        if size < 1:
            yield f"{name} {size} is no number of ranks: use 1 or more"
    if heads < 1:
        yield f"{heads} KV heads are no model: use 1 or more (1 for MLA)"
    if heads % sizes.tp and sizes.tp % heads:
        yield f"{heads} KV heads cannot be split over TP {sizes.tp}: one must divide the other"
    same_heads = max(1, sizes.tp // heads)
    if sizes.convention == CONVENTION_B and sizes.pcp > 1:
        if sizes.dcp not in (1, sizes.pcp, sizes.tp * sizes.pcp):
            yield (
                f"DCP {sizes.dcp} does not go with TP {sizes.tp} and PCP {sizes.pcp} in convention b: use 1, "
                f"{sizes.pcp} or {sizes.tp * sizes.pcp}"
            )
        if sizes.dcp > sizes.pcp and same_heads != sizes.tp:
            yield f"DCP {sizes.dcp} would split the tokens over TP ranks that hold different KV heads"
    elif same_heads % sizes.dcp:
        yield (
            f"DCP {sizes.dcp} needs a multiple of {sizes.dcp} TP ranks that hold the same KV heads, and of "
            f"TP {sizes.tp} with {heads} KV heads {same_heads} do"
        )


def _dealt(layers: int, stages: int) -> list[int]:
    """Deal layers out evenly; what is left over goes to the last stages but one (vLLM's get_pp_indices)."""
    counts = [layers // stages] * stages
    for place in range(2, layers % stages + 2):
        counts[-place] += 1
    return counts
