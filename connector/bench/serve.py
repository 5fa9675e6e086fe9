"""``dfirst bench serve``: the same prompts through a hand-over and without one, side by side.

All servers are started first and stay up: one engine alone, a pair with dfirst for all its modes, a pair for
each of vLLM's own connectors, all with the same small model and settings. Then the loads are sent one after
the other, one way at a time, and the order of the ways alternates from round to round: what else the machine
does hits them all alike.
"""

import asyncio
import shutil
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import msgspec
from dfirst.spec.output_file import write
from rich.console import Console

from ..demo_model import Kind, make_model
from ..endings import fail
from ..engine_spec import Executor
from ..launch import Server
from ..processes import LaunchError, end_on_sigterm_as_on_ctrl_c
from ..waiting import waiting
from .serve_cpu import cpu_times, used_between
from .serve_defaults import EXECUTOR, ROUNDS
from .serve_load import Load, LoadError, Sample, open_client, prompts, run_load
from .serve_plot import picture
from .serve_report import FIRST_TOKEN, THROUGHPUT, Cell, Measured, ServeReport, load_name, rows_of
from .serve_table import show
from .serve_ways import MODEL_NAME, TITLES, EngineSettings, Way, make_ways, missing_for

MODEL: Kind = "gqa"
LENGTHS = (1000, 4000)
AT_ONCE = (1, 4)
FIRST_TOKEN_OUTPUT = 4
REQUESTS_A_ROUND = 4
THROUGHPUT_TOKENS, THROUGHPUT_OUTPUT, THROUGHPUT_AT_ONCE, THROUGHPUT_REQUESTS = 1000, 16, 16, 32

# A prompt of 4,000 tokens is one chunk, as it is on machines where prefill pays; 8 KiB a token in the cache.
MAX_MODEL_LEN = 8192
PREFILL_CHUNK_TOKENS = 4096
KV_CACHE_BYTES = 512 * 1024 * 1024


class ServeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure, and where logs and the model go."""

    work_dir: Path
    ways: tuple[str, ...] = tuple(TITLES)
    lengths: tuple[int, ...] = LENGTHS
    at_once: tuple[int, ...] = AT_ONCE
    rounds: int = ROUNDS
    executor: Executor = EXECUTOR


def run_serve(settings: ServeSettings, console: Console) -> ServeReport:
    """Measure it all, or as much as there was time for until Ctrl-C.

    Raises ``LaunchError`` for a server that ends, ``LoadError`` for a wrong answer.
    """
    end_on_sigterm_as_on_ctrl_c()
    work = settings.work_dir.resolve()
    shutil.rmtree(work / "logs", ignore_errors=True)
    missing = {way: missing_for(way) for way in settings.ways}
    with waiting(console, f"making the {MODEL} model"):
        model = make_model(work / f"model-{MODEL}", MODEL)
    ways = make_ways(
        [way for way, reason in missing.items() if reason is None],
        EngineSettings(
            model=model,
            logs=work / "logs",
            max_model_len=MAX_MODEL_LEN,
            kv_cache_bytes=KV_CACHE_BYTES,
            prefill_chunk_tokens=PREFILL_CHUNK_TOKENS,
            executor=settings.executor,
        ),
    )
    servers: list[Server] = []
    measured: list[Measured] = []
    left_out = [f"{TITLES[way]} is left out: {why}" for way, why in missing.items() if why is not None]
    try:
        for way in ways:
            with waiting(console, f"starting what {TITLES[way.name]} needs"):
                _start(way, servers)
        for group in _measure(ways, settings, console):
            measured += group
    except KeyboardInterrupt:
        # On a busy machine it can take longer than its user waits; what is whole is worth telling.
        if not measured:
            raise
        turns = settings.rounds * len(cells(settings))
        left_out.append(f"interrupted after {len(measured) // len(ways)} of {turns} loads")
    finally:
        for server in servers:
            server.ask_to_stop()
        for server in servers:
            server.stop()
    report = ServeReport(
        model=f"the {MODEL} demo model",
        executor=settings.executor,
        rounds=settings.rounds,
        left_out=left_out,
        rows=rows_of(measured),
    )
    show(report, console)
    return report


def cells(settings: ServeSettings) -> list[Cell]:
    """The loads in the order in which they are sent."""
    found = [
        Cell(
            what=FIRST_TOKEN,
            load=Load(
                prompt_tokens=length,
                output_tokens=FIRST_TOKEN_OUTPUT,
                requests=max(REQUESTS_A_ROUND, 2 * at_once if at_once > 1 else 0),
                at_once=at_once,
                in_bursts=True,
            ),
        )
        for length in settings.lengths
        for at_once in settings.at_once
    ]
    throughput = Load(
        prompt_tokens=THROUGHPUT_TOKENS,
        output_tokens=THROUGHPUT_OUTPUT,
        requests=THROUGHPUT_REQUESTS,
        at_once=THROUGHPUT_AT_ONCE,
    )
    return [*found, Cell(what=THROUGHPUT, load=throughput)]


def in_turn(ways: Sequence[Way], turn: int) -> list[Way]:
    """Another order each time: forwards and backwards, then moved on by one."""
    start = turn // 2 % len(ways)
    moved = [*ways[start:], *ways[:start]]
    return moved[::-1] if turn % 2 else moved


def _start(way: Way, servers: list[Server]) -> None:
    new = [server for server in way.servers if server not in servers]
    for server in new:
        servers.append(server.start())
    for server in new:
        server.wait_ready()


def _measure(ways: Sequence[Way], settings: ServeSettings, console: Console) -> Iterator[list[Measured]]:
    """Yield each load as soon as it was sent all ways."""
    for length in dict.fromkeys((*settings.lengths, THROUGHPUT_TOKENS)):
        with waiting(console, f"warming up with {length} tokens"):
            load = Load(prompt_tokens=length, output_tokens=FIRST_TOKEN_OUTPUT, requests=2, at_once=2)
            for way in ways:
                _send(way, load, f"{way.name} warming up")
    loads = cells(settings)
    for number, (place, cell) in product(range(settings.rounds), enumerate(loads)):
        turn = number + 2 * place
        what = load_name(cell.what, cell.load.prompt_tokens, cell.load.at_once)
        with waiting(console, f"round {number + 1} of {settings.rounds}: {what}"):
            group = [_one(way, cell, f"{way.name} {number} {place}") for way in in_turn(ways, turn)]
        yield group


def _one(way: Way, cell: Cell, title: str) -> Measured:
    before = cpu_times(way.servers)
    samples, seconds = _send(way, cell.load, title)
    for server in way.servers:
        server.check()
    return Measured(
        cell=cell,
        way=way.name,
        samples=samples,
        seconds=seconds,
        cpu=used_between(before, cpu_times(way.servers)),
    )


def _send(way: Way, load: Load, title: str) -> tuple[list[Sample], float]:
    async def send() -> tuple[list[Sample], float]:
        async with open_client(way.url, way.headers) as client:
            return await run_load(client, MODEL_NAME, prompts(load, title), load)

    try:
        return asyncio.run(send())
    except LoadError as error:
        raise LoadError(
            f"{TITLES[way.name]}: {error}; its logs are those of {way.servers[0].log.parent}"
        ) from error


def run(
    quick: bool,
    ways: Sequence[str] | None,
    tokens: Sequence[int] | None,
    at_once: Sequence[int] | None,
    rounds: int,
    executor: Executor,
    work_dir: Path,
    json_file: Path | None,
    plot: Path | None,
) -> None:
    """The command."""
    unknown = [way for way in ways or () if way not in TITLES]
    if unknown:
        fail(f"--way {unknown[0]} is not known; use {', '.join(TITLES)}", 2)
    longest = MAX_MODEL_LEN - FIRST_TOKEN_OUTPUT
    if tokens and max(tokens) > longest:
        fail(f"--tokens {max(tokens)} is more than the engines here take; give at most {longest}", 2)
    settings = ServeSettings(
        work_dir=work_dir,
        ways=tuple(ways or TITLES),
        lengths=tuple(tokens or (LENGTHS[:1] if quick else LENGTHS)),
        at_once=tuple(at_once or (AT_ONCE[:1] if quick else AT_ONCE)),
        rounds=1 if quick else rounds,
        executor=executor,
    )
    try:
        report = run_serve(settings, Console())
    except (LaunchError, LoadError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        fail("interrupted; the engines are stopped", 130)
    if json_file is not None:
        write("--json", json_file, report.encode())
    if plot is not None:
        write("--plot", plot, picture(report))
