"""Visits every state of a world, nearest first, and follows each to its end.

What is kept of a state is a 16-byte hash, the number of the state that it was first reached from with the
place of the action that led there, and the number of the state that comes next once faults stop. So a
path to a violation is a shortest one, and rule L1 needs no further stepping: after the search the last of
these is followed from every state, each state once, as many states lead into the same continuation.
"""

import marshal
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

from .bytes_check import check_bytes
from .configuration import Configuration
from .state import HARSH, LATE, NAMES_FROM, SLOWED, Action, State
from .telling import Line, sentence, tell
from .violation import Violation
from .world import World

NOWHERE = 0xFFFFFFFF
REPORT_EVERY = 4096

Progress = Callable[[int, int, int], None]
"""Hears of states, transitions and depth from time to time."""
Circumstances = tuple[int, int, bool]
"""What a state has met (its marks), how many faults, and whether a transfer in it is given up."""


class Longest(NamedTuple):
    """Steps of time, once faults stop."""

    end: int
    """Until all has ended."""
    wait: int
    """Until vLLM waits for nothing."""


Bounds = dict[Circumstances, Longest]


@dataclass
class Found:
    """A violation and the shortest way to it."""

    rule: str
    text: str
    path: list[Action]
    """Means something in the world that was searched only: letters are numbered as they are first written."""
    lines: list[Line] = field(default_factory=list)
    sentences: list[str] = field(default_factory=list)
    """The path in words, each naming its action in any world of the same configuration."""


@dataclass
class Result:
    """What an exploration came to."""

    configuration: Configuration
    states: int = 0
    transitions: int = 0
    depth: int = 0
    seconds: float = 0.0
    found: Found | None = None
    rows: set[str] = field(default_factory=set)
    steps: int = 0
    """The longest time that anything took to end once faults had stopped."""
    wait_steps: int = 0
    """The longest time that vLLM had to wait once faults had stopped."""
    mild_steps: int = 0
    bounds: Bounds = field(default_factory=dict)
    """The longest of these times, by what had been met; empty where a world does not tell that apart."""
    complete: bool = True


