"""The command ``dfirst plan``. What is heavy is imported when it runs."""

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from dfirst.protocol.modes import BLOCKWISE, LAYERWISE
from dfirst.protocol.parallel import CONVENTION_A, CONVENTION_B
from dfirst.spec.number_option import whole_number
from dfirst.spec.output_file import prepare, write

from ..endings import fail
from .question import (
    HEAD_SIZE,
    MAX_BLOCK_TOKENS,
    MAX_HEAD_SIZE,
    MAX_KV_HEADS,
    MAX_LAYERS,
    MAX_TOKENS,
    MAX_TRANSFERS,
    MLA_HEAD_SIZE,
    MLA_LATENT,
    MLA_ROPE,
    TRANSFER_ID,
    VLLM_INTERLEAVE,
    CacheType,
    Question,
    check_pieces,
    read_engine,
    read_model,
)

SIZES_HELP = (
    "The {side} engine: tp, pp, pcp, dcp and dp, as in tp=8,pcp=2,dcp=8. What is left out is 1. An engine is "
    "one data-parallel replica, so the plan is for one replica on each side, whatever dp says."
)
SPLIT_HELP = "Layers of each pipeline stage, as in 40,21; without it vLLM's rule."
BLOCK_HELP = "Tokens in a block of the {side} engine, where that is not --block-size."
HEAD_SIZE_HELP = (
    f"Elements of K, and as many of V, of one head and token: {HEAD_SIZE} if not given. With --mla all that "
    f"a token has in a layer: {MLA_HEAD_SIZE}, the latent's {MLA_LATENT} and the rotary part's {MLA_ROPE}."
)
SIZES = "Layouts"
MODEL = "The model's KV cache"
REQUEST = "The request"
OUTPUT = "Output"


class PlanMode(str, Enum):
    BLOCKWISE = BLOCKWISE
    LAYERWISE = LAYERWISE


class Convention(str, Enum):
    A = CONVENTION_A
    B = CONVENTION_B


class KvLayout(str, Enum):
    NHD = "nhd"
    HND = "hnd"


