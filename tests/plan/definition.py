"""Who holds what, from the definition alone: one small formula a fact, nothing of the planner's.

This is the ruler that the planner is held against, so it stays slow and obvious. Ranks are ordered PP, PCP,
TP; who holds which tokens is as vLLM's process groups and slot mapping make it (``test_vllm_convention.py``
holds this file against that code).
"""

import math
from dataclasses import dataclass

BOTH_SPLIT = "a"
"""PCP and DCP both split the tokens; a DCP group is consecutive TP ranks."""
DCP_SPANS_PCP = "b"
"""Only DCP splits the tokens; a DCP group runs along PCP first, then along TP."""


@dataclass(frozen=True)
class Group:
    """Layers that share block tables: a KV cache group."""

    layers: tuple[int, ...]
    block_size: int
    window: int = 0
    """Tokens before the end of the prompt that are still needed; 0: all. Blocks before them may be gone."""

    def needs(self, token: int, tokens: int) -> bool:
        """Return whether a token of a prompt of so many tokens is still needed."""
        return not self.window or token >= tokens - self.window


@dataclass(frozen=True)
class Parallel:
    """The parallel layout of one engine (one DP replica)."""

    heads: int
    """KV heads of the model: 1 for MLA and MQA."""
    stages: tuple[int, ...]
    """Layers of each pipeline stage."""
    groups: tuple[Group, ...]
    tp: int = 1
    pcp: int = 1
    dcp: int = 1
    interleave: int = 1
    convention: str = BOTH_SPLIT

    @property
    def rank_count(self) -> int:
        return len(self.stages) * self.pcp * self.tp

    @property
    def layer_count(self) -> int:
        return sum(self.stages)

    @property
    def cp_size(self) -> int:
        """Ranks that the tokens are split over."""
        return self.pcp * self.dcp if self.convention == BOTH_SPLIT else self.dcp

    def place(self, rank: int) -> tuple[int, int, int]:
        """Return (pipeline stage, PCP rank, TP rank) of a rank: the order is PP, PCP, TP."""
        stage, inside = divmod(rank, self.pcp * self.tp)
        return stage, *divmod(inside, self.tp)

    def cp_rank(self, rank: int) -> int:
        """Return which part of the tokens a rank holds."""
        _, pcp_rank, tp_rank = self.place(rank)
        if self.convention == BOTH_SPLIT:
            return pcp_rank * self.dcp + tp_rank % self.dcp
        return (tp_rank * self.pcp + pcp_rank) % self.dcp

    def layers_of(self, rank: int) -> tuple[int, ...]:
        stage, _, _ = self.place(rank)
        first = sum(self.stages[:stage])
        return tuple(range(first, first + self.stages[stage]))

    def heads_of(self, rank: int) -> tuple[int, ...]:
        """Return the heads of a rank: each TP rank has its part, or several TP ranks share one head."""
        _, _, tp_rank = self.place(rank)
        if self.heads >= self.tp:
            each = self.heads // self.tp
            return tuple(range(tp_rank * each, (tp_rank + 1) * each))
        return (tp_rank // (self.tp // self.heads),)

    def group_of(self, layer: int) -> int:
        """Return which group a layer belongs to."""
        (found,) = [number for number, group in enumerate(self.groups) if layer in group.layers]
        return found

    def virtual_block(self, group: Group) -> int:
        """Return the tokens that one entry of a block table stands for, over all CP ranks together."""
        return group.block_size * self.cp_size

    @property
    def prefix_step(self) -> int:
        """Return what a cached prefix is a multiple of: whole virtual blocks in every group."""
        return math.lcm(*(self.virtual_block(group) for group in self.groups))

    def holds_token(self, rank: int, token: int) -> bool:
        return (token // self.interleave) % self.cp_size == self.cp_rank(rank)

    def table_entry(self, group: Group, token: int) -> int:
        """Return which entry of the request's block table has the token."""
        return token // self.virtual_block(group)

    def slot(self, group: Group, token: int) -> int:
        """Return where in its block the token lies, on the rank that holds it."""
        inside = token % self.virtual_block(group)
        rounds = inside // (self.interleave * self.cp_size)
        return rounds * self.interleave + token % self.interleave

    @property
    def dcp_groups(self) -> list[list[int]]:
        """Return the ranks of each DCP group, in order, as the convention cuts them; a rest is one too."""
        groups: list[list[int]] = []
        for stage in range(len(self.stages)):
            if self.convention == BOTH_SPLIT:
                lines = [[(pcp_rank, tp_rank) for tp_rank in range(self.tp)] for pcp_rank in range(self.pcp)]
            else:
                lines = [[(pcp_rank, tp_rank) for tp_rank in range(self.tp) for pcp_rank in range(self.pcp)]]
            for line in lines:
                ranks = [(stage * self.pcp + pcp_rank) * self.tp + tp_rank for pcp_rank, tp_rank in line]
                groups += [ranks[start : start + self.dcp] for start in range(0, len(ranks), self.dcp)]
        return groups

    @property
    def allowed(self) -> bool:
        """Whether an engine can be split so: whole numbers, and one DCP group holds the same heads."""
        if not splits_heads(self):
            return False
        if (
            self.convention == DCP_SPANS_PCP
            and self.pcp > 1
            and self.dcp not in (1, self.pcp, self.tp * self.pcp)
        ):
            return False
        return all(
            len(group) == self.dcp and len({self.heads_of(rank) for rank in group}) == 1
            for group in self.dcp_groups
        )

    def describe(self) -> str:
        """Return the layout in words, as an engine would publish it."""
        sizes = ", ".join(f"{group.block_size} (window {group.window})" for group in self.groups)
        return (
            f"TP {self.tp}, PP {len(self.stages)}, PCP {self.pcp}, DCP {self.dcp}, {self.heads} KV heads, "
            f"block size {sizes}, interleave {self.interleave}, convention {self.convention}"
        )


def splits_heads(parallel: Parallel) -> bool:
    """Return whether a whole number of heads falls to each rank, or of ranks to each head."""
    return parallel.heads % parallel.tp == 0 or parallel.tp % parallel.heads == 0


def holds_everything(parallel: Parallel) -> bool:
    """Return whether every token of every head is somewhere on the first pipeline stage."""
    parts = {
        (head, parallel.cp_rank(rank))
        for rank in range(parallel.pcp * parallel.tp)
        for head in parallel.heads_of(rank)
    }
    return len(parts) == parallel.heads * parallel.cp_size


def same_slabs(one: Parallel, other: Parallel, layer: int) -> bool:
    """Return whether the two engines cut the tokens of a layer into the same blocks, in the same order.

    Only then can whole blocks be moved where their inside cannot be told apart.
    """
    ours, theirs = one.groups[one.group_of(layer)], other.groups[other.group_of(layer)]
    period = math.lcm(one.virtual_block(ours), other.virtual_block(theirs))
    return _slabs(one, ours, period) == _slabs(other, theirs, period)


def _slabs(parallel: Parallel, it: Group, tokens: int) -> set[tuple[int, ...]]:
    """Return the blocks that the first tokens fill, each as its tokens in the order of its slots."""
    blocks: dict[tuple[int, int], list[int]] = {}
    for token in range(tokens):
        part = (token // parallel.interleave) % parallel.cp_size
        blocks.setdefault((part, parallel.table_entry(it, token)), []).append(token)
    return {tuple(sorted(held, key=lambda token: parallel.slot(it, token))) for held in blocks.values()}
