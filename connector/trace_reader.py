"""Reads the traces that engines write: what states a transfer passed on each side, and what it copied.

`trace_path` is a directory; every process of an engine appends to one file of its own there, a JSON object a
line. An object is a `Transition` (a machine changed its state) or, with machine "copy", a `Copy` (one
batch of bytes arrived or failed). Times are seconds since 1970 on the clock of the host that wrote them.
"""

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

COPY = "copy"
FREED = "FREED"
SIDES = ("prefill", "decode")
MEGABYTE = 1e6


class Transition(msgspec.Struct, frozen=True, kw_only=True):
    """A machine took a row of the spec."""

    time: float
    engine: str
    rank: int
    machine: str
    transfer: str
    row: str
    event: str
    source: str
    target: str
    attempt: int = 0
    peer: str | int | None = None
    process: str = ""

    @property
    def side(self) -> str | None:
        """ "prefill" or "decode", of the machine of a request or of a rank; None for a leg's."""
        return next((side for side in SIDES if self.machine.startswith(f"{side}_")), None)


class Copy(msgspec.Struct, frozen=True, kw_only=True):
    """A batch of one-sided copies came to its end at `time`, after `seconds`."""

    time: float
    engine: str
    rank: int
    transfer: str
    bytes: int
    seconds: float
    ok: bool
    attempt: int = 0
    peer: str | int | None = None
    process: str = ""


class StatePassed(msgspec.Struct, frozen=True, kw_only=True):
    """A state that was entered, `seconds` after the transfer's first sign of life on either side."""

    state: str
    seconds: float
    machine: str


class Traces(msgspec.Struct, frozen=True):
    """All that one directory of traces holds, in order of time."""

    transitions: tuple[Transition, ...]
    copies: tuple[Copy, ...]

    def transfers(self) -> list[str]:
        """The names of all transfers, by when each was first seen."""
        return list(dict.fromkeys(step.transfer for step in self.transitions))

    def of(self, transfer: str) -> "TransferTrace":
        return TransferTrace(
            transfer,
            tuple(step for step in self.transitions if step.transfer == transfer),
            tuple(copy for copy in self.copies if copy.transfer == transfer),
        )


class TransferTrace(msgspec.Struct, frozen=True):
    """What one transfer left in the traces."""

    transfer: str
    transitions: tuple[Transition, ...]
    copies: tuple[Copy, ...]

    @property
    def started(self) -> float | None:
        return self.transitions[0].time if self.transitions else None

    @property
    def bytes(self) -> int:
        """Bytes that arrived, over all ranks."""
        return sum(copy.bytes for copy in self.copies if copy.ok)

    @property
    def megabytes_per_second(self) -> float | None:
        """Bytes by the time in which at least one copy ran; None where nothing was copied."""
        seconds = _covered_seconds((copy.time - copy.seconds, copy.time) for copy in self.copies if copy.ok)
        return self.bytes / MEGABYTE / seconds if seconds > 0 else None

    def states(self, side: str) -> list[StatePassed]:
        """The states that a side entered, by time: those of its request, and those of its first rank."""
        steps = [step for step in self.transitions if step.side == side and step.source != step.target]
        first_rank = min((step.rank for step in steps if not is_request_machine(step.machine)), default=0)
        start = self.started or 0.0
        return [
            StatePassed(state=step.target, seconds=round(step.time - start, 6), machine=step.machine)
            for step in steps
            if is_request_machine(step.machine) or step.rank == first_rank
        ]

    @property
    def is_over(self) -> bool:
        """Whether on both sides every rank that took part has let go of its blocks."""
        last: dict[tuple[str, str, int, int], str] = {}
        for step in self.transitions:
            if step.side is not None and not is_request_machine(step.machine):
                last[step.machine, step.engine, step.rank, step.attempt] = step.target
        sides = {machine.split("_")[0] for machine, *_ in last}
        return sides == set(SIDES) and set(last.values()) == {FREED}


def is_request_machine(machine: str) -> bool:
    """Whether it is the machine of a request at the scheduler, not that of a rank."""
    return machine.endswith("_request")


def read_traces(directory: Path) -> Traces:
    """Everything written so far. A last line without its end is still being written: left for later."""
    transitions: list[Transition] = []
    copies: list[Copy] = []
    for name in sorted(os.listdir(directory)) if directory.is_dir() else []:
        path = directory / name
        lines = path.read_bytes().split(b"\n")
        for number, line in enumerate(lines[:-1], start=1):
            if not line.strip():
                continue
            try:
                record = _decode(line)
            except msgspec.DecodeError as error:
                raise ValueError(
                    f"line {number} of the trace {path} is not a trace record: {error}"
                ) from error
            if isinstance(record, Copy):
                copies.append(record)
            else:
                transitions.append(record)
    transitions.sort(key=lambda step: step.time)
    copies.sort(key=lambda copy: copy.time)
    return Traces(tuple(transitions), tuple(copies))


class _Kind(msgspec.Struct):
    machine: str


_kind = msgspec.json.Decoder(_Kind)
_transition = msgspec.json.Decoder(Transition)
_copy = msgspec.json.Decoder(Copy)


def _decode(line: bytes) -> Transition | Copy:
    return _copy.decode(line) if _kind.decode(line).machine == COPY else _transition.decode(line)


def _covered_seconds(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of these spans of time."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
