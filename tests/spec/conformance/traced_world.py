"""Two engines of real cores (tests/protocol/world.py) that write a trace, as the connector does."""

from pathlib import Path

from dfirst.connector.trace_file import TraceFile
from dfirst.protocol.binding import Observer
from dfirst.protocol.commands import CopyEnded, CoreEvent, DirectoryKnown, MessageReceived
from dfirst.protocol.effects import Reply, Report, Send, StartCopies
from dfirst.protocol.entity import CoreEntity
from dfirst.protocol.messages import Layout, Sender
from dfirst.protocol.rank import RankCore
from dfirst.protocol.shards import RankEntry, layout_digest
from dfirst.protocol.specification import TransitionSpec

from tests.protocol.world import World

MARK = b"#"


class TracingObserver:
    """Keeps what the world keeps, and writes every step."""

    def __init__(self, inner: Observer, trace: TraceFile) -> None:
        self.inner = inner
        self.trace = trace

    def stepped(self, entity: CoreEntity, row: TransitionSpec, source: str) -> None:
        self.inner.stepped(entity, row, source)
        self.trace.stepped(entity, row, source)

    def unheard(self, entity: CoreEntity, event: str, expected: bool) -> None:
        self.inner.unheard(entity, event, expected)


class TracedWorld(World):
    """A world whose every rank writes a file into ``directory``; a line is a microsecond later than the one
    before it, so that no two have the same time.
    """

    def __init__(self, directory: Path, *args, **kwargs) -> None:
        self.directory = directory
        self.traces: dict[str, TraceFile] = {}
        self.now = 100.0
        self._moment = 0
        super().__init__(*args, **kwargs)

    def start(self, name: str, entry: RankEntry, told: bool = True) -> RankCore:
        rank = f"{name}{entry.rank}"
        if rank in self.traces:
            self.traces[rank].close()  # killed: no end is written
        path = self.directory / f"{name}-rank{entry.rank}-{entry.incarnation}.jsonl"
        trace = TraceFile(path, f"rank-{entry.incarnation}", name, entry.rank, self._clock)
        self.traces[rank] = trace
        trace.started(entry.incarnation, self.timing)
        observer = TracingObserver(self.watcher(), trace)
        core = RankCore(self.timing, Sender(name, entry.rank, entry.incarnation), observer, self.slots)
        self.cores[rank] = core
        self.copies[rank] = []
        self.stopped[rank] = []
        self.staging[rank] = []
        self.ready[rank] = []
        if told:
            self.give(rank, DirectoryKnown(self.engines[name]))
        return core

    def watcher(self) -> Observer:
        """Return who else hears of every step."""
        return self.observer

    def give(self, rank: str, event: CoreEvent) -> None:
        if isinstance(event, MessageReceived):
            # A restarted rank has a connection of its own, by which it is answered.
            speaker = getattr(event.message, "sender", None)
            route = event.route + MARK + (speaker.incarnation.encode() if speaker else b"")
            event = MessageReceived(event.message, route)
            self.traces[rank].received(event.message, event.route)
        elif isinstance(event, CopyEnded):
            self.traces[rank].copies_ended(event.leg, 640 if event.ok else 0, 0.01, event.ok)
        super().give(rank, event)

    def _take(self, rank: str, effects: list[object]) -> None:
        super()._take(rank, [self._traced(rank, effect) for effect in effects])

    def _traced(self, rank: str, effect: object) -> object:
        if isinstance(effect, Send):
            self.traces[rank].sent(effect.message)
        elif isinstance(effect, Reply):
            self.traces[rank].sent(effect.message, effect.route)
            return Reply(effect.route.partition(MARK)[0], effect.message)
        elif isinstance(effect, StartCopies):
            self.traces[rank].copies_started(effect.leg)
        return effect

    def collect(self) -> None:
        for rank, report in self.uncollected:
            self._reported(rank, report)
        super().collect()

    def introduce(self, engine: str, to: str) -> None:
        known = self.engines[engine]
        layout = Layout(self.sender(f"{engine}0"), layout_digest(known), known)
        for rank in self.ranks(to):
            self.traces[f"{engine}0"].sent(layout, rank.encode())
        super().introduce(engine, to)

    def end(self) -> None:
        """Stop every rank in good order."""
        for trace in self.traces.values():
            trace.ended()

    def _reported(self, rank: str, report: Report) -> None:
        self.traces[rank].reported(report)

    def _clock(self) -> float:
        self._moment += 1
        return self.now + self._moment * 1e-6
