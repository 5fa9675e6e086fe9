"""Reads the traces that engines write: what states a transfer passed on each side, and what it copied.

`trace_path` is a directory; every process of an engine writes one file of its own there, by spec/trace.toml.
Only its steps and the ends of its copies count here; whether they conform to the spec is said by
`dfirst conform`. Times are seconds since 1970 on the clock of the host that wrote them.
"""

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from ..protocol.trace_lines import CopyLine, Line, StepLine

ENDED = "ended"
FREED = "FREED"
SIDES = ("prefill", "decode")
MEGABYTE = 1e6


class StatePassed(msgspec.Struct, frozen=True, kw_only=True):
    """A state that was entered, `seconds` after the transfer's first sign of life on either side."""

    state: str
    seconds: float
    machine: str


class Traces(msgspec.Struct, frozen=True):
    """All that one directory of traces holds, in order of time."""

    transitions: tuple[StepLine, ...]
    copies: tuple[CopyLine, ...]
    """Those that have ended."""

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
    transitions: tuple[StepLine, ...]
    copies: tuple[CopyLine, ...]

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
        steps = [
            step for step in self.transitions if side_of(step.machine) == side and step.source != step.target
        ]
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
            if side_of(step.machine) is not None and not is_request_machine(step.machine):
                last[step.machine, step.engine, step.rank, step.attempt] = step.target
        sides = {machine.split("_")[0] for machine, *_ in last}
        return sides == set(SIDES) and set(last.values()) == {FREED}


def side_of(machine: str) -> str | None:
    """ "prefill" or "decode", of the machine of a request or of a rank; None for a leg's."""
    return next((side for side in SIDES if machine.startswith(f"{side}_")), None)


def is_request_machine(machine: str) -> bool:
    """Whether it is the machine of a request at the scheduler, not that of a rank."""
    return machine.endswith("_request")


def read_traces(directory: Path) -> Traces:
    """Everything written so far. A last line without its end is still being written: left for later."""
    transitions: list[StepLine] = []
    copies: list[CopyLine] = []
    for name in sorted(os.listdir(directory)) if directory.is_dir() else []:
        path = directory / name
        lines = path.read_bytes().split(b"\n")
        for number, text in enumerate(lines[:-1], start=1):
            if not text.strip():
                continue
            try:
                line = _decoder.decode(text)
            except msgspec.DecodeError as error:
                raise ValueError(
                    f"line {number} of the trace {path} is no line of a trace: {error}"
                ) from error
            if isinstance(line, StepLine):
                transitions.append(line)
            elif isinstance(line, CopyLine) and line.phase == ENDED:
                copies.append(line)
    transitions.sort(key=lambda step: step.time)
    copies.sort(key=lambda copy: copy.time)
    return Traces(tuple(transitions), tuple(copies))


_decoder = msgspec.json.Decoder(Line)


def _covered_seconds(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of these spans of time."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
