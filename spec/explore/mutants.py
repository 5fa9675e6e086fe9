"""``dfirst explore --mutants``: one mistake at a time, and whether the exploration notices it.

A mutant is tried on the smallest worlds first, until one shows that a rule is broken. Each world is
explored without a mistake before, and how long things take to end there is the bound for rule L1. An event
for which the spec has no word (rule F3) counts only where no other rule is broken in the same
world.
"""

import json
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .alterations import Mutant, spec_mutants
from .configuration import Configuration
from .memory import Habits
from .mistakes import mistakes
from .run import workers
from .search import Search
from .world import World
from .worlds import HUNT


class Measure(NamedTuple):
    """What a world does without mistakes."""

    steps: int
    """Steps of time until all has ended."""
    wait_steps: int
    """Until vLLM waits for nothing."""
    mild_steps: int
    """The same, where one letter was lost."""
    rows: frozenset[str]
    """The rows that are taken."""


@dataclass(frozen=True)
class Verdict:
    """How a mutant fared."""

    name: str
    about: str
    rule: str
    """The rule that it broke; empty if nothing was noticed."""
    text: str
    world: str
    states: int
    seconds: float


def all_mutants() -> list[Mutant]:
    """Return every mutant there is."""
    return [*mistakes(), *spec_mutants()]


def named_change(name: str, habits: Habits) -> AbstractContextManager[None]:
    """Return the change of a mutant to be made; no change for no name."""
    if not name:
        return nullcontext()
    found = [mutant for mutant in all_mutants() if mutant.name == name]
    if not found:
        raise ValueError(f"there is no mutant {name!r}")
    return found[0].change(habits)


def hunt(only: str, json_file: Path | None, console: Console) -> bool:
    """Try all mutants whose name holds ``only``; return whether each was noticed."""
    started = time.monotonic()
    names = [mutant.name for mutant in all_mutants() if only in mutant.name]
    if not names:
        raise ValueError(f"no mutant's name holds {only!r}")
    verdicts = _hunted(names, console)
    console.print(_table(verdicts))
    survivors = [verdict for verdict in verdicts if not verdict.rule]
    seconds = time.monotonic() - started
    console.print(f"{len(verdicts)} mutants, {len(survivors)} not noticed, {seconds:.0f} s")
    if json_file is not None:
        rows = [verdict.__dict__ for verdict in verdicts]
        json_file.write_text(json.dumps({"survivors": len(survivors), "mutants": rows}, indent=2) + "\n")
    return not survivors


def measured(configuration: Configuration) -> Measure:
    """Return how long things take to end in a world without mistakes."""
    patient = replace(configuration, bound_steps=99, wait_bound_steps=99, mild_bounds_steps=(99, 99))
    result = Search(World(patient)).run()
    if result.found is not None:
        raise ValueError(f"{configuration.name} breaks {result.found.rule} without any mistake")
    return Measure(result.steps, result.wait_steps, result.mild_steps, frozenset(result.rows))


def tried(name: str, bounds: dict[str, Measure]) -> Verdict:
    """Try one mutant, in this process."""
    mutant = next(mutant for mutant in all_mutants() if mutant.name == name)
    started = time.monotonic()
    states, rule, text, where = 0, "", "no world takes it", ""
    for configuration in HUNT:
        measure = bounds[configuration.name]
        if not configuration.name.startswith(mutant.modes):
            continue
        if mutant.rows and not mutant.rows & measure.rows:
            continue
        configuration = replace(
            configuration,
            bound_steps=measure.steps,
            wait_bound_steps=measure.wait_steps,
            mild_bounds_steps=(0, measure.mild_steps),
        )
        habits = Habits()
        with mutant.change(habits):
            rule, text, seen = _noticed(configuration, habits)
        states += seen
        if rule:
            where = configuration.name
            break
    return Verdict(name, mutant.about, rule, text, where, states, time.monotonic() - started)


def _noticed(configuration: Configuration, habits: Habits) -> tuple[str, str, int]:
    world = World(configuration, habits)
    world.watcher.strict = False
    result = Search(world).run()
    if result.found is not None:
        return result.found.rule, result.found.text, result.states
    if world.watcher.unexpected:
        return "F3", sorted(world.watcher.unexpected)[0], result.states
    return "", "", result.states


def _hunted(names: Sequence[str], console: Console) -> list[Verdict]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    context = multiprocessing.get_context("spawn")
    found: dict[str, Verdict] = {}
    with (
        ProcessPoolExecutor(workers(), context) as pool,
        Progress(*columns, console=console, transient=True) as progress,
    ):
        task = progress.add_task("worlds without mistakes", total=len(names))
        bounds = dict(zip((each.name for each in HUNT), pool.map(measured, HUNT), strict=True))
        for future in as_completed([pool.submit(tried, name, bounds) for name in names]):
            verdict = future.result()
            found[verdict.name] = verdict
            survivors = sum(1 for each in found.values() if not each.rule)
            progress.update(task, advance=1, description=f"mutants ({survivors} not noticed)")
            if not verdict.rule:
                told = f"not noticed: {verdict.name} ({verdict.about}) {verdict.text}"
                console.print(told, highlight=False)
    return [found[name] for name in names]


def _table(verdicts: Sequence[Verdict]) -> Table:
    table = Table(box=None, header_style="bold")
    for title in ("mutant", "what", "breaks", "in world"):
        table.add_column(title, no_wrap=True)
    table.add_column("states", justify="right")
    table.add_column("how it shows", overflow="fold")
    for verdict in verdicts:
        rule = verdict.rule or "NOT NOTICED"
        table.add_row(verdict.name, verdict.about, rule, verdict.world, f"{verdict.states:,}", verdict.text)
    return table
