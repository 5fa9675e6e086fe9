"""Where scenarios are played: two engines of real cores, and the commands by which a scenario moves them."""

from collections.abc import Callable
from pathlib import Path

import msgspec
from dfirst.protocol import messages as wire
from dfirst.protocol.binding import Observer
from dfirst.protocol.commands import CopyEnded, MessageReceived, PartWanted
from dfirst.protocol.effects import PartReady, Report, StageBlocks, StartCopies, StopCopies
from dfirst.protocol.messages import Sender, TransferKey
from dfirst.protocol.modes import BLOCKWISE, LAYERWISE
from dfirst.protocol.shards import layout_digest
from dfirst.protocol.stages import Slot
from dfirst.protocol.timing import Timing

from tests.protocol.world import KEY, PROMPT, Packet
from tests.spec.conformance.traced_world import TracedWorld

from .language import Command
from .transcript import Transcript, named, said, tag

TICK_SECONDS = 0.5
EVERYBODY, NOBODY = "", "-"
PLACES, PLACE_BYTES = 2, 64
RUN_ADDRESS, RUN_BYTES = 1 << 20, 64
TIMERS = {field.name for field in msgspec.structs.fields(Timing)}


class Stage(TracedWorld):
    """A world that says what happens in it."""

    def __init__(self, directory: Path, command: Command, transcript: Transcript) -> None:
        self.transcript = transcript
        self.kept: list[Packet] = []
        self.cut = NOBODY
        self.forged = False
        timers = {name: float(value) for name, value in command.options.items() if name in TIMERS}
        super().__init__(
            directory,
            int(command.number("prefill", 1)),
            int(command.number("decode", 1)),
            int(command.number("heads", 2)),
            Timing(**timers),
            command.options.get("decode_model", "m"),
            met="strangers" not in command.words,
            slots=tuple(
                Slot((1 + number) << 30, PLACES, PLACE_BYTES)
                for number in range(int(command.number("slots", 0)))
            ),
        )
        self.transcript.take()

    def watcher(self) -> Observer:
        return self.transcript

    def play(self, command: Command) -> None:
        """Do what a command says."""
        first = command.words[0]
        if first in self.engines:
            self._engine(command)
            return
        action: Callable[[Command], None] | None = getattr(self, f"do_{first}", None)
        if action is None:
            raise ValueError(f"no command {command.text!r}")
        action(command)

    # What cores ask for

    def _traced(self, rank: str, effect: object) -> object:
        if isinstance(effect, StartCopies):
            verb = "reads from" if effect.mode == BLOCKWISE else "may write to"
            self.transcript.say(
                f"  {rank} {verb} {effect.leg.engine_id}{effect.leg.rank}{named(effect.leg.key)}"
            )
        elif isinstance(effect, StopCopies):
            self.transcript.say(f"  {rank} issues no more copies to {effect.leg.engine_id}{effect.leg.rank}")
        elif isinstance(effect, StageBlocks):
            verb = "scatters out of" if effect.into_blocks else "gathers into"
            verb = verb if effect.starts else "moves nothing in"
            mover = f"{effect.mover.engine_id}{effect.mover.rank}"
            self.transcript.say(f"  {rank} {verb} place {effect.place} for {mover}{named(effect.key)}")
        elif isinstance(effect, PartReady):
            how = "is staged" if effect.slot else "is to be copied directly"
            self.transcript.say(f"  {rank} hears that place {effect.place} {how}{named(effect.leg.key)}")
        elif isinstance(effect, Report):
            why = f": {effect.reason}" if effect.reason else ""
            self.transcript.say(f"  {rank} reports {effect.outcome}{named(effect.key)}{why}")
        return super()._traced(rank, effect)

    # Engines

    def _engine(self, command: Command) -> None:
        engine, verb = command.words[:2]
        key = _key(command)
        if verb == "pull":
            self.pull(int(command.number("cached", 0)), key)
        elif verb == "accept":
            self.accept(key, int(command.number("cached", 0)))
        elif verb == "abort":
            self.abort(engine, key)
        elif verb in ("crash", "restart"):
            getattr(self, f"_{verb}")(engine)
        else:
            getattr(self, verb)(key)

    def _crash(self, engine: str) -> None:
        for rank in self.ranks(engine):
            self.traces.pop(rank).close()
            del self.cores[rank], self.copies[rank], self.staging[rank]

    def _restart(self, engine: str) -> None:
        self.restart(engine, "2")

    # Messages

    def do_deliver(self, command: Command) -> None:
        """Let waiting messages arrive, and those that they cause: all, or those of these kinds, once."""
        kinds = command.words[1:]
        if kinds:
            self._arrive(self._pick(command))
            return
        while self.network:
            packets, self.network = self.network, []
            self._arrive(packets)

    def do_lose(self, command: Command) -> None:
        """Lose waiting messages."""
        for packet in self._pick(command):
            self.transcript.say(f"{packet.source} -x {packet.target}  {said(packet.message)}")

    def do_keep(self, command: Command) -> None:
        """Keep waiting messages back: they will be late."""
        self.kept += self._pick(command)

    def do_release(self, _command: Command) -> None:
        """Let what was kept back arrive, and nothing else."""
        kept, self.kept = self.kept, []
        self._arrive(kept)

    def do_repeat(self, command: Command) -> None:
        """Let waiting messages arrive, and keep a copy of each that will arrive again."""
        picked = self._pick(command)
        self.kept += picked
        self._arrive(picked)

    def do_cut(self, command: Command) -> None:
        """Lose every message from now on; with ``from=P1`` one rank's, with ``from=P`` an engine's."""
        self.cut = command.options.get("from", EVERYBODY)

    def do_mend(self, _command: Command) -> None:
        """Lose nothing more."""
        self.cut = NOBODY

    def _pick(self, command: Command) -> list[Packet]:
        kinds, source, target = command.words[1:], command.options.get("from"), command.options.get("to")
        picked = [
            packet
            for packet in self.network
            if (tag(packet.message) in kinds or not kinds)
            and source in (None, packet.source)
            and target in (None, packet.target)
        ]
        if not picked:
            raise ValueError(f"{command.text!r}: no such message waits, only {self._waiting()}")
        self.network = [packet for packet in self.network if packet not in picked]
        return picked

    def _waiting(self) -> str:
        return ", ".join(f"{one.source} -> {one.target} {tag(one.message)}" for one in self.network) or "none"

    def _arrive(self, packets: list[Packet]) -> None:
        for packet in packets:
            alive = packet.target in self.cores and not packet.source.startswith(self.cut)
            arrow = "->" if alive else "-x"
            self.transcript.say(f"{packet.source} {arrow} {packet.target}  {said(packet.message)}")
            if alive:
                self.give(packet.target, MessageReceived(packet.message, packet.source.encode()))

    # Time, copies, reports

    def do_wait(self, command: Command) -> None:
        """Let time pass; what timers cause is delivered at once, unless ``still`` is said."""
        start, end = self.now, self.now + float(command.words[1])
        while self.now < end:
            self.now = min(self.now + TICK_SECONDS, end)
            before = len(self.transcript.lines)
            for rank, core in list(self.cores.items()):
                self._take(rank, core.tick(self.now))
            if "still" not in command.words:
                self.do_deliver(Command("", (), {}))
            if len(self.transcript.lines) > before:
                self.transcript.lines.insert(before, f"after {self.now - start:g} s")

    def do_copies(self, command: Command) -> None:
        """``copies end D0``, ``copies fail D0 peer=P1``: the copies in flight end."""
        how, rank = command.words[1:3]
        peer = command.options.get("peer")
        attempt, transfer = command.options.get("attempt"), command.options.get("transfer")
        ending = [
            copy
            for copy in self.copies[rank]
            if peer in (None, f"{copy.leg.engine_id}{copy.leg.rank}")
            and attempt in (None, str(copy.leg.key.attempt))
            and transfer in (None, copy.leg.key.transfer_id)
        ]
        if not ending:
            raise ValueError(f"{command.text!r}: no copy is in flight")
        for copy in ending:
            self.copies[rank].remove(copy)
            reason = "" if how == "end" else command.options.get("reason", "broken").replace("_", " ")
            self.give(rank, CopyEnded(copy.leg, how == "end", reason))

    def do_part(self, command: Command) -> None:
        """``part wanted D0 place=1``, ``part wanted P0 empty``: the data path wants a part staged, or the
        slot alone. ``part staged P0``, ``part fails P0``: a rank is through with the oldest part that it
        works on.
        """
        how, rank = command.words[1:3]
        if how == "wanted":
            [leg] = [copy.leg for copy in self.copies[rank] if copy.leg.key == _key(command)]
            empty = "empty" in command.words
            starts, lengths = (
                b"" if empty else number.to_bytes(8, "little") for number in (RUN_ADDRESS, RUN_BYTES)
            )
            place = int(command.number("place", 0))
            self.give(rank, PartWanted(leg=leg, place=place, starts=starts, lengths=lengths))
            return
        self.finish_part(rank, "" if how == "staged" else "not lent")

    def do_reports(self, command: Command) -> None:
        """``reports wait``: vLLM takes none; ``reports taken``: it takes those that wait."""
        self.collecting = command.words[1] == "taken"
        if self.collecting:
            self.collect()

    def do_states(self, _command: Command) -> None:
        """Say where every rank is."""
        for rank, core in self.cores.items():
            transfers = {**core.movers, **core.owners}
            states = [f"{entity.state}{named(key)}" for key, entity in transfers.items()]
            self.transcript.say(f"{rank}: {', '.join(states) or 'remembers nothing'}")

    # Messages that nobody sent

    def do_router(self, command: Command) -> None:
        """``router cancel P0 owner``."""
        _, _, rank, target = command.words
        mode = BLOCKWISE if (rank[0] == "P") == (target == "owner") else LAYERWISE
        router = Sender("router", -1, "r")
        incarnation = self.sender(rank).incarnation
        self._forge(
            "router", rank, wire.Cancel(router, KEY, incarnation, target, mode, "the client has gone")
        )

    def do_stranger(self, command: Command) -> None:
        """``stranger DONE P0``: who takes no part says something; with ``as=D0`` in that one's name."""
        _, kind, rank = command.words
        name = command.options.get("as", "X0")
        incarnation = command.options.get("incarnation", f"{name}.9")
        sender = Sender(name[0], int(name[1:]), incarnation)
        target = command.options.get("meant", self.sender(rank).incarnation)
        mode = BLOCKWISE if rank[0] == "P" else LAYERWISE
        digest = layout_digest(self.engines[name[0]]) if name[0] in self.engines else "?"
        message: wire.Message
        if kind == "QUERY":
            message = wire.Query(
                sender, KEY, 1, target, mode, digest, int(command.number("prompt", PROMPT)), 0, 0.0
            )
        elif kind == "DONE":
            numbers = int(command.number("sequence", 99)), int(command.number("grant", 0))
            message = wire.Done(sender, KEY, *numbers, target, mode, digest, PROMPT, 0)
        elif kind == "METADATA":
            message = wire.Metadata(sender, KEY, int(command.number("sequence", 1)), 20.0, [1, 2, 3], 1)
        else:
            number = int(command.number("sequence", 99))
            message = wire.Stopped(sender, KEY, number, target, mode, digest, 0, "it gave up")
        self.forged = True
        self._forge(name, rank, message)

    def _forge(self, source: str, rank: str, message: wire.Message) -> None:
        self._arrive([Packet(source, rank, message, False)])


def _key(command: Command) -> TransferKey:
    return TransferKey(command.options.get("transfer", KEY.transfer_id), int(command.number("attempt", 0)))