class Search:
    """One exploration."""

    def __init__(self, world: World, progress: Progress | None = None, bounds: Bounds | None = None) -> None:
        """``bounds`` are held besides those of the configuration: what other circumstances may take, where
        these are told apart.
        """
        self.world = world
        self.told_apart = world.configuration.told_apart
        self.progress = progress
        self.bounds = bounds or {}
        self.numbers: dict[bytes, int] = {}
        self.parents = array("I")
        self.places = array("H")
        self.following = array("I")
        self.takes_time = bytearray()
        self.ended = bytearray()
        self.served = bytearray()
        self.forgotten = bytearray()
        self.mild = bytearray()
        self.met: list[Circumstances] = []
        self._met: dict[Circumstances, Circumstances] = {}
        self.result = Result(world.configuration)

    def run(self) -> Result:
        """Explore, and say what was found."""
        started = time.monotonic()
        result = self.result
        try:
            check_bytes(self.world.sites)
            first = self.world.first()
            self._number(first, NOWHERE, 0)
            level = [(0, first)]
            while level:
                level = self._level(level)
                result.depth += bool(level)
                if len(self.numbers) > self.world.configuration.limit:
                    result.complete = False
                    break
            if result.complete:
                self._check_ends()
        except Violation as violation:
            result.found = Found(violation.rule, violation.text, [])
        except _Stop as stop:
            result.found = stop.found
            self._put_into_words(stop.found)
        result.states = len(self.numbers)
        result.rows = self.world.watcher.rows
        result.seconds = time.monotonic() - started
        return result

    def path(self, number: int) -> list[Action]:
        """Return the actions that lead to a state."""
        places = []
        while self.parents[number] != NOWHERE:
            places.append(self.places[number])
            number = self.parents[number]
        state, actions = self.world.first(), []
        for place in reversed(places):
            action, cost = self.world.choices(state)[place]
            actions.append(action)
            state = self.world.apply(state, action, cost)
        return actions

    def _level(self, level: list[tuple[int, State]]) -> list[tuple[int, State]]:
        world, result, numbers = self.world, self.result, self.numbers
        coming: list[tuple[int, State]] = []
        for number, state in level:
            place = 0
            try:
                for place, (action, cost) in enumerate(world.choices(state)):
                    reached = world.apply(state, action, cost)
                    digest = blake2b(marshal.dumps(tuple(reached), 2), digest_size=16).digest()
                    other = numbers.get(digest)
                    if other is None:
                        other = self._number(reached, number, place, digest)
                        coming.append((other, reached))
                    if place == 0:
                        self.following[number] = other
                        self.takes_time[number] = action[0] == "tick"
            except Violation as violation:
                path = [*self.path(number), action]
                raise _Stop(Found(violation.rule, violation.text, path)) from violation
            result.transitions += place + 1
            if self.progress and not number % REPORT_EVERY:
                self.progress(len(numbers), result.transitions, result.depth)
        return coming

    def _number(self, state: State, parent: int, place: int, digest: bytes = b"") -> int:
        number = len(self.numbers)
        digest = digest or blake2b(marshal.dumps(tuple(state), 2), digest_size=16).digest()
        self.numbers[digest] = number
        self.parents.append(parent)
        self.places.append(place)
        self.following.append(NOWHERE)
        self.takes_time.append(0)
        self.ended.append(self.world.ended(state))
        used = self.world.configuration.faults - state.left
        self.forgotten.append(all(core < 0 or self.world.ranks.empty[core] for core in state.cores))
        self.served.append(not self.world.requests.waiting(state))
        self.mild.append(255 if state.marks & (HARSH | LATE | SLOWED) else used)
        if self.told_apart:
            met = (state.marks >> NAMES_FROM, used, self.world.given_up(state))
            self.met.append(self._met.setdefault(met, met))
        return number

    # Rule L1

    def _check_ends(self) -> None:
        configuration = self.world.configuration
        ends = self._steps_to(self.ended)
        for number, taken in enumerate(ends):
            if taken < 0:
                raise _Stop(self._unended(number, "this never ends once faults stop"))
            self.result.steps = max(self.result.steps, taken)
            bound = configuration.bound_steps
            if taken > bound:
                raise _Stop(self._unended(number, f"this takes {taken} steps of time to end, not {bound}"))
        for number, taken in enumerate(self._steps_to(self.forgotten)):
            if taken < 0:
                raise _Stop(self._unended(number, "what has ended is never forgotten"))
        waits = self._steps_to(self.served)
        self._check_waits(waits)
        if self.told_apart:
            self._check_circumstances(ends, waits)

    def _check_waits(self, waits: list[int]) -> None:
        configuration, result = self.world.configuration, self.result
        bounds = configuration.mild_bounds_steps
        for number, taken in enumerate(waits):
            used = self.mild[number]
            if used >= len(bounds):
                result.wait_steps = max(result.wait_steps, taken)
                if taken > configuration.wait_bound_steps:
                    text = f"vLLM waits {taken} steps of time, not {configuration.wait_bound_steps}"
                    raise _Stop(self._unended(number, text))
                continue
            result.mild_steps = max(result.mild_steps, taken)
            if taken > bounds[used]:
                text = f"vLLM waits {taken} steps of time after {used} lost or late messages, not "
                raise _Stop(self._unended(number, f"{text}{bounds[used]}"))

    def _check_circumstances(self, ends: list[int], waits: list[int]) -> None:
        """Everything takes no longer than the same faults make it take in a world without mistakes."""
        longest = self.result.bounds
        for number, (end, wait) in enumerate(zip(ends, waits, strict=True)):
            met = self.met[number]
            known = self.bounds.get(met)
            if known is not None and (end > known.end or wait > known.wait):
                after = self.world.named_faults(met[0]) or "no fault"
                words, taken, bound = ("vLLM waits", wait, known.wait)
                if wait <= known.wait:
                    words, taken, bound = ("this takes", end, known.end)
                text = f"{words} {taken} steps of time after {after}, not {bound}"
                raise _Stop(self._unended(number, text))
            before = longest.get(met, Longest(0, 0))
            longest[met] = Longest(max(end, before.end), max(wait, before.wait))

    def _steps_to(self, ended: bytearray) -> list[int]:
        """Return for each state how many steps of time pass until all has ended for good; -1 for never."""
        count = len(self.numbers)
        unknown, open_mark = -2, -3
        steps = [unknown] * count
        for start in range(count):
            path = []
            number = start
            while steps[number] == unknown:
                steps[number] = open_mark
                path.append(number)
                following = self.following[number]
                if following in (number, NOWHERE):
                    steps[number] = 0 if ended[number] else -1
                    path.pop()
                    break
                number = following
            value = steps[number]
            if value == open_mark:
                value = -1
            for passed in reversed(path):
                if value >= 0 and not (value == 0 and ended[passed]):
                    value += self.takes_time[passed]
                steps[passed] = value
        return steps

    def _unended(self, number: int, text: str) -> Found:
        path = self.path(number)
        state = self._at(path)
        seen: set[State] = set()
        while state not in seen:
            seen.add(state)
            action, cost = self.world.choices(state)[0]
            path.append(action)
            state = self.world.apply(state, action, cost)
        rest = self.world.unended(state)
        return Found("L1", f"{text}{': ' if rest else ''}{rest}", path)

    def _put_into_words(self, found: Found) -> None:
        state = self.world.first()
        for place, action in enumerate(found.path):
            found.lines.append(tell(self.world, state, action))
            found.sentences.append(sentence(self.world, state, action))
            if place < len(found.path) - 1:
                state = self.world.apply(state, action, dict(self.world.choices(state))[action])

    def _at(self, path: list[Action]) -> State:
        state = self.world.first()
        for action in path:
            state = self.world.apply(state, action, dict(self.world.choices(state))[action])
        return state


class _Stop(Exception):
    def __init__(self, found: Found) -> None:
        self.found = found
