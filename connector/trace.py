"""Writes what happens to transfers as JSON lines: every step of every machine, every copy.

One file for each process, in the directory that ``trace_path`` names. Times are seconds since 1970. A trace
that cannot be written is said once and then given up: it never stops a transfer.
"""

import contextlib
import logging
import os
import time
from collections import Counter
from io import BufferedWriter
from pathlib import Path
from typing import Protocol

import msgspec

from ..protocol.commands import LegKey
from ..protocol.messages import TransferKey
from ..protocol.specification import MachineSpec, TransitionSpec

logger = logging.getLogger(__name__)


class TracedMachine(Protocol):
    """The part of a bound machine that a trace names."""

    spec: MachineSpec


class Traced(Protocol):
    """What a trace needs of the object that took a step."""

    state: str

    @property
    def machine(self) -> TracedMachine: ...

    @property
    def key(self) -> TransferKey: ...

    @property
    def peer_name(self) -> str | None: ...


class StepLine(msgspec.Struct, frozen=True, kw_only=True):
    """A machine took a row of the spec."""

    time: float
    process: str
    engine: str
    rank: int
    machine: str
    transfer: str
    attempt: int
    peer: str | None
    row: str
    event: str
    source: str
    target: str


class CopyLine(msgspec.Struct, frozen=True, kw_only=True):
    """A leg's copies came to their end."""

    time: float
    process: str
    engine: str
    rank: int
    machine: str
    transfer: str
    attempt: int
    peer: str
    bytes: int
    seconds: float
    ok: bool


class Tracer:
    """An observer of machines. Without a directory it only counts."""

    def __init__(self, directory: str, engine: str, rank: int, part: str) -> None:
        self._engine = engine
        self._rank = rank
        self._process = f"{part}-{os.getpid()}"
        self._encoder = msgspec.json.Encoder()
        name = f"{engine}-{part}{rank}-{os.getpid()}.jsonl"
        self._file = self._open(directory, name.replace("/", "_"))
        self.rows: Counter[str] = Counter()
        self.unexpected: Counter[str] = Counter()

    def stepped(self, entity: Traced, row: TransitionSpec, source: str) -> None:
        """Note a step."""
        self.rows[row.id] += 1
        if self._file is None:
            return
        self._write(
            StepLine(
                time=time.time(),
                process=self._process,
                engine=self._engine,
                rank=self._rank,
                machine=entity.machine.spec.name,
                transfer=entity.key.transfer_id,
                attempt=entity.key.attempt,
                peer=entity.peer_name,
                row=row.id,
                event=row.event,
                source=source,
                target=entity.state,
            )
        )

    def unheard(self, entity: Traced, event: str, expected: bool) -> None:
        """Count an event that no row wanted; one that the spec does not list either is logged."""
        if not expected:
            machine = entity.machine.spec.name
            self.unexpected[f"{machine}.{entity.state}.{event}"] += 1
            logger.warning("%s: %s got %s in state %s", entity.key.transfer_id, machine, event, entity.state)

    def copied(self, leg: LegKey, moved_bytes: int, seconds: float, ok: bool) -> None:
        """Note the end of a leg's copies."""
        if self._file is not None:
            self._write(
                CopyLine(
                    time=time.time(),
                    process=self._process,
                    engine=self._engine,
                    rank=self._rank,
                    machine="copy",
                    transfer=leg.key.transfer_id,
                    attempt=leg.key.attempt,
                    peer=f"{leg.engine_id}/{leg.rank}",
                    bytes=moved_bytes,
                    seconds=seconds,
                    ok=ok,
                )
            )

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # the disk is full, and that was said already
                file.close()

    def _open(self, directory: str, name: str) -> BufferedWriter | None:
        if not directory:
            return None
        try:
            Path(directory).mkdir(parents=True, exist_ok=True)
            return (Path(directory) / name).open("ab")
        except OSError as error:
            raise ValueError(f"trace_path {directory!r} cannot be written: {error}") from error

    def _write(self, line: StepLine | CopyLine) -> None:
        if self._file is None:
            return
        try:
            self._file.write(self._encoder.encode(line) + b"\n")
            self._file.flush()
        except OSError as error:
            logger.error("the trace ends here, it cannot be written: %s", error)
            self.close()
