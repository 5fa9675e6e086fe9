"""An observer of machines: counts the rows that were taken, and writes the trace that ``trace_path`` asks
for, one file for each process. Without it every method returns at once.
"""

import logging
import os
from collections import Counter
from pathlib import Path

from ..protocol.commands import LegKey
from ..protocol.effects import Report
from ..protocol.messages import Message
from ..protocol.specification import TransitionSpec
from ..protocol.timing import Timing
from .trace_file import Traced, TraceFile

logger = logging.getLogger(__name__)


class Tracer:
    """What a rank, or a scheduler side, tells of itself."""

    def __init__(self, directory: str, engine: str, rank: int, part: str) -> None:
        self._file = _open(directory, engine, rank, f"{part}-{os.getpid()}")
        self.rows: Counter[str] = Counter()
        self.unexpected: Counter[str] = Counter()
        self.ignored = 0
        """Events that the spec lists as ignored."""

    def started(self, incarnation: str, timing: Timing | None = None) -> None:
        """Begin: who this is, and by which timers it goes."""
        if self._file is not None:
            self._file.started(incarnation, timing)

    def stepped(self, entity: Traced, row: TransitionSpec, source: str) -> None:
        """Note a step."""
        self.rows[row.id] += 1
        if self._file is not None:
            self._file.stepped(entity, row, source)

    def unheard(self, entity: Traced, event: str, expected: bool) -> None:
        """Count an event that no row wanted; one that the spec does not list either is logged."""
        if expected:
            self.ignored += 1
        else:
            machine = entity.machine.spec.name
            self.unexpected[f"{machine}.{entity.state}.{event}"] += 1
            logger.warning("%s: %s got %s in state %s", entity.key.transfer_id, machine, event, entity.state)

    def received(self, message: Message, route: bytes) -> None:
        """Note a message that came in."""
        if self._file is not None:
            self._file.received(message, route)

    def sent(self, message: Message, route: bytes | None = None) -> None:
        """Note a message that is about to leave, by the route of the one that it answers if it does."""
        if self._file is not None:
            self._file.sent(message, route)

    def copying(self, leg: LegKey) -> None:
        """Note that a leg's copies are about to start."""
        if self._file is not None:
            self._file.copies_started(leg)

    def copied(self, leg: LegKey, moved_bytes: int, seconds: float, ok: bool) -> None:
        """Note the end of a leg's copies."""
        if self._file is not None:
            self._file.copies_ended(leg, moved_bytes, seconds, ok)

    def reported(self, report: Report) -> None:
        """Note that vLLM takes a report."""
        if self._file is not None:
            self._file.reported(report)

    def close(self) -> None:
        """End the trace: the process is stopped in good order."""
        file, self._file = self._file, None
        if file is not None:
            file.ended()


def _open(directory: str, engine: str, rank: int, process: str) -> TraceFile | None:
    if not directory:
        return None
    part, _, number = process.rpartition("-")
    whose = part if rank < 0 else f"{part}{rank}"
    name = f"{engine}-{whose}-{number}.jsonl"
    try:
        return TraceFile(Path(directory) / name.replace("/", "_"), process, engine, rank)
    except OSError as error:
        raise ValueError(f"trace_path {directory!r} cannot be written: {error}") from error
