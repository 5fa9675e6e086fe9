"""One job's copies by way of staging: gathered on one side, sent in long runs, scattered on the other.

The copies go in parts, and several are under way at once, each in a place of its own: while some are sent,
another is gathered and the last one scattered, on whichever side these are done. A place is used again only
when its part is through. Several are sent, so that the wire does not wait for the thread that looks after it.

Whatever happens, a batch that was begun is waited for before anything else: an exception, a stop and the end
of the lease leave nothing in flight on this side. What the owner works on holds the owner's blocks by itself.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from ..protocol.copies import Copies, join
from ..protocol.stages import MAX_RUNS, Slot, pack
from .kv_memory import KvMemory, Runs, joined
from .staging import PLACES, power_of_two

PATIENCE_SECONDS = 3.0
"""For how long a reader waits for a part before it reads directly: three questions may be lost by then. A
writer cannot choose: its bytes are in the owner's slot already.
"""
LEAST_PARTS, LEAST_PART_BYTES = 6, 2 << 20
"""What is small goes in this many parts or more, so that gathering and scattering are hidden behind sending,
as long as they do not get so small that asking for them takes longer.
"""
IN_FLIGHT = 3
"""Parts that are sent at the same time; fewer than there are places."""
Ask = Callable[[int, bytes, bytes], None]
"""Want a part of the owner: place, its addresses and its lengths, packed."""


class Batches(Protocol):
    """Batches of one run each with one peer, finished in the order in which they were begun. Nothing of a
    batch moves any more when ``finish`` returns; each one must be finished.
    """

    def begin(self, local: int, remote: int, length: int, /) -> object: ...
    def finish(self, batch: object, length: int, /) -> bool: ...


def part_bytes(size: int, place_bytes: int) -> int:
    """Return how large the parts of so many bytes are, in places of this size.

    A power of two below the places' own size: where a part's end cuts a long run, rows stay long.
    """
    return min(place_bytes, max(power_of_two(size // LEAST_PARTS), LEAST_PART_BYTES))


class Stopped(Exception):
    """The job is to end, and somebody else knows why."""


class Answers:
    """What the owner has answered: the control thread fills it, the peer's thread waits for it."""

    def __init__(self, lock: threading.Lock, stopped: Callable[[], bool]) -> None:
        """``stopped`` is asked with the lock held; the job is stopped when its lease ends, at the latest."""
        self._changed = threading.Condition(lock)
        self._stopped = stopped
        self._outstanding: set[int] = set()
        self._refused: set[int] = set()
        self.slot: Slot | None = None

    def expect(self, place: int) -> None:
        """A part is about to be asked for."""
        with self._changed:
            self._outstanding.add(place)

    def is_due(self, place: int) -> bool:
        """Return whether something is outstanding in a place: ``wait`` would not return at once."""
        with self._changed:
            return place in self._outstanding

    def take(self, place: int, slot: Slot | None) -> None:
        """Note an answer."""
        with self._changed:
            if slot is None:
                self._refused.add(place)
            self.slot = slot or self.slot
            self._outstanding.discard(place)
            self._changed.notify_all()

    def wake(self) -> None:
        """The job may have been stopped. Called with the lock held."""
        self._changed.notify_all()

    def wait(self, place: int, patience_seconds: float | None = None) -> bool:
        """Wait until nothing is outstanding in a place; return whether its part was staged: not, if there was
        no answer for ``patience_seconds``.

        Raises ``Stopped`` if the job is stopped meanwhile.
        """
        deadline = None if patience_seconds is None else time.monotonic() + patience_seconds
        with self._changed:
            while place in self._outstanding:
                if self._stopped():
                    raise Stopped
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return False
                self._changed.wait(left)
            refused = place in self._refused
            self._refused.discard(place)
            return not refused


@dataclass(frozen=True, eq=False)
class _Part:
    """A part as both sides see it, in one order."""

    copies: Copies

    @property
    def source(self) -> Runs:
        return joined(self.copies.source_addresses, self.copies.lengths)

    @property
    def target(self) -> Runs:
        return joined(self.copies.target_addresses, self.copies.lengths)


@dataclass(frozen=True, eq=False)
class _Flight:
    """A part that is being sent."""

    number: int
    part: _Part
    place: int
    batch: object


