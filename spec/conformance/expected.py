"""Holds whom an owner expects against who has a leg to it (rule S4): both sides make the same plan.

A rank that was restarted may have legs of another life, so only ranks with one incarnation are looked at.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from dfirst.protocol.trace_lines import ExpectLine, StepLine

from .files import TraceText
from .picture import Key
from .violation import Violation

WANTS = ("open", "release")
"""Events by which a leg begins that ends with a DONE."""


class Place(NamedTuple):
    """A transfer at an owner."""

    owner: str
    key: Key


def check_expected(files: list[TraceText]) -> Iterator[Violation]:
    """Return every word of an owner that leaves out a rank with a leg to it."""
    lives = defaultdict(set)
    for text in files:
        lives[_rank(text.name)].add(text.name)
    movers = _movers(files)
    for text in files:
        for number, line in text.lines:
            if not isinstance(line, ExpectLine):
                continue
            place = Place(text.name, Key(line.transfer, line.attempt))
            engines = {_engine(peer) for peer in line.peers}
            for mover in sorted(movers[place]):
                lived_once = len(lives[_rank(mover)]) == 1
                same = not line.peers or _engine(mover) in engines
                if mover not in line.peers and same and lived_once:
                    yield Violation(
                        file=str(text.path),
                        line=number,
                        time=line.time,
                        rule="S4",
                        transfer=line.transfer,
                        text=f"{text.name} does not expect {mover}, which by its own trace has a leg to it",
                    )


def _movers(files: list[TraceText]) -> dict[Place, set[str]]:
    found: dict[Place, set[str]] = defaultdict(set)
    for text in files:
        for _, line in text.lines:
            if isinstance(line, StepLine) and line.machine == "mover_leg" and line.event in WANTS:
                found[Place(line.peer, Key(line.transfer, line.attempt))].add(text.name)
    return found


def _rank(name: str) -> str:
    return name.rpartition("/")[0]


def _engine(name: str) -> str:
    return name.rsplit("/", 2)[0]
