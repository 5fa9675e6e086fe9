"""One job's copies by way of staging: gathered on one side, sent in long runs, scattered on the other.

The copies go in parts, and several are under way at once, each in a place of its own: while one is sent, the
next one is gathered and the last one scattered, on whichever side these are done. A place is used again only
when its part is through.

Whatever happens, a batch that was begun is waited for before anything else: an exception, a stop and the end
of the lease leave nothing in flight on this side. What the owner works on holds the owner's blocks by itself.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..protocol.copies import Copies, join
from ..protocol.stages import MAX_RUNS, Slot, pack
from .kv_memory import KvMemory, Runs, joined
from .staging import PLACES

PATIENCE_SECONDS = 3.0
"""For how long a reader waits for a part before it reads directly: three questions may be lost by then. A
writer cannot choose: its bytes are in the owner's slot already.
"""
Ask = Callable[[int, bytes, bytes], None]
"""Want a part of the owner: place, its addresses and its lengths, packed."""


class Batches(Protocol):
    """One run at a time with one peer. Nothing moves any more when ``finish`` returns."""

    def begin(self, local: int, remote: int, length: int, /) -> object: ...
    def finish(self, batch: object, length: int, /) -> bool: ...


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
        self.answers = answers
        self.bytes = 0
        """Of parts that are through on this side."""

    def pull(self, whole: Copies, own_slot: int, may_start: Callable[[], bool]) -> Copies | None:
        """Read everything; return what is left to be read directly if the owner does not gather it.

        Raises ``Stopped`` if ``may_start`` says no or a batch fails.
        """
        parts = [_Part(part) for part in whole.split(MAX_RUNS, self._place_bytes)]
        for place, part in enumerate(parts[:PLACES]):
            self._want(place, part.source)
        landed: _Part | None = None
        for number, part in enumerate(parts):
            place = number % PLACES
            staged = self.answers.wait(place, PATIENCE_SECONDS)
            slot = self.answers.slot
            if not staged or slot is None:
                self._scatter(landed, own_slot, number - 1)
                return _rest(parts[number:])
            if not may_start():
                raise Stopped
            here, length = own_slot + place * self._place_bytes, part.copies.bytes
            batch = self._batches.begin(here, slot.place(place), length)
            try:
                self._scatter(landed, own_slot, number - 1)
            finally:
                copied = self._batches.finish(batch, length)
            if not copied:
                raise Stopped
            if number + PLACES < len(parts):
                self._want(place, parts[number + PLACES].source)
            landed = part
        self._scatter(landed, own_slot, len(parts) - 1)
        return None

    def push(self, whole: Copies, own_slot: int, may_start: Callable[[], bool]) -> Copies | None:
        """Write everything and want it scattered; return and raise as ``pull`` does. ``settle`` ends it."""
        if self.answers.slot is None:
            self._want(0, None)
            self.answers.wait(0)
        slot = self.answers.slot
        if slot is None:
            return whole
        places = min(PLACES, slot.places)
        sent: tuple[_Part, int, object] | None = None
        try:
            for part in map(_Part, whole.split(MAX_RUNS, min(self._place_bytes, slot.place_bytes))):
                place = self._next % places
                self._next += 1
                if not self.answers.wait(place):
                    raise OSError("the decode side could not scatter what was written")
                self._memory.gather(part.source, own_slot + place * self._place_bytes)
                before, sent = sent, None
                self._finish(before)
                if not may_start():
                    raise Stopped
                here = own_slot + place * self._place_bytes
                sent = (part, place, self._batches.begin(here, slot.place(place), part.copies.bytes))
            before, sent = sent, None
            self._finish(before)
        finally:
            if sent is not None:
                self._batches.finish(sent[2], sent[0].copies.bytes)
        return None

    def settle(self) -> None:
        """Wait until the owner is through with every part.

        Raises ``Stopped`` if the job is stopped meanwhile, ``OSError`` if a part was not scattered.
        """
        staged = [self.answers.wait(place) for place in range(PLACES)]
        if not all(staged):
            raise OSError("the decode side could not scatter what was written")

    def _scatter(self, landed: _Part | None, own_slot: int, number: int) -> None:
        if landed is not None:
            self._memory.scatter(landed.target, own_slot + number % PLACES * self._place_bytes)
            self.bytes += landed.copies.bytes

    def _finish(self, sent: tuple[_Part, int, object] | None) -> None:
        if sent is None:
            return
        part, place, batch = sent
        if not self._batches.finish(batch, part.copies.bytes):
            raise Stopped
        self._want(place, part.target)
        self.bytes += part.copies.bytes

    def _want(self, place: int, runs: Runs | None) -> None:
        self.answers.expect(place)
        if runs is None:
            self._ask(place, b"", b"")
        else:
            self._ask(place, pack(runs.starts), pack(runs.lengths))


def _rest(parts: Sequence[_Part]) -> Copies:
    return join([part.copies for part in parts])
