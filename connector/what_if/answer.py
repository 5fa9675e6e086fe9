"""What `dfirst plan` found, as structs: the tables, the picture and the JSON are made from these."""

import msgspec

HOW_TO_CHECK = """\
The JSON is made for checking the plan by another program.

Everything counts from 0. Layers and heads are numbers in the whole model; token_ranges are pairs of a first \
token and an end, which is not included, numbered in the prompt.

A rank keeps its tokens of a request in ascending order: the j-th lies in block j // block_tokens, at place \
j % block_tokens. source_block and target_block count these blocks of the request on their rank; they are \
not the numbers that an allocator gives them.

A block of one layer begins at offset 0. The bytes of head h (the h-th that the rank holds) at place p begin \
at h * head_stride_bytes + p * token_stride_bytes and are content_bytes long.

Each of copies_of_a_layer is made once in every layer of its leg. Places behind the prompt's end in its last \
block may be copied along.
"""
"""What a reader of the JSON has to know of the memory; the help of the command shows it."""

Range = tuple[int, int]
"""First and end, which is not included."""


class Copy(msgspec.Struct, frozen=True):
    """One run of bytes, inside one block on both sides. Offsets and lengths are bytes."""

    source_block: int
    source_offset: int
    target_block: int
    target_offset: int
    bytes: int


class LegAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What one prefill rank gives one decode rank."""

    prefill_rank: int
    decode_rank: int
    layers: list[int]
    heads: list[int]
    tokens: int
    token_ranges: list[Range]
    bytes: int
    """Of all layers."""
    copies: int
    """Of all layers: at most so many, fewer where an engine's blocks happen to lie side by side."""
    copies_of_a_layer: list[Copy]


class RankAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank holds of the prompt, and what it does in this transfer."""

    rank: int
    """Place in its engine, in the order PP, PCP, TP."""
    pp_rank: int
    pcp_rank: int
    tp_rank: int
    cp_rank: int
    """Which share of the tokens it holds, of `cp_size` shares."""
    layers: list[int]
    heads: list[int]
    tokens: int
    """Tokens of the prompt that it holds; those of a cached prefix are among them."""
    token_ranges: list[Range]
    replicas: list[int]
    """The ranks of its engine that hold the very same, itself included."""
    bytes: int
    """Sent (prefill) or received (decode)."""
    copies: int
    load: float
    """`bytes` relative to the mean of its replicas; 1 where none of them moves anything."""
    peers: list[int]
    """The ranks of the other engine with which it has a leg."""
    waits_for: list[int]
    """The ranks of the other engine whose DONE it must hear before it lets go of its blocks (the owner's
    side: prefill in block-wise, decode in layer-wise); empty on the mover's side.
    """
    releases: list[int]
    """The prefill ranks that it releases without having read them (decode)."""


class SideAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One engine: one data-parallel replica of what was asked for."""

    layout: str
    replicas_of_engine: int
    """The `dp` that was asked for: so many engines like this one, each with transfers of its own."""
    cp_size: int
    interleave: int
    """`token // interleave % cp_size` is the share that a token belongs to."""
    block_tokens: int
    content_bytes: int
    """K and V of one head and token."""
    head_stride_bytes: int
    token_stride_bytes: int
    ranks: list[RankAnswer]


class LoadAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of many transfers, relative to the mean of a rank's replicas: what replicas are for."""

    transfers: int
    bytes: list[int]
    """Sent by each prefill rank, in the order of the ranks."""
    load: list[float]


class PlanAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer. With a `refusal` the two layouts cannot work together, and nothing else is there."""

    refusal: str | None = None
    mode: str = ""
    convention: str = ""
    transfer_id: str = ""
    layers: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    bytes: int = 0
    copies: int = 0
    prefill: SideAnswer | None = None
    decode: SideAnswer | None = None
    legs: list[LegAnswer] = []
    load: LoadAnswer | None = None
    """Asked for with --transfers."""


def encode(answer: PlanAnswer) -> bytes:
    return msgspec.json.format(msgspec.json.encode(answer), indent=1) + b"\n"
