"""What a run has to answer for, and whether all of it is well."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import msgspec

from ..json_file import write_json
from .answers import Asked
from .outages import Outages

SHOWN = 10
"""Findings of one kind that are told in full."""


class BlocksHeld(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's KV blocks in use after the end."""

    engine: str
    blocks: int
    seconds: float
    """After the end, when they were counted: as soon as there were none, or when the time was over."""


class ChaosReport(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    seed: int
    minutes: float
    requests: int
    modes: dict[str, int]
    verdicts: dict[str, int]
    faults: int
    faults_by_kind: dict[str, int]
    never_injected: list[str]
    """Kinds that were planned and never came to pass."""
    wrong_answers: int
    without_answer: int
    unexcused_errors: int
    """Errors to a client though every server that its request needs was there."""
    excused_errors: int
    blocks_held: list[BlocksHeld]
    traces: str
    """What was held against the spec."""
    traces_refused: int
    transfers_unfinished: int
    """Not at their end on a rank that lives, half a minute after the load's."""
    errors_logged: int
    """Lines with which an engine says that the connector itself went wrong."""
    findings: list[str]
    """What is not well, in sentences."""

    @property
    def is_well(self) -> bool:
        return self.requests > 0 and self.faults > 0 and not self.findings

    def write(self, path: Path) -> None:
        write_json(path, self)


class Sums(msgspec.Struct, frozen=True, kw_only=True):
    """What the answers come to."""

    wrong: list[Asked]
    silent: list[Asked]
    unexcused: list[Asked]
    excused: int


def sums_of(answers: Iterable[Asked], outages: Outages, abort_allowed: frozenset[int]) -> Sums:
    """Sort the answers. An answer may be cut short by an abort only where one was ordered."""
    wrong, silent, unexcused, excused = [], [], [], 0
    for asked in answers:
        if asked.verdict == "wrong":
            wrong.append(asked)
        elif asked.verdict == "silent":
            silent.append(asked)
        elif asked.verdict == "aborted":
            if asked.question.number not in abort_allowed:
                unexcused.append(asked)
        elif asked.verdict in ("error", "formless", "cut"):
            if asked.verdict != "formless" and outages.excuses(asked):
                excused += 1
            else:
                unexcused.append(asked)
    return Sums(wrong=wrong, silent=silent, unexcused=unexcused, excused=excused)


def told(what: str, asked: Iterable[Asked]) -> list[str]:
    """Return a sentence for each of these, the first ones in full."""
    all_of_them = list(asked)
    lines = [
        f"{what}: request {one.question.client_id}, {one.question.mode}, after "
        f"{one.ended - one.sent:.1f} s: {one.verdict}: {one.detail}"
        for one in all_of_them[:SHOWN]
    ]
    rest = len(all_of_them) - SHOWN
    return [*lines, f"{what}: {rest} more"] if rest > 0 else lines


def count(values: Iterable[str]) -> dict[str, int]:
    """Return how often each occurs, the most frequent first."""
    return dict(Counter(values).most_common())
