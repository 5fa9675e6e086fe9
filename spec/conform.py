"""Holds traces of running engines against the spec: `dfirst conform`.

Each file is walked through on its own, with the machines of the spec as they are (spec/machines) and what
spec/conformance.toml says of causes, messages and guards; then the files are held against each other. The
first line that breaks a rule is named. A file without an end belongs to a process that still runs or was
killed: what is unfinished in it is named, and is no violation.
"""

from collections.abc import Iterable
from pathlib import Path

import msgspec
from dfirst.protocol.trace_lines import EndLine, MessageLine, StartLine

from .conformance.between import check_between
from .conformance.files import TraceText, read_trace, trace_paths
from .conformance.replay import Replay
from .conformance.violation import Violation


class Unfinished(msgspec.Struct, frozen=True):
    """A machine that is not at its end in a file without an end."""

    file: str
    transfer: str
    machine: str
    state: str


class Conformance(msgspec.Struct, frozen=True, kw_only=True):
    """What was looked at, and what was found."""

    files: int
    lines: int
    transfers: int
    messages: int
    violation: Violation | None
    running: list[str]
    """Files without an end."""
    unfinished: list[Unfinished]

    @property
    def summary(self) -> str:
        """Say what conforms."""
        ends = f"; {len(self.running)} without an end" if self.running else ""
        counts = ((self.lines, "line"), (self.transfers, "transfer"), (self.messages, "message"))
        return ", ".join([f"{_count(self.files, 'file')}{ends}", *(_count(*each) for each in counts)])

    def words(self) -> list[str]:
        """Say to people that it conforms, and what is not over yet."""
        ended = [f"no end: {path}" for path in self.running]
        still = [
            f"unfinished: {one.transfer}: {one.machine} in {one.state}, {one.file}" for one in self.unfinished
        ]
        return [*ended, *still, f"conforms to the spec: {self.summary}"]


def conform(given: Iterable[Path], running: bool = False, ended: bool = False) -> Conformance:
    """Hold these files and directories against the spec.

    A file with an end promises that every transfer is over (rule L1); ``running`` takes no file at its word,
    and with ``ended`` those without an end promise it too: their processes were stopped when all was over.

    Raises ``OSError`` for a file that cannot be read.
    """
    texts = [read_trace(path) for path in trace_paths(given)]
    violations: list[Violation] = []
    unfinished: list[Unfinished] = []
    for text in texts:
        if text.start is None:
            violations += [text.broken] if text.broken else []
            continue
        replay = Replay(text, must_end=(text.ended or ended) and not running)
        found = replay.run()
        violations += [found] if found else []
        if running or not (text.ended or ended):
            unfinished += [
                Unfinished(str(text.path), entity.key.transfer, entity.machine, state)
                for entity, state in replay.unfinished()
            ]
    violations += check_between(texts)
    return Conformance(
        files=len(texts),
        lines=sum(len(text.lines) for text in texts),
        transfers=len({name for text in texts for name in _transfers(text)}),
        messages=sum(isinstance(line, MessageLine) for text in texts for _, line in text.lines),
        violation=min(violations, key=lambda one: (one.time, one.file, one.line), default=None),
        running=[str(text.path) for text in texts if not text.ended],
        unfinished=unfinished,
    )


def _count(number: int, one: str) -> str:
    return f"{number} {one if number == 1 else one + 's'}"


def _transfers(text: TraceText) -> set[tuple[str, int]]:
    named = [line for _, line in text.lines if not isinstance(line, StartLine | EndLine)]
    return {(line.transfer, line.attempt) for line in named if line.transfer}
