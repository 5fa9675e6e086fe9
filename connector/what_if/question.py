"""What `dfirst plan` is asked: two layouts, a model and a prompt, read from the words of the command line."""

from collections.abc import Sequence
from enum import Enum

import msgspec
from dfirst.protocol.modes import BLOCKWISE
from dfirst.protocol.parallel import CONVENTION_A, ParallelSizes

from ..engine_options import read_settings, whole_number

AXES = ("tp", "pp", "pcp", "dcp", "dp")
EXAMPLE = "tp=8,dcp=4,dp=2"

MLA_LATENT, MLA_ROPE = 512, 64
MLA_HEAD_SIZE = MLA_LATENT + MLA_ROPE
"""Elements of a token in a layer of DeepSeek's models: the latent and the rotary part, stored once."""
HEAD_SIZE = 128
"""Elements of K, and as many of V, of one head and token in most models of grouped-query attention."""
VLLM_INTERLEAVE = 1
"""Of vLLM 0.30 and later, without --cp-kv-cache-interleave-size."""
TRANSFER_ID = "what-if"
MAX_TOKENS = 2**24
"""Of a prompt: more than any model takes, and what is worked out in seconds."""
MAX_PIECES = 2**20
"""Of a prompt on one side: each is a row of what is worked out, and with these it takes seconds."""
MAX_LAYERS = 2**13
MAX_KV_HEADS, MAX_HEAD_SIZE, MAX_BLOCK_TOKENS = 2**12, 2**16, 2**16
"""More than any model has; within these no number of bytes is beyond 64 bits."""
MAX_TRANSFERS = 100_000


class CacheType(str, Enum):
    """What an element of the KV cache is stored as."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"
    FP8 = "fp8"

    @property
    def bytes(self) -> int:
        return {CacheType.FLOAT32: 4, CacheType.FP8: 1}.get(self, 2)


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """What of a model decides the size of its KV cache."""

    layers: int
    kv_heads: int
    """1 for MLA."""
    is_mla: bool
    content_bytes: int
    """K and V of one head and token in one layer (MLA: the latent and the rotary part)."""

    def __str__(self) -> str:
        if self.is_mla:
            return "MLA"
        return f"GQA with {self.kv_heads} KV heads" if self.kv_heads > 1 else "MQA"


class EngineQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """One side: an engine, which is one data-parallel replica of what was asked for."""

    sizes: ParallelSizes
    dp: int
    block_tokens: int
    interleave: int
    layer_split: tuple[int, ...] = ()
    """Layers of each pipeline stage; empty leaves it to vLLM's rule."""


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """The whole question. Tokens are counted from the prompt's first."""

    prefill: EngineQuestion
    decode: EngineQuestion
    model: ModelShape
    prompt_tokens: int
    cached_tokens: int = 0
    mode: str = BLOCKWISE
    transfer_id: str = TRANSFER_ID
    transfers: int = 0
    """Over so many random transfer ids the load is counted; 0 leaves that out."""
    heads_outside: bool = False
    """Whether a block holds all tokens of a head side by side (HND), or all heads of a token (NHD)."""
    whole_blocks: bool = False
    """Whether tokens cannot be cut out of a block, as in vLLM's attention on CPUs."""


def check_pieces(question: Question) -> None:
    """Raise ``ValueError`` in one sentence if the prompt falls into more pieces than are worked out."""
    for name, side in (("prefill", question.prefill), ("decode", question.decode)):
        splits = side.sizes.cp_size > 1
        tokens = min(side.block_tokens, side.interleave) if splits else side.block_tokens
        pieces = -(-question.prompt_tokens // tokens)
        if pieces > MAX_PIECES:
            options = "--tokens, or a larger --block-size" + (" and --interleave" if splits else "")
            raise ValueError(
                f"--tokens is {question.prompt_tokens}, {pieces} pieces of {tokens} on the {name} side, and "
                f"{MAX_PIECES} are the most that is worked out; give fewer {options}"
            )


def read_model(
    layers: int, *, mla: bool, kv_heads: int | None, head_size: int | None, dtype: CacheType
) -> ModelShape:
    """Raises ``ValueError`` in one sentence."""
    if mla == (kv_heads is not None):
        given = f"--mla and --kv-heads {kv_heads}" if mla else "neither of them"
        raise ValueError(
            f"give either --mla or --kv-heads N, which say what the cache of a token is; it was {given}"
        )
    elements = (head_size or MLA_HEAD_SIZE) if mla else 2 * (head_size or HEAD_SIZE)
    return ModelShape(layers=layers, kv_heads=kv_heads or 1, is_mla=mla, content_bytes=elements * dtype.bytes)


def read_engine(
    side: str,
    text: str,
    *,
    block_tokens: int,
    interleave: int | None = None,
    layer_split: str | None = None,
    convention: str = CONVENTION_A,
) -> EngineQuestion:
    """Read `tp=8,pcp=2,dcp=8`; raises ``ValueError`` in one sentence. ``side`` is prefill or decode.

    Whether the sizes go together is for the plan to say: it depends on the model.
    """
    # Here, since the help of the command reads this module and must not wait for numpy.
    from dfirst.protocol.pairing import MAX_RANKS

    option = f"--{side}"
    try:
        written = read_settings(text, AXES, EXAMPLE)
        values = {axis: whole_number(axis, written.get(axis, "1"), text, 1) for axis in AXES}
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from error
    if interleave is not None and block_tokens % interleave:
        raise ValueError(
            f"--interleave {interleave} does not divide the {side} side's block of {block_tokens} tokens: "
            "use a number that does"
        )
    dp = values.pop("dp")
    ranks = values["tp"] * values["pp"] * values["pcp"]
    if ranks > MAX_RANKS:
        raise ValueError(f"{option}: {text!r} is an engine of {ranks} ranks; use {MAX_RANKS} or fewer")
    return EngineQuestion(
        sizes=ParallelSizes(**values, convention=convention),
        dp=dp,
        block_tokens=block_tokens,
        interleave=interleave or (block_tokens if convention == CONVENTION_A else VLLM_INTERLEAVE),
        layer_split=() if layer_split is None else _split(f"--{side}-layers", layer_split),
    )


def _split(option: str, text: str) -> tuple[int, ...]:
    parts: Sequence[str] = [part.strip() for part in text.split(",")]
    try:
        return tuple(whole_number("a stage", part, text, 1) for part in parts)
    except ValueError as error:
        raise ValueError(f"{option}: {error}, as in 40,21") from error
