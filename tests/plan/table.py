"""The pairs that the people who run them asked for (convention a, interleave of one block)."""

from dataclasses import dataclass

from .definition import BOTH_SPLIT, Group, Parallel
from .memory import Form, Part
from .request import Request, Side

BLOCK_SIZE = 4
LAYERS = 2
MLA_PARTS = (Part("kv", 5),)
GQA_PARTS = (Part("kv", 3, 2),)


@dataclass(frozen=True)
class Pair:
    """A row of the table; DP is left out, since an engine is one DP replica."""

    heads: int
    prefill: tuple[int, int, int]
    """(TP, PCP, DCP)."""
    decode: tuple[int, int, int]

    def __str__(self) -> str:
        names = ["TP{}PCP{}DCP{}".format(*sizes) for sizes in (self.prefill, self.decode)]
        return f"{'MLA' if self.heads == 1 else f'GQA{self.heads}'}-{'-'.join(names)}"

    def sides(
        self, prefill_convention: str = BOTH_SPLIT, decode_convention: str = BOTH_SPLIT
    ) -> tuple[Side, Side]:
        return self._side(self.prefill, prefill_convention), self._side(self.decode, decode_convention)

    def allowed(self, convention: str) -> bool:
        """Return whether both sides can be had in this convention."""
        return all(side.parallel.allowed for side in self.sides(convention, convention))

    def _side(self, sizes: tuple[int, int, int], convention: str) -> Side:
        tp, pcp, dcp = sizes
        parallel = Parallel(
            heads=self.heads,
            stages=(LAYERS,),
            groups=(Group(tuple(range(LAYERS)), BLOCK_SIZE),),
            tp=tp,
            pcp=pcp,
            dcp=dcp,
            interleave=BLOCK_SIZE,
            convention=convention,
        )
        return Side(parallel, Form(parts=MLA_PARTS if self.heads == 1 else GQA_PARTS, block_count=64))


PAIRS = (
    Pair(1, (8, 1, 1), (8, 1, 1)),
    Pair(1, (8, 2, 8), (8, 1, 1)),
    Pair(1, (8, 2, 8), (8, 1, 4)),
    Pair(1, (8, 2, 4), (4, 1, 2)),
    Pair(1, (8, 2, 2), (4, 1, 4)),
    Pair(1, (8, 2, 1), (4, 1, 2)),
    Pair(4, (8, 1, 1), (8, 1, 1)),
    Pair(8, (8, 1, 1), (8, 1, 1)),
    Pair(4, (8, 2, 2), (8, 1, 1)),
    Pair(4, (8, 2, 2), (8, 1, 2)),
    Pair(4, (8, 2, 2), (4, 1, 1)),
    Pair(4, (16, 1, 2), (8, 1, 2)),
)


def prompts(prefill: Side, decode: Side) -> dict[str, tuple[int, int]]:
    """Return the prompts that are tried with a pair: (tokens, cached tokens on the decode side), by name."""
    one, other = (side.parallel.prefix_step for side in (prefill, decode))
    sizes = {
        "one token": 1,
        "shorter than the CP size": max(prefill.parallel.cp_size, decode.parallel.cp_size) - 1,
        "ends inside a block": one + other + BLOCK_SIZE + 3,
        "ends on a block's edge": one + other + BLOCK_SIZE,
        "whole virtual blocks of both": 2 * max(one, other),
    }
    found = {name: (tokens, 0) for name, tokens in sizes.items() if tokens}
    for name, tokens in sizes.items():
        if tokens > other:
            found[f"{name}, one virtual block cached"] = tokens, other
        whole = tokens // other * other
        if whole > other:
            found[f"{name}, all whole virtual blocks cached"] = tokens, whole
    return found


def request_for(prefill: Side, decode: Side, tokens: int, cached: int, transfer_id: str) -> Request:
    """Return a request with scattered blocks, other ones on each side."""
    return Request(
        tokens=tokens,
        cached=cached,
        prefill_blocks=(_scattered(prefill, tokens, 5),),
        decode_blocks=(_scattered(decode, tokens, 7),),
        transfer_id=transfer_id,
    )


def _scattered(side: Side, tokens: int, step: int) -> tuple[int, ...]:
    count = -(-tokens // side.parallel.virtual_block(side.parallel.groups[0]))
    # The step is odd and the number of blocks a power of two, so no block comes twice.
    return tuple((3 + step * place) % side.form.block_count for place in range(count))
