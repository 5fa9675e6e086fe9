"""Two engines of real cores in one process, with a network and copies that a test holds in its hand.

Nothing here decides anything of the protocol: messages wait in ``network`` until ``deliver`` is called,
copies in ``copies`` until ``finish_copies``, and with ``collecting`` off reports wait for ``collect``. Time
passes only by ``advance``, which also fires the timers.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from dfirst.protocol import commands
from dfirst.protocol import messages as wire
from dfirst.protocol.commands import CopyEnded, MessageReceived, remote_of
from dfirst.protocol.effects import PartReady, Reply, Report, Send, StageBlocks, StartCopies, StopCopies
from dfirst.protocol.entity import CoreEntity
from dfirst.protocol.messages import Message, Sender, TransferKey
from dfirst.protocol.rank import RankCore
from dfirst.protocol.shards import Directory, RankEntry, Region, Shard, layout_digest
from dfirst.protocol.specification import TransitionSpec
from dfirst.protocol.stages import Slot
from dfirst.protocol.timing import Timing

BLOCK_SIZE = 4
KEY = TransferKey("t-1", 0)
PROMPT = 10
BLOCKS = (5, 6, 7)
ALL_CACHED = 12

TAKEN: set[str] = set()
"""The rows that any world has taken since a test last cleared it."""


@dataclass
class RecordingObserver:
    """Keeps every row that was taken and every event that no row wanted."""

    rows: list[tuple[str, str]] = field(default_factory=list)
    unexpected: list[tuple[str, str, str]] = field(default_factory=list)

    def stepped(self, entity: CoreEntity, row: TransitionSpec, source: str) -> None:
        self.rows.append((entity.machine.spec.name, row.id))
        TAKEN.add(row.id)

    def unheard(self, entity: CoreEntity, event: str, expected: bool) -> None:
        if not expected:
            self.unexpected.append((entity.machine.spec.name, entity.state, event))


@dataclass
class Packet:
    """A message on its way."""

    source: str
    target: str
    message: Message
    back: bool


def directory(name: str, tp: int, heads: int = 2, incarnation: str = "1", model: str = "m") -> Directory:
    """Return an engine of ``tp`` ranks that hold ``heads`` KV heads between them."""
    ranks = []
    for rank in range(tp):
        count = max(heads // tp, 1)
        shard = Shard(
            total_kv_heads=heads,
            first_kv_head=rank * heads // tp,
            kv_head_count=count,
            block_size=BLOCK_SIZE,
            regions=(Region(0, "kv", 1 << 20, 64, count * 64, 64, 16, 16),),
        )
        ranks.append(
            RankEntry(
                rank=rank,
                host=name,
                port=rank,
                incarnation=f"{name}{rank}.{incarnation}",
                data_address=f"{name}:{rank}",
                shard=shard,
            )
        )
    return Directory(engine_id=name, model=model, layout=f"TP {tp}, {heads} KV heads", ranks=tuple(ranks))


class World:
    """One prefill engine P and one decode engine D."""

    def __init__(
        self,
        prefill_tp: int = 1,
        decode_tp: int = 1,
        heads: int = 2,
        timing: Timing | None = None,
        decode_model: str = "m",
        met: bool = False,
        slots: tuple[Slot, ...] = (Slot(1 << 30, 2, 64),),
    ) -> None:
        self.timing = timing or Timing()
        self.observer = RecordingObserver()
        self.engines = {
            "P": directory("P", prefill_tp, heads),
            "D": directory("D", decode_tp, heads, model=decode_model),
        }
        self.cores: dict[str, RankCore] = {}
        self.now = 100.0
        self.network: list[Packet] = []
        self.copies: dict[str, list[StartCopies]] = {}
        self.stopped: dict[str, list[StopCopies]] = {}
        self.slots = slots
        self.staging: dict[str, list[StageBlocks]] = {}
        self.ready: dict[str, list[PartReady]] = {}
        self.reports: list[tuple[str, str]] = []
        self.collecting = True
        self.uncollected: list[tuple[str, Report]] = []
        self.drop: Callable[[Packet], bool] = lambda packet: False
        for name, engine in self.engines.items():
            for entry in engine.ranks:
                self.start(name, entry)
        if met:
            self.introduce("P", "D")
            self.introduce("D", "P")

    def introduce(self, engine: str, to: str) -> None:
        """Give every rank of ``to`` the layout of ``engine``, as after a first contact."""
        known = self.engines[engine]
        sender = Sender(engine, 0, known.ranks[0].incarnation)
        layout = wire.Layout(sender, layout_digest(known), known)
        for rank in self.ranks(to):
            if self.cores[rank].asked_for(layout.digest):
                self.hear(rank, layout, f"{engine}0")
            else:
                self.cores[rank].peers.learn(known)

    def restart(self, engine: str, incarnation: str) -> None:
        """Let all ranks of an engine end and start again; what they knew is lost."""
        old = self.engines[engine]
        heads = old.ranks[0].shard.total_kv_heads
        self.engines[engine] = directory(engine, len(old.ranks), heads, incarnation, old.model)
        for entry in self.engines[engine].ranks:
            self.start(engine, entry)

    def start(self, name: str, entry: RankEntry, told: bool = True) -> RankCore:
        """Start a rank's core; ``told`` gives it its engine's directory."""
        sender = Sender(name, entry.rank, entry.incarnation)
        core = RankCore(self.timing, sender, self.observer, self.slots)
        self.staging[f"{name}{entry.rank}"] = []
        self.ready[f"{name}{entry.rank}"] = []
        self.cores[f"{name}{entry.rank}"] = core
        self.copies[f"{name}{entry.rank}"] = []
        self.stopped[f"{name}{entry.rank}"] = []
        if told:
            self.give(f"{name}{entry.rank}", commands.DirectoryKnown(self.engines[name]))
        return core

    def give(self, rank: str, event: commands.CoreEvent) -> None:
        """Hand an event to a rank and keep what it asks for."""
        self._take(rank, self.cores[rank].handle(event, self.now))

    def hear(self, rank: str, message: Message, source: str) -> None:
        """Let a message arrive that no core has sent."""
        self.give(rank, MessageReceived(message, source.encode()))

    def sender(self, rank: str) -> Sender:
        """Return how a rank signs its messages."""
        return self.cores[rank].sender

    def collect(self) -> None:
        """Let vLLM take the reports that wait."""
        waiting, self.uncollected = self.uncollected, []
        for rank, report in waiting:
            self.give(rank, commands.Collected(report.key))

    def _take(self, rank: str, effects: list[object]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self.network.append(Packet(rank, f"{effect.host}{effect.port}", effect.message, False))
            elif isinstance(effect, Reply):
                self.network.append(Packet(rank, effect.route.decode(), effect.message, True))
            elif isinstance(effect, StartCopies):
                self.copies[rank].append(effect)
            elif isinstance(effect, StopCopies):
                self.stopped[rank].append(effect)
            elif isinstance(effect, StageBlocks):
                self.staging[rank].append(effect)
            elif isinstance(effect, PartReady):
                self.ready[rank].append(effect)
            elif isinstance(effect, Report):
                self.reports.append((rank, effect.outcome))
                self.uncollected.append((rank, effect))
        if self.collecting and self.uncollected:
            self.collect()

    def deliver(self, rounds: int = 50) -> list[str]:
        """Let every message arrive, and what it causes; return what was said, as text."""
        said = []
        while self.network and rounds:
            rounds -= 1
            packets, self.network = self.network, []
            for packet in packets:
                if self.drop(packet):
                    continue
                said.append(f"{packet.source}>{packet.target} {type(packet.message).__name__}")
                if packet.target in self.cores:
                    self.give(packet.target, MessageReceived(packet.message, packet.source.encode()))
        return said

    def lose(self, *names: str) -> None:
        """Lose every message of these kinds from now on; with none given, every message."""
        self.drop = lambda packet: not names or type(packet.message).__name__ in names

    def lose_nothing(self) -> None:
        """Let every message arrive from now on."""
        self.drop = lambda packet: False

    def advance(self, seconds: float, deliver: bool = True, step: float = 0.5) -> list[str]:
        """Let time pass, in steps, firing timers and (unless told otherwise) delivering what they send;
        return what was said.
        """
        said: list[str] = []
        end = self.now + seconds
        while self.now < end:
            self.now = min(self.now + step, end)
            for rank, core in list(self.cores.items()):
                self._take(rank, core.tick(self.now))
            if deliver:
                said += self.deliver()
            else:
                self.network.clear()
        return said

    def finish_copies(self, rank: str, ok: bool = True, reason: str = "") -> None:
        """End all copies of a rank."""
        started, self.copies[rank] = self.copies[rank], []
        for copy in started:
            self.give(rank, CopyEnded(copy.leg, ok, reason))

    def finish_part(self, rank: str, reason: str = "") -> None:
        """The owner is through with the oldest part that it gathers or scatters; with a reason, in vain."""
        part = self.staging[rank].pop(0)
        self.give(rank, commands.PartStaged(key=part.key, mover=part.mover, place=part.place, reason=reason))

    def state(self, rank: str, key: TransferKey = KEY) -> str:
        """Return the state of a rank's transfer."""
        core = self.cores[rank]
        entity = core.movers.get(key) or core.owners.get(key)
        return entity.state if entity else "-"

    def leg_states(self, rank: str, key: TransferKey = KEY) -> list[str]:
        """Return the states of a rank's legs or leases."""
        core = self.cores[rank]
        if key in core.movers:
            return [leg.state for leg in core.movers[key].legs.values()]
        return [lease.state for lease in core.owners[key].leases.values()]

    # Commands, on all ranks of an engine

    def ranks(self, engine: str) -> list[str]:
        return [rank for rank in self.cores if rank.startswith(engine)]

    def offer(self, key: TransferKey = KEY) -> None:
        for rank in self.ranks("P"):
            self.give(
                rank,
                commands.OfferBlocks(key=key, request_id="p-req", block_ids=BLOCKS, prompt_tokens=PROMPT),
            )

    def pull(self, cached: int = 0, key: TransferKey = KEY, request_id: str = "d-req") -> None:
        for rank in self.ranks("D"):
            self.give(
                rank,
                commands.StartPull(
                    key=key,
                    request_id=request_id,
                    remote=remote_of(self.engines["P"]),
                    block_ids=BLOCKS,
                    prompt_tokens=PROMPT,
                    cached_tokens=cached,
                ),
            )

    def renounce(self, key: TransferKey = KEY) -> None:
        for rank in self.ranks("D"):
            self.give(rank, commands.Renounce(key, remote_of(self.engines["P"])))

    def accept(self, key: TransferKey = KEY, cached: int = 0) -> None:
        for rank in self.ranks("D"):
            self.give(
                rank,
                commands.AcceptPush(
                    key=key, request_id="d-req", block_ids=BLOCKS, prompt_tokens=PROMPT, cached_tokens=cached
                ),
            )

    def push(self, key: TransferKey = KEY) -> None:
        for rank in self.ranks("P"):
            self.give(
                rank,
                commands.StartPush(
                    key=key,
                    request_id="p-req",
                    remote=remote_of(self.engines["D"]),
                    prompt_tokens=PROMPT,
                    cached_tokens=0,
                ),
            )

    def finish(self, key: TransferKey = KEY) -> None:
        for rank in self.ranks("P"):
            self.give(rank, commands.FinishPush(key))

    def abort(self, engine: str, key: TransferKey = KEY) -> None:
        for rank in self.ranks(engine):
            self.give(rank, commands.AbortTransfer(key, "the client has gone"))
