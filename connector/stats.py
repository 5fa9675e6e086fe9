"""What dfirst counts.

Each rank, and the scheduler side, says after each step what has been added since it last said something;
``vllm_stats.py`` has vLLM carry it to the engine's own ``/metrics`` and to its log line. Nothing is
counted for it on the way of a request: expiries and leases are read off the rows of the spec that were taken.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping

import msgspec

from ..protocol.specification import SAME_STATE, TransitionSpec, load_machine, machine_names
from .trace import Tracer

LENT = "LENT"
EXPIRIES = {"lease_end": "lease", "hold_end": "hold", "silence": "silence", "deadline": "deadline"}
"""Events that are a time-out which something went wrong for, and what they are called here."""
CHANNEL = ("not_sent", "undecodable", "refused_connections")
CORE = ("unknown_leg", "other_incarnation", "too_many_transfers", "too_many_leases", "foreign_layout")


class CounterSpec(msgspec.Struct, frozen=True):
    """One counter on ``/metrics``."""

    name: str
    about: str
    labels: tuple[str, ...]


COUNTERS = {
    "transfers": CounterSpec(
        "dfirst_transfers",
        "Requests whose transfer ended on this engine: received (decode), failed (decode), sent (prefill)",
        ("mode", "outcome"),
    ),
    "bytes": CounterSpec(
        "dfirst_copied_bytes", "Bytes of KV cache that this engine's ranks copied as movers", ("mode",)
    ),
    "expiries": CounterSpec(
        "dfirst_expiries",
        "Time-outs that ended something: a lease, a hold, a peer's silence, a transfer's deadline",
        ("what",),
    ),
    "events": CounterSpec(
        "dfirst_ignored_events",
        "Events without a row in the spec: ignored ones that it lists, and unexpected ones",
        ("kind",),
    ),
    "channel": CounterSpec(
        "dfirst_side_channel_problems",
        "Messages that were dropped, not understood or not for this rank, and connections that were refused",
        ("what",),
    ),
}


class Observed(msgspec.Struct, kw_only=True):
    """What was added since the last time. Labels of a counter stand in one text, with ``/`` between them."""

    counts: dict[str, dict[str, int]] = {}
    """By the counter's name in ``COUNTERS``, then by its labels."""
    copy_seconds: dict[str, list[float]] = {}
    """How long the copies of a leg took, by mode."""
    leases: dict[str, int] = {}
    """Leases that run now, by the rank that has lent."""

    def add(self, other: "Observed") -> None:
        """Take in what another one has observed."""
        for name, labelled in other.counts.items():
            mine = self.counts.setdefault(name, {})
            for labels, count in labelled.items():
                mine[labels] = mine.get(labels, 0) + count
        for mode, seconds in other.copy_seconds.items():
            self.copy_seconds.setdefault(mode, []).extend(seconds)
        self.leases.update(other.leases)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to say."""
        return not (self.counts or self.copy_seconds or self.leases)


class RankStats:
    """Counts one rank. ``copied`` is called by the control thread, ``take`` by vLLM's."""

    def __init__(
        self, rank: int, tracer: Tracer, core: Mapping[str, int], channel: Mapping[str, int]
    ) -> None:
        self._rank = rank
        self._tracer = tracer
        self._core = core
        self._channel = channel
        self._copies: deque[tuple[str, int, float]] = deque()
        self._said: dict[str, Counter[str]] = {}
        self._leases = 0

    def copied(self, mode: str, moved_bytes: int, seconds: float) -> None:
        """Note that the copies of a leg have ended."""
        self._copies.append((mode, moved_bytes, seconds))

    def take(self) -> Observed | None:
        """Return what was added since the last call; None if nothing was."""
        observed = Observed()
        moved: Counter[str] = Counter()
        while self._copies:
            mode, moved_bytes, seconds = self._copies.popleft()
            moved[mode] += moved_bytes
            observed.copy_seconds.setdefault(mode, []).append(seconds)
        # Plain copies: they are whole, whatever the control thread counts meanwhile.
        rows = dict(self._tracer.rows)
        events = {"ignored": self._tracer.ignored, "unexpected": sum(dict(self._tracer.unexpected).values())}
        channel = picked(dict(self._channel), CHANNEL) | picked(dict(self._core), CORE)
        for name, now in (("expiries", expiries(rows)), ("events", Counter(events)), ("channel", channel)):
            added = now - self._said.get(name, Counter())
            self._said[name] = now
            if added:
                observed.counts[name] = dict(added)
        if moved:
            observed.counts["bytes"] = dict(moved)
        leases = leases_now(rows)
        if leases != self._leases:
            self._leases = leases
            observed.leases[str(self._rank)] = leases
        return None if observed.empty else observed


class SchedulerStats:
    """Counts the ends of transfers, each once for the whole engine."""

    def __init__(self) -> None:
        self._ended: Counter[str] = Counter()

    def ended(self, mode: str, outcome: str) -> None:
        """Note that all ranks have reported."""
        self._ended[f"{mode}/{outcome}"] += 1

    def take(self) -> Observed | None:
        """Return what was added since the last call; None if nothing was."""
        ended, self._ended = self._ended, Counter()
        return Observed(counts={"transfers": dict(ended)}) if ended else None


def picked(counters: Mapping[str, int], names: Iterable[str]) -> Counter[str]:
    """Return these counters alone."""
    return Counter({name: counters[name] for name in names if counters.get(name)})


def expiries(rows: Mapping[str, int]) -> Counter[str]:
    """Return how often each kind of time-out has ended something, by the rows that were taken."""
    found: Counter[str] = Counter()
    for row, count in rows.items():
        event = _ROWS[row].event
        if event in EXPIRIES:
            found[EXPIRIES[event]] += count
    return found


def leases_now(rows: Mapping[str, int]) -> int:
    """Return how many leases run: what was lent and has not ended, by the rows that were taken."""
    return sum(_LENDING[row] * count for row, count in rows.items() if row in _LENDING)


def _lending(row: TransitionSpec) -> int:
    after = row.source if row.target == SAME_STATE else row.target
    return (after == LENT) - (row.source == LENT)


_ROWS = {row.id: row for name in machine_names() for row in load_machine(name).transitions}
_LENDING = {row.id: _lending(row) for row in load_machine("owner_leg").transitions if _lending(row)}