class StagedCopies:
    """The staged copies of one job. All methods run on its peer's thread."""

    def __init__(
        self, memory: KvMemory, place_bytes: int, batches: Batches, ask: Ask, answers: Answers
    ) -> None:
        self._memory = memory
        self._place_bytes = place_bytes
        self._batches = batches
        self._ask = ask
        self._next = 0
        self._flying: deque[_Flight] = deque()
        self.answers = answers
        self.bytes = 0
        """Of parts that are through on this side."""

    def pull(self, whole: Copies, own_slot: int, may_start: Callable[[], bool]) -> Copies | None:
        """Read everything; return what is left to be read directly, since the owner does not gather it or no
        rows can be made of it here.

        Raises ``Stopped`` if ``may_start`` says no or a batch fails.
        """
        parts = [_Part(part) for part in whole.split(MAX_RUNS, part_bytes(whole.bytes, self._place_bytes))]
        for place, part in enumerate(parts[:PLACES]):
            self._want(place, part.source)

        left: list[Copies] = []

        def scatter(flight: _Flight) -> None:
            try:
                self._memory.scatter(flight.part.target, own_slot + flight.place * self._place_bytes)
            except ValueError:  # nothing has moved: these bytes are read again
                left.append(flight.part.copies)
                self.bytes -= flight.part.copies.bytes

        def land(flight: _Flight) -> None:
            if flight.number + PLACES < len(parts):
                self._want(flight.place, parts[flight.number + PLACES].source)
            scatter(flight)

        with self._nothing_left_in_flight():
            for number, part in enumerate(parts):
                place = number % PLACES
                self._make_way(place, land)
                staged = self.answers.wait(place, PATIENCE_SECONDS)
                slot = self.answers.slot
                if not staged or slot is None:
                    self._land_all(scatter)
                    return join([*left, *(part.copies for part in parts[number:])])
                if not may_start():
                    raise Stopped
                self._send(number, part, place, own_slot, slot)
            self._land_all(land)
        return join(left) if left else None

    def push(self, whole: Copies, own_slot: int, may_start: Callable[[], bool]) -> Copies | None:
        """Write everything and want it scattered; return what is left and raise as ``pull`` does. ``settle``
        ends it.
        """
        if self.answers.slot is None:
            self._want(0, None)
            self.answers.wait(0)
        slot = self.answers.slot
        if slot is None:
            return whole
        places = min(PLACES, slot.places)

        def land(flight: _Flight) -> None:
            self._want(flight.place, flight.part.target)

        with self._nothing_left_in_flight():
            size = part_bytes(whole.bytes, min(self._place_bytes, slot.place_bytes))
            parts = [_Part(part) for part in whole.split(MAX_RUNS, size)]
            for done, part in enumerate(parts):
                number, place = self._next, self._next % places
                self._next += 1
                self._make_way(place, land)
                if not self.answers.wait(place):
                    raise OSError("the decode side could not scatter what was written")
                try:
                    self._memory.gather(part.source, own_slot + place * self._place_bytes)
                except ValueError:  # nothing has moved: this and what follows is written directly
                    self._land_all(land)
                    return join([part.copies for part in parts[done:]])
                if not may_start():
                    raise Stopped
                self._send(number, part, place, own_slot, slot)
            self._land_all(land)
        return None

    def settle(self) -> None:
        """Wait until the owner is through with every part.

        Raises ``Stopped`` if the job is stopped meanwhile, ``OSError`` if a part was not scattered.
        """
        staged = [self.answers.wait(place) for place in range(PLACES)]
        if not all(staged):
            raise OSError("the decode side could not scatter what was written")

    def _send(self, number: int, part: _Part, place: int, own_slot: int, slot: Slot) -> None:
        here = own_slot + place * self._place_bytes
        batch = self._batches.begin(here, slot.place(place), part.copies.bytes)
        self._flying.append(_Flight(number, part, place, batch))

    def _make_way(self, place: int, land: Callable[[_Flight], None]) -> None:
        """Land what flies for as long as it is too much, needs this place, or has time for it."""
        while self._flying and (
            len(self._flying) == IN_FLIGHT
            or place in {flight.place for flight in self._flying}
            or self.answers.is_due(place)
        ):
            self._land(land)

    def _land_all(self, land: Callable[[_Flight], None]) -> None:
        while self._flying:
            self._land(land)

    def _land(self, land: Callable[[_Flight], None]) -> None:
        flight = self._flying.popleft()
        size = flight.part.copies.bytes
        if not self._batches.finish(flight.batch, size):
            raise Stopped
        land(flight)
        self.bytes += size

    @contextmanager
    def _nothing_left_in_flight(self) -> Iterator[None]:
        try:
            yield
        finally:
            while self._flying:
                flight = self._flying.popleft()
                self._batches.finish(flight.batch, flight.part.copies.bytes)

    def _want(self, place: int, runs: Runs | None) -> None:
        self.answers.expect(place)
        if runs is None:
            self._ask(place, b"", b"")
        else:
            self._ask(place, pack(runs.starts), pack(runs.lengths))