def plan(
    prefill: Annotated[
        str,
        typer.Option(metavar="SIZES", help=SIZES_HELP.format(side="prefill"), rich_help_panel=SIZES),
    ],
    decode: Annotated[
        str, typer.Option(metavar="SIZES", help="The decode engine, likewise.", rich_help_panel=SIZES)
    ],
    convention: Annotated[
        Convention | None,
        typer.Option(
            help="Who splits the tokens. a, if not given: PCP and DCP both (vLLM up to 0.29 and its Ascend "
            "plug-in); b: DCP alone, whose groups run over the PCP axis first (vLLM 0.30 and later).",
            show_default=False,
            rich_help_panel=SIZES,
        ),
    ] = None,
    block_size: Annotated[
        int,
        whole_number(
            "--block-size",
            "Tokens in a block, as vLLM's --block-size.",
            least=1,
            most=MAX_BLOCK_TOKENS,
            panel=SIZES,
        ),
    ] = 128,
    prefill_block_size: Annotated[
        int | None,
        whole_number(
            "--prefill-block-size",
            BLOCK_HELP.format(side="prefill"),
            least=1,
            most=MAX_BLOCK_TOKENS,
            panel=SIZES,
        ),
    ] = None,
    decode_block_size: Annotated[
        int | None,
        whole_number(
            "--decode-block-size",
            BLOCK_HELP.format(side="decode"),
            least=1,
            most=MAX_BLOCK_TOKENS,
            panel=SIZES,
        ),
    ] = None,
    interleave: Annotated[
        int | None,
        whole_number(
            "--interleave",
            "With context parallelism, the tokens that follow each other on one rank, as vLLM's "
            "--cp-kv-cache-interleave-size. If not given: a block on each side in convention a, and vLLM's "
            f"own default of {VLLM_INTERLEAVE} in convention b.",
            least=1,
            panel=SIZES,
        ),
    ] = None,
    prefill_layers: Annotated[
        str | None, typer.Option(metavar="N,N", help=SPLIT_HELP, rich_help_panel=SIZES)
    ] = None,
    decode_layers: Annotated[
        str | None, typer.Option(metavar="N,N", help="Likewise.", rich_help_panel=SIZES)
    ] = None,
    layers: Annotated[
        int, whole_number("--layers", "Layers with a KV cache.", least=1, most=MAX_LAYERS, panel=MODEL)
    ] = 61,
    mla: Annotated[
        bool,
        typer.Option("--mla", help="Multi-head latent attention: one head for all.", rich_help_panel=MODEL),
    ] = False,
    kv_heads: Annotated[
        int | None,
        whole_number(
            "--kv-heads",
            "KV heads of the model (MQA: 1), unless it is MLA.",
            least=1,
            most=MAX_KV_HEADS,
            panel=MODEL,
        ),
    ] = None,
    head_size: Annotated[
        int | None,
        whole_number("--head-size", HEAD_SIZE_HELP, least=1, most=MAX_HEAD_SIZE, panel=MODEL),
    ] = None,
    dtype: Annotated[
        CacheType, typer.Option(help="Of the KV cache.", rich_help_panel=MODEL)
    ] = CacheType.BFLOAT16,
    kv_layout: Annotated[
        KvLayout,
        typer.Option(
            help="Inside a block: nhd keeps the heads of a token side by side, hnd the tokens of a head. It "
            "decides how many copies heads take that go to different ranks.",
            rich_help_panel=MODEL,
        ),
    ] = KvLayout.NHD,
    whole_blocks: Annotated[
        bool,
        typer.Option(
            "--whole-blocks",
            help="Tokens cannot be cut out of a block, as in vLLM's attention on CPUs.",
            rich_help_panel=MODEL,
        ),
    ] = False,
    tokens: Annotated[
        int, whole_number("--tokens", "Of the prompt.", least=1, most=MAX_TOKENS, panel=REQUEST)
    ] = 4096,
    cached: Annotated[
        int,
        whole_number(
            "--cached",
            "Tokens at its start that the decode engine has already: whole blocks.",
            least=0,
            panel=REQUEST,
        ),
    ] = 0,
    mode: Annotated[
        PlanMode,
        typer.Option(
            help="Who moves: in blockwise decode ranks read, in layerwise prefill ranks write.",
            rich_help_panel=REQUEST,
        ),
    ] = PlanMode.BLOCKWISE,
    transfer_id: Annotated[
        str,
        typer.Option(
            help="Chooses which of several replicas serve, as a router's ids do.", rich_help_panel=REQUEST
        ),
    ] = TRANSFER_ID,
    transfers: Annotated[
        int,
        whole_number(
            "--transfers",
            "Also count the load over so many random ids.",
            least=0,
            most=MAX_TRANSFERS,
            panel=REQUEST,
        ),
    ] = 0,
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", help="Draw it.", rich_help_panel=OUTPUT)
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json",
            metavar="FILE",
            help="Every leg with its layers, heads and token ranges, and every copy as block and offset on "
            "both sides; - writes it to the standard output and nothing else. See below.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
) -> None:
    """Say who copies what from whom between two layouts, without starting anything.

    dfirst plan --prefill tp=8,dcp=8 --decode tp=8,dcp=4,dp=2 --mla --convention b --interleave 128

    Prints what each rank holds, who reads what from whom, bytes and copies, the load of each rank, whom each
    rank waits for before it frees its blocks, and who releases a rank that nobody reads. Engines that are
    started with the same options follow this plan. Ends with 1 and one sentence if the two cannot work
    together.
    """
    from . import answer, drawing, notes, tables
    from .work_out import WhatIf

    if not transfer_id:
        fail("--transfer-id is '', which no transfer is called; give another one, or leave it out", 2)
    to_stdout = json_file == Path("-")
    if svg is not None and json_file is not None and svg.resolve() == json_file.resolve():
        fail(f"--svg and --json are both {svg}; give each its own file", 2)
    prepare("--svg", svg, ".svg")
    prepare("--json", None if to_stdout else json_file)
    followed = (convention or Convention.A).value
    try:
        if cached > tokens:
            raise ValueError(f"--cached is {cached}; give a whole number of at most {tokens}, as --tokens is")
        question = Question(
            prefill=read_engine(
                "prefill",
                prefill,
                block_tokens=prefill_block_size or block_size,
                interleave=interleave,
                layer_split=prefill_layers,
                convention=followed,
            ),
            decode=read_engine(
                "decode",
                decode,
                block_tokens=decode_block_size or block_size,
                interleave=interleave,
                layer_split=decode_layers,
                convention=followed,
            ),
            model=read_model(layers, mla=mla, kv_heads=kv_heads, head_size=head_size, dtype=dtype),
            prompt_tokens=tokens,
            cached_tokens=cached,
            mode=mode.value,
            transfer_id=transfer_id,
            transfers=transfers,
            heads_outside=kv_layout is KvLayout.HND,
            whole_blocks=whole_blocks,
        )
        check_pieces(question)
        found = WhatIf(question).answer(with_copies=json_file is not None)
    except ValueError as error:
        fail(str(error), 2)
    for note in notes.notes(question, convention_given=convention is not None):
        typer.echo(f"note: {note}", err=True)
    if to_stdout:
        typer.echo(answer.encode(found), nl=False)
    elif json_file is not None:
        write("--json", json_file, answer.encode(found))
    if svg is not None and found.refusal is None:
        write("--svg", svg, drawing.svg(found))
    if found.refusal is not None:
        fail(found.refusal, 1)
    if not to_stdout:
        from rich.console import Console

        tables.show(found, Console())
