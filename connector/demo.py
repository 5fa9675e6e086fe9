"""`dfirst demo`: prompts through a real prefill engine, a real decode engine and the router, in both modes.

One engine alone answers all prompts first and is stopped; then the pair answers them. Every answer must be
the same, token for token, and every prompt's KV cache must really have moved: the traces that the engines
write say so, and conform to the spec. Ends with a table, a JSON file and the exit status.
"""

import asyncio
import shutil
import time
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec
from dfirst.spec.conform import conform
from rich.console import Console

from .demo_client import Answer, ask_all
from .demo_model import Kind, make_model
from .demo_prompts import DemoRequest, Round, demo_rounds
from .demo_report import DemoReport, Exchange, make_report
from .demo_table import print_report
from .engine_options import EngineLayout
from .engine_spec import EngineSpec, Mode, block_tokens
from .host import runs_on_cpu
from .launch import Engine
from .local_set import LocalSet, LocalSetSpec
from .processes import end_on_sigterm_as_on_ctrl_c
from .trace_reader import Traces, read_traces
from .waiting import waiting

MODES: tuple[Mode, ...] = ("blockwise", "layerwise")
MODEL_NAME = "demo"
MAX_MODEL_LEN = 4096
PREFILL_CHUNK_TOKENS = 256
# How long the traces may need until they show that both sides let go of every block.
SETTLE_SECONDS = 20.0
SETTLE_POLL_SECONDS = 0.5


class DemoSettings(msgspec.Struct, frozen=True, kw_only=True):
    work_dir: Path
    json_file: Path
    # Leave logs and traces behind also when all is well.
    keep: bool = False
    kind: Kind = "gqa"
    prefill: EngineLayout = EngineLayout()
    decode: EngineLayout = EngineLayout()


def run_demo(settings: DemoSettings, console: Console) -> DemoReport:
    """Runs it all and prints the table; the report says whether it went well. Raises `LaunchError`."""
    end_on_sigterm_as_on_ctrl_c()
    work = settings.work_dir.resolve()
    logs, traces = work / "logs", work / "traces"
    for directory in (logs, traces):
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
    with waiting(console, f"making the {settings.kind} model"):
        model = make_model(work / f"model-{settings.kind}", settings.kind)
    block = block_tokens(str(model))
    rounds = [one for mode in MODES for one in demo_rounds(mode, block, PREFILL_CHUNK_TOKENS)]

    asked = tuple(request for one in rounds for request in one)
    references = answers_of_one_engine(
        str(model), logs / "single.log", MODEL_NAME, MAX_MODEL_LEN, asked, console
    )
    answers, seen = _answers_of_the_pair(settings, model, logs, traces, rounds, console)

    report = make_report(
        [Exchange(*parts) for parts in zip(asked, answers, references, strict=True)],
        seen,
        model=f"the {settings.kind} demo model",
        prefill=str(settings.prefill),
        decode=str(settings.decode),
        conformance=conform([traces], ended=True),
        # On a CPU vLLM keeps no prefixes of MLA models.
        caches_prefixes=settings.kind != "mla" or not runs_on_cpu(),
    )
    print_report(console, report)
    report.write(settings.json_file)
    console.print(f"written: {settings.json_file}", highlight=False)
    if settings.keep or report.problems:
        console.print(f"logs and traces are in {work}", highlight=False)
    else:
        shutil.rmtree(logs)
        shutil.rmtree(traces)
    return report


def answers_of_one_engine(
    model: str, log: Path, name: str, max_model_len: int, requests: tuple[DemoRequest, ...], console: Console
) -> list[Answer]:
    """The reference: each prompt alone, in an engine that knows nothing of transfers."""
    spec = EngineSpec(
        role="single", model=model, log=log, served_model_name=name, max_model_len=max_model_len
    )
    with Engine(spec) as engine:
        with waiting(console, "starting one engine for the reference answers"):
            engine.wait_ready()
        with waiting(console, f"{len(requests)} reference answers"):
            return asyncio.run(ask_all(engine.url, name, requests, at_once=False, through_router=False))


def _answers_of_the_pair(
    settings: DemoSettings, model: Path, logs: Path, traces: Path, rounds: list[Round], console: Console
) -> tuple[list[Answer], Traces]:
    spec = LocalSetSpec(
        model=str(model),
        served_model_name=MODEL_NAME,
        logs=logs,
        traces=traces,
        prefill=(settings.prefill,),
        decode=(settings.decode,),
        max_model_len=MAX_MODEL_LEN,
        prefill_chunk_tokens=PREFILL_CHUNK_TOKENS,
    )

    def around(what: str) -> AbstractContextManager[None]:
        return waiting(console, what)

    running = LocalSet(spec)
    running.start(around)
    try:
        answers: list[Answer] = []
        for mode in MODES:
            of_mode = [one for one in rounds if one[0].mode == mode]
            with waiting(console, f"{sum(map(len, of_mode))} requests {mode}"):
                for one in of_mode:
                    answers += asyncio.run(
                        ask_all(running.router.url, MODEL_NAME, one, at_once=True, through_router=True)
                    )
                    running.check()
        with waiting(console, "waiting for the last blocks to be let go"):
            seen = _settled(traces)
        return answers, seen
    finally:
        running.stop()


def _settled(directory: Path) -> Traces:
    """The traces once they show every transfer at its end, or as they are when that takes too long."""
    give_up = time.monotonic() + SETTLE_SECONDS
    while True:
        seen = read_traces(directory)
        if time.monotonic() > give_up or all(seen.of(name).is_over for name in seen.transfers()):
            return seen
        time.sleep(SETTLE_POLL_SECONDS)
