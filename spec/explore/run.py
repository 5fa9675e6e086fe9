"""``dfirst explore``: explores a set of worlds, each in a process of its own, and says what was found."""

import json
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .chart import mermaid_chart, text_chart
from .configuration import Configuration
from .memory import Habits
from .scenario import read_head, replay, write_scenario
from .search import Result, Search
from .sites import Sites
from .telling import Line
from .violation import Violation
from .world import World
from .worlds import FULL, QUICK, named

WIDTH_WITHOUT_TERMINAL = 120
TELL_SECONDS = 30.0
"""So often a run whose output goes to a file or a pipe says how far it is."""
Counts = Queue[tuple[str, int, int, int]]
_counts: list[Counts] = []


def explore(quick: bool, name: str | None, json_file: Path | None, scenarios: Path, console: Console) -> bool:
    """Explore a set, or one configuration; return whether nothing was found."""
    configurations = (named(name, quick),) if name else QUICK if quick else FULL
    started = time.monotonic()
    results = _with_progress(configurations, console)
    seconds = time.monotonic() - started
    wide = console if console.is_terminal else Console(file=console.file, width=WIDTH_WITHOUT_TERMINAL)
    wide.print(_table(results))
    broken = [result for result in results if result.found is not None or not result.complete]
    states = sum(result.states for result in results)
    transitions = sum(result.transitions for result in results)
    console.print(
        f"{states:,} states, {transitions:,} transitions, {len(broken)} violations, {seconds:.1f} s"
    )
    for result in broken:
        show(result, scenarios, console)
    if json_file is not None:
        summary = {
            "states": states,
            "transitions": transitions,
            "violations": len(broken),
            "seconds": round(seconds, 1),
            "configurations": [_row(result) for result in results],
        }
        json_file.write_text(json.dumps(summary, indent=2) + "\n")
    return not broken


def replay_file(path: Path, console: Console) -> bool:
    """Replay a scenario file, with its mutant if it names one; return whether it ended in no violation."""
    from .mutants import named_change

    head = read_head(path)
    if "configuration" not in head:
        raise ValueError(f"{path} does not begin with the name of a configuration")
    habits = Habits()
    with named_change(head.get("mutant", ""), habits):
        names, lines, violation = _replayed(path, head["configuration"], habits)
    chart = text_chart(names, lines, str(violation) if violation else "")
    console.print(chart, markup=False, highlight=False, soft_wrap=True)
    return violation is None


def _replayed(path: Path, name: str, habits: Habits) -> tuple[list[str], list[Line], Violation | None]:
    """A file may come from either set's world of that name: the one with more faults is tried first."""
    try:
        return _replayed_in(path, named(name, quick=False), habits)
    except ValueError:
        return _replayed_in(path, named(name, quick=True), habits)


def _replayed_in(
    path: Path, configuration: Configuration, habits: Habits
) -> tuple[list[str], list[Line], Violation | None]:
    world = World(configuration, habits)
    world.watcher.strict = False
    lines, violation = replay(path, world)
    return world.sites.names, lines, violation


def show(result: Result, scenarios: Path, console: Console, mutant: str = "") -> None:
    """Print what was found as a chart, and write it as a scenario file."""
    found = result.found
    if found is None:
        console.print(f"{result.configuration.name}: gave up after {result.states:,} states")
        return
    names = Sites(result.configuration).names
    ending = f"{found.rule}: {found.text}"
    console.rule(result.configuration.name)
    console.print(text_chart(names, found.lines, ending), markup=False, highlight=False, soft_wrap=True)
    console.print(
        "\n```mermaid\n" + mermaid_chart(names, found.lines, ending) + "\n```",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    scenarios.mkdir(parents=True, exist_ok=True)
    path = scenarios / f"{result.configuration.name}-{found.rule}.txt"
    write_scenario(path, result.configuration, found, mutant)
    # Unbroken, so that it can be copied.
    told = f"written to {path}; see it again with: dfirst explore --replay {path}"
    console.print(told, markup=False, highlight=False, soft_wrap=True)


def explored(configuration: Configuration) -> Result:
    """Explore one world, in this process."""

    def told(states: int, transitions: int, depth: int) -> None:
        if _counts:
            _counts[0].put((configuration.name, states, transitions, depth))

    return Search(World(configuration), told).run()


def workers() -> int:
    """Return how many processes are worth starting."""
    return max(1, min(2, len(os.sched_getaffinity(0))))


def _take_queue(queue: Counts) -> None:
    _counts[:] = [queue]


def _with_progress(configurations: Sequence[Configuration], console: Console) -> list[Result]:
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        counts: Counts = manager.Queue()
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total} worlds"),
            TimeElapsedColumn(),
        )
        with (
            ProcessPoolExecutor(workers(), context, _take_queue, (counts,)) as pool,
            Progress(*columns, console=console, transient=True) as progress,
        ):
            futures = [pool.submit(explored, configuration) for configuration in configurations]
            task = progress.add_task("exploring", total=len(futures))
            told = time.monotonic()
            for done, text in _watch(futures, counts):
                progress.update(task, completed=done, description=text)
                if not console.is_terminal and time.monotonic() - told >= TELL_SECONDS:
                    told = time.monotonic()
                    console.print(f"{done}/{len(futures)} worlds, {text}", highlight=False)
            return [future.result() for future in futures]


def _watch(futures: list[Future[Result]], counts: Counts) -> Iterator[tuple[int, str]]:
    latest: dict[str, tuple[int, int]] = {}
    waiting = set(futures)
    while waiting:
        _, waiting = wait(waiting, timeout=0.5, return_when=FIRST_COMPLETED)
        try:
            while True:
                name, states, _, depth = counts.get_nowait()
                latest[name] = (states, depth)
        except Empty:
            pass
        states = sum(states for states, _ in latest.values())
        deepest = max((depth for _, depth in latest.values()), default=0)
        yield len(futures) - len(waiting), f"{states:,} states, depth {deepest}"


def _table(results: Sequence[Result]) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0))
    table.add_column("world", no_wrap=True)
    # Short, and on two lines: so that the table stands on a terminal of 80 columns.
    for title in ("faults", "states", "transi-\ntions", "depth", "ends\nwithin", "se-\nconds"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("broken", overflow="fold")
    for result in results:
        table.add_row(
            result.configuration.name,
            str(result.configuration.faults),
            f"{result.states:,}",
            f"{result.transitions:,}",
            str(result.depth),
            str(result.steps),
            f"{result.seconds:.1f}",
            "none" if result.found is None and result.complete else _finding(result),
        )
    return table


def _finding(result: Result) -> str:
    return result.found.rule if result.found else "too many states"


def _row(result: Result) -> dict[str, Any]:
    configuration = result.configuration
    return {
        "name": configuration.name,
        "mode": configuration.mode,
        "prefill_ranks": configuration.prefill_ranks,
        "decode_ranks": configuration.decode_ranks,
        "faults": configuration.faults,
        "states": result.states,
        "transitions": result.transitions,
        "depth": result.depth,
        "end_steps": result.steps,
        "end_steps_mild": result.mild_steps,
        "seconds": round(result.seconds, 1),
        "violation": "" if result.found is None else f"{result.found.rule}: {result.found.text}",
        "complete": result.complete,
    }
