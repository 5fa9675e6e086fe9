"""One mistake at a time, and whether the exploration notices it.

A mutant is tried on one world after the other, small ones first, until a rule is broken. Each world is
explored without a mistake before: which rows it takes, and how long everything takes to end there after the
same faults, which is the bound for rule L1. That an event came for which the spec has no word (rule F3)
counts only where no world shows more than that.
"""

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import msgspec

from .alterations import Mutant, spec_mutants
from .configuration import Configuration
from .memory import Habits
from .mistakes import mistakes
from .search import Bounds, Result, Search
from .world import World
from .worlds import HUNT

WITHOUT_A_WORD = "F3"
WORLD_LIMIT, MUTANT_LIMIT, MORE_LIMIT = 400_000, 2_000_000, 250_000
"""States of one world, and of all of them, after which a mutant counts as not noticed there; and of all of
them, where an event without a word was noticed already.
"""


class Measure(NamedTuple):
    """What a world does without mistakes."""

    steps: int
    """Steps of time until all has ended."""
    wait_steps: int
    """Until vLLM waits for nothing."""
    bounds: Bounds
    """The first two, for each set of faults."""
    rows: frozenset[str]
    """The rows that are taken."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """How a mutant fared."""

    name: str
    about: str
    rule: str
    """The rule that it broke; empty if nothing was noticed."""
    text: str
    """How it showed."""
    world: str
    states: int
    """Visited in all worlds that were tried."""
    seconds: float
    """Of CPU time."""


@cache
def all_mutants() -> dict[str, Mutant]:
    """Return every mutant there is, by its name."""
    found = [*mistakes(), *spec_mutants()]
    named = {mutant.name: mutant for mutant in found}
    if len(named) < len(found):
        raise ValueError("two mutants have the same name")
    return named


def named_change(name: str, habits: Habits) -> AbstractContextManager[None]:
    """Return the change of a mutant to be made; no change for no name."""
    if not name:
        return nullcontext()
    if name not in all_mutants():
        raise ValueError(f"there is no mutant {name!r}")
    return all_mutants()[name].change(habits)


@cache
def measured(configuration: Configuration) -> Measure:
    """Return what a world does without mistakes. Raises ``ValueError`` if a rule is broken all the same."""
    patient = replace(
        configuration, told_apart=True, bound_steps=99, wait_bound_steps=99, mild_bounds_steps=()
    )
    result = Search(World(patient)).run()
    if result.found is not None or not result.complete:
        text = f"{result.found.rule}: {result.found.text}" if result.found else "too many states"
        raise ValueError(f"{configuration.name} is broken without any mistake: {text}")
    return Measure(result.steps, result.wait_steps, result.bounds, frozenset(result.rows))


def tried(name: str, first: str = "") -> Verdict:
    """Try one mutant, in this process; ``first`` names the world to begin with."""
    mutant = all_mutants()[name]
    started = time.process_time()
    states, verdict = 0, ("", "", "")
    for configuration in _worlds_for(mutant, first or mutant.shows_in):
        measure = measured(configuration)
        if mutant.rows and not mutant.rows & measure.rows:
            continue
        habits = Habits()
        with mutant.change(habits):
            result, unexpected = _explored(configuration, measure, habits)
        found, text = (result.found.rule, result.found.text) if result.found else ("", unexpected)
        states += result.states
        if found or (text and not verdict[0]):
            verdict = (found or WITHOUT_A_WORD, text, configuration.name)
        if found or states > (MORE_LIMIT if verdict[0] else MUTANT_LIMIT):
            break
    rule, text, world = verdict
    seconds = round(time.process_time() - started, 2)
    return Verdict(
        name=name, about=mutant.about, rule=rule, text=text, world=world, states=states, seconds=seconds
    )


def way_to(verdict: Verdict) -> Result | None:
    """Return the exploration in which a mutant broke a rule, made once more; None if it broke none."""
    configuration = next((each for each in HUNT if each.name == verdict.world), None)
    if configuration is None:
        return None
    measure, habits = measured(configuration), Habits()
    with named_change(verdict.name, habits):
        result, _ = _explored(configuration, measure, habits)
    return result if result.found else None


def _worlds_for(mutant: Mutant, first: str) -> list[Configuration]:
    """Return the worlds that may notice it: the one that is named, then small ones before larger ones."""

    def size(configuration: Configuration) -> tuple[int, int, int, bool]:
        things = configuration.transfers * configuration.ranks * configuration.batches
        return configuration.faults, things, len(configuration.kinds), not configuration.orderly

    fit = [configuration for configuration in HUNT if configuration.name.startswith(mutant.modes)]
    return sorted(fit, key=lambda each: (each.name != first, *size(each)))


def _explored(configuration: Configuration, measure: Measure, habits: Habits) -> tuple[Result, str]:
    """Explore a world with a mistake in it; name also an event that came and has no word in the spec."""
    bounded = replace(
        configuration,
        told_apart=True,
        bound_steps=measure.steps,
        wait_bound_steps=measure.wait_steps,
        mild_bounds_steps=(),
        limit=WORLD_LIMIT,
    )
    world = World(bounded, habits)
    world.watcher.strict = False
    result = Search(world, bounds=measure.bounds).run()
    return result, min(world.watcher.unexpected, default="")
