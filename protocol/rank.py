"""The core of one rank: all its transfers, driven by values that come in and answered by values that go
out.

There is no I/O here, no thread, no clock and no random number (rule F1): ``handle`` takes an event and the
time, ``tick`` the time alone, and both return what is to be done. State changes only in the machines of the
spec (rule F2); this file finds the object that an event is meant for and answers what no object can.
"""

import heapq
from collections import Counter, deque
from collections.abc import Sequence

from . import messages as wire
from .binding import Observer
from .commands import (
    AbortTransfer,
    AcceptPush,
    Collected,
    Command,
    CopyEnded,
    CoreEvent,
    DirectoryKnown,
    FinishPush,
    LegKey,
    MessageReceived,
    OfferBlocks,
    PartStaged,
    PartWanted,
    Renounce,
    StartPull,
    StartPush,
)
from .decode_blockwise import DecodeBlockwise
from .decode_layerwise import DecodeLayerwise
from .effects import Effect, Reply, Report, Send, StartCopies
from .entity import CoreEntity, TimerRang
from .messages import Message, Sender, TransferKey
from .modes import BLOCKWISE, LAYERWISE, OWNER
from .mover_leg import MoverLeg
from .mover_transfer import MoverTransfer
from .owner_transfer import OwnerTransfer, Question
from .peers import PeerBook
from .prefill_blockwise import PrefillBlockwise
from .prefill_layerwise import PrefillLayerwise
from .renewals import RENEWALS_PER_LEASE, PeerRenewal
from .shards import layout_digest
from .stages import Slot, Slots
from .timing import Timing

OWNER_CLASSES: dict[str, type[OwnerTransfer]] = {BLOCKWISE: PrefillBlockwise, LAYERWISE: DecodeLayerwise}
MAX_OWNER_TRANSFERS = 65_536
"""Transfers and tombstones that a rank remembers as owner; questions for further unknown ids get GONE. About
2 KB each, and with a tombstone's default time room for 200 transfers a second.
"""


class RankCore:
    """All transfers of one rank."""

    def __init__(
        self, timing: Timing, sender: Sender, observer: Observer, slots: Sequence[Slot] = ()
    ) -> None:
        """``slots`` is the staging memory that may be lent."""
        self.timing = timing
        self.slots = Slots(slots)
        self.sender = sender
        self.observer = observer
        self.peers = PeerBook()
        self.now = 0.0
        self.movers: dict[TransferKey, MoverTransfer] = {}
        self.owners: dict[TransferKey, OwnerTransfer] = {}
        self.counters: Counter[str] = Counter()
        self._renewals: dict[tuple[Sender, str], PeerRenewal] = {}
        self._effects: list[Effect] = []
        self._posted: deque[tuple[CoreEntity, str, object]] = deque()
        self._timers: list[tuple[float, int, CoreEntity, str]] = []
        self._renewal_timers: list[tuple[float, int, PeerRenewal]] = []
        self._serial = 0
        self._sequence = 0

    # What comes in

    def handle(self, event: CoreEvent, now: float) -> list[Effect]:
        """Take one event at time ``now`` (seconds of a clock that also counts suspension) and return what
        to do.
        """
        self.now = max(self.now, now)
        if isinstance(event, MessageReceived):
            self._hear(event.message, event.route)
        elif isinstance(event, CopyEnded):
            self._copy_ended(event)
        elif isinstance(event, PartWanted):
            self._part_wanted(event)
        elif isinstance(event, PartStaged):
            self._part_staged(event)
        elif isinstance(event, Collected):
            self._collected(event.key)
        elif isinstance(event, DirectoryKnown):
            self._learn_own(event)
        else:
            self._command(event)
        return self._settle()

    def tick(self, now: float) -> list[Effect]:
        """Let all timers that are due at ``now`` fire and return what to do.

        A caller that has been held up gives the time at which it began to read its messages: a peer's word
        that came while nobody listened then counts before the timer that gives the peer up.
        """
        self.now = max(self.now, now)
        while self._timers and self._timers[0][0] <= now:
            deadline, _, entity, timer = heapq.heappop(self._timers)
            if entity.timers.get(timer) == deadline:
                del entity.timers[timer]
                entity.fire(timer, TimerRang(timer))
                self._drain()
        while self._renewal_timers and self._renewal_timers[0][0] <= now:
            due, _, renewal = heapq.heappop(self._renewal_timers)
            if renewal.due == due:
                self._ask_renewal(renewal)
        return self._settle()

    def end(self, reason: str, now: float) -> list[Effect]:
        """Take every transfer back, since this process ends, and return what is to be told to peers.

        Movers say STOPPED, owners of blocks that are written to say CANCEL. Who reads from this rank notices
        by itself: its reads fail.
        """
        self.now = max(self.now, now)
        pushed_to = [owner for owner in self.owners.values() if owner.mode == LAYERWISE]
        for entity in (*self.movers.values(), *pushed_to):
            if entity.state != "FREED":
                entity.fire("abort", AbortTransfer(entity.key, reason))
                self._drain()
        return self._settle()

    def next_deadline(self) -> float | None:
        """Return the time at which ``tick`` has something to do; None if never."""
        while self._timers and self._timers[0][2].timers.get(self._timers[0][3]) != self._timers[0][0]:
            heapq.heappop(self._timers)
        heads = [queue[0][0] for queue in (self._timers, self._renewal_timers) if queue]
        return min(heads, default=None)

    def lease_runs(self, leg: LegKey, now: float) -> bool:
        """Return whether a copy of this leg may be started at ``now`` (rules R2 and R3)."""
        transfer = self.movers.get(leg.key)
        found = transfer.legs.get(leg) if transfer else None
        return found is not None and found.state == "COPYING" and now < found.lease_until

    # What the objects ask for (protocol.entity.Core)

    def emit(self, effect: Effect) -> None:
        """Hand an effect out with the present event's answer."""
        self._effects.append(effect)
        if isinstance(effect, StartCopies):
            self._watch_lease(effect)
        elif isinstance(effect, Report) and not effect.request_id:
            # vLLM waits for no report on this transfer, so nobody will say that it was taken.
            owner_or_mover = self.movers.get(effect.key) or self.owners.get(effect.key)
            if owner_or_mover is not None:
                self._effects.pop()
                self.post(owner_or_mover, "collected")

    def post(self, entity: CoreEntity, event: str, payload: object = None) -> None:
        """Queue an event behind the present one."""
        self._posted.append((entity, event, payload))

    def arm(self, entity: CoreEntity, timer: str, deadline: float) -> None:
        """Set one timer of an object; a later setting replaces an earlier one."""
        entity.timers[timer] = deadline
        self._serial += 1
        heapq.heappush(self._timers, (deadline, self._serial, entity, timer))

    def next_sequence(self) -> int:
        """Return a number that no question or last word of this rank has had, higher than all before."""
        self._sequence += 1
        return self._sequence

    def forget(self, entity: CoreEntity) -> None:
        """Drop a transfer."""
        entity.timers.clear()
        if isinstance(entity, MoverTransfer):
            self.movers.pop(entity.key, None)
        else:
            self.owners.pop(entity.key, None)

    # Commands of the scheduler side

    def _command(self, command: Command) -> None:
        if isinstance(command, StartPull):
            pull = self._mover(command.key, DecodeBlockwise(self, command.key, command.remote))
            if pull.state == pull.machine.spec.initial and isinstance(pull, DecodeBlockwise):
                pull.take(command)
            pull.fire("start", command)
        elif isinstance(command, StartPush):
            push = self._mover(command.key, PrefillLayerwise(self, command.key, command.remote))
            if push.state == push.machine.spec.initial and isinstance(push, PrefillLayerwise):
                push.take(command)
            push.fire("start", command)
        elif isinstance(command, Renounce):
            reason = "the request was dropped before it was read"
            self._mover(command.key, DecodeBlockwise(self, command.key, command.remote)).fire(
                "renounce", reason
            )
        elif isinstance(command, OfferBlocks):
            offer = self._owner(command.key, BLOCKWISE)
            offer.fire("offer", command)
        elif isinstance(command, AcceptPush):
            accept = self._owner(command.key, LAYERWISE)
            accept.fire("accept", command)
        else:
            self._end_command(command)

    def _end_command(self, command: FinishPush | AbortTransfer) -> None:
        event = "finish" if isinstance(command, FinishPush) else "abort"
        entity = self.movers.get(command.key) or self.owners.get(command.key)
        if entity is None:
            self.counters[f"unknown_{event}"] += 1
        else:
            entity.fire(event, command)

    def _mover(self, key: TransferKey, fresh: MoverTransfer) -> MoverTransfer:
        return self.movers.setdefault(key, fresh)

    def _owner(self, key: TransferKey, mode: str) -> OwnerTransfer:
        owner = self.owners.get(key)
        if owner is None:
            owner = self.owners[key] = OWNER_CLASSES[mode](self, key)
        return owner

    def _collected(self, key: TransferKey) -> None:
        entity = self.movers.get(key) or self.owners.get(key)
        if entity is not None:
            entity.fire("collected")

    def _copy_ended(self, ended: CopyEnded) -> None:
        transfer = self.movers.get(ended.leg.key)
        leg = transfer.legs.get(ended.leg) if transfer else None
        if leg is None:
            self.counters["unknown_copy"] += 1
        else:
            leg.fire("copied" if ended.ok else "copy_failed", ended)

    def _part_wanted(self, wanted: PartWanted) -> None:
        leg = self._leg(wanted.leg)
        if leg is None:
            self.counters["unknown_part"] += 1
        else:
            leg.fire("want_part", wanted)

    def _part_staged(self, ended: PartStaged) -> None:
        owner = self.owners.get(ended.key)
        lease = owner.leases.get(ended.mover) if owner else None
        if lease is None:
            self.counters["unknown_part"] += 1
        else:
            lease.fire("staged", ended)

    # Layouts

    def _learn_own(self, event: DirectoryKnown) -> None:
        self.peers.set_own(event.directory)
        self._layout_arrived(None)

    def _layout_arrived(self, digest: str | None) -> None:
        """Wake everybody who waits for this layout, or for this engine's own; nothing can be judged, and
        would only be asked for again, before both are here.
        """
        if self.peers.own is None:
            return
        for owner in list(self.owners.values()):
            if owner.awaits_layout(digest):
                owner.fire("layout")
        for mover in list(self.movers.values()):
            if mover.state == "LAYOUT_QUERY" and digest in (None, mover.remote.layout_digest):
                self._layout_for(mover)

    def asked_for(self, digest: str) -> bool:
        """Return whether a transfer waits for this layout; others would take the place of those in use."""
        return any(owner.awaits_layout(digest) for owner in self.owners.values()) or any(
            mover.state == "LAYOUT_QUERY" and mover.remote.layout_digest == digest
            for mover in self.movers.values()
        )

    def _layout_for(self, mover: MoverTransfer) -> None:
        if mover.layout_known(None):
            mover.fire("layout")
        elif not mover.layout_unknown(None):
            mover.fire("layout_refused")

    def _hear_layout(self, message: wire.Layout) -> None:
        if layout_digest(message.directory) != message.digest:
            self._layout_differs(message)
            return
        if self.peers.known(message.digest):
            return  # A second answer: whoever waited for it was woken by the first.
        if not self.asked_for(message.digest):
            self.counters["unasked_layout"] += 1
            return
        self.peers.learn(message.directory)
        self._layout_arrived(message.digest)

    def _layout_differs(self, message: wire.Layout) -> None:
        """Another incarnation answers at that address: those who asked for the old one ask in vain (rule
        R7).
        """
        self.counters["foreign_layout"] += 1
        reason = f"engine {message.directory.engine_id} has been restarted since it was named"
        for mover in list(self.movers.values()):
            if mover.state == "LAYOUT_QUERY" and mover.remote.layout_digest == message.digest:
                mover.fire("layout_refused", reason)

    # Messages

    def _hear(self, message: Message, route: bytes) -> None:
        self.counters[f"received_{type(message).__name__}"] += 1
        if isinstance(message, wire.LayoutQuery):
            if self.peers.own is not None:
                layout = wire.Layout(sender=self.sender, digest=message.digest, directory=self.peers.own)
                self.emit(Reply(route, layout))
        elif isinstance(message, wire.Layout):
            self._hear_layout(message)
        elif isinstance(message, wire.Error):
            self.counters["peer_errors"] += 1
        elif isinstance(message, wire.Metadata | wire.Wait | wire.Gone | wire.Staged | wire.Ack):
            self._hear_owner(message)
        elif isinstance(message, wire.Renewed):
            for mode in OWNER_CLASSES:
                renewal = self._renewals.get((message.sender, mode))
                if renewal is not None:
                    renewal.take(message)
        elif message.target_incarnation != self.sender.incarnation:
            self._hear_stranger(message, route)
        elif isinstance(message, wire.Renew):
            self._hear_renew(message, route)
        elif isinstance(message, wire.Stage):
            self._hear_stage(message, route)
        else:
            self._hear_mover(message, route)

    def _hear_owner(self, message: wire.Metadata | wire.Wait | wire.Gone | wire.Staged | wire.Ack) -> None:
        sender = message.sender
        transfer = self.movers.get(message.key)
        key = LegKey(message.key, sender.engine_id, sender.rank, sender.incarnation)
        leg = transfer.legs.get(key) if transfer else None
        if leg is None:
            self.counters["unknown_leg"] += 1
        else:
            leg.fire(type(message).__name__.lower(), message)

    def _hear_stage(self, message: wire.Stage, route: bytes) -> None:
        owner = self.owners.get(message.key)
        lease = owner.leases.get(message.sender) if owner and owner.mode == message.mode else None
        if lease is None:
            self.counters["unknown_stage"] += 1
        else:
            lease.route = route
            lease.fire("stage", message)

    def _hear_stranger(
        self,
        message: wire.Query | wire.Renew | wire.Stage | wire.Done | wire.Stopped | wire.Cancel,
        route: bytes,
    ) -> None:
        """A message for an earlier incarnation of this rank touches nothing (rules S5 and R7)."""
        self.counters["other_incarnation"] += 1
        if isinstance(message, wire.Query):
            reason = "the rank that this was meant for has been restarted"
            self.emit(
                Reply(
                    route,
                    wire.Gone(
                        sender=self._as(message.target_incarnation),
                        key=message.key,
                        sequence=message.sequence,
                        reason=reason,
                    ),
                )
            )
        elif isinstance(message, wire.Renew):
            self._answer_renew(message, [], list(message.keys), route)
        elif isinstance(message, wire.Stage):
            return  # What was lent then is lent no more; the mover hears so when it renews.
        else:
            sequence = 0 if isinstance(message, wire.Cancel) else message.sequence
            ack = wire.Ack(sender=self._as(message.target_incarnation), key=message.key, sequence=sequence)
            self.emit(Reply(route, ack))

    def _as(self, incarnation: str) -> Sender:
        return Sender(self.sender.engine_id, self.sender.rank, incarnation)

    def _hear_mover(self, message: wire.Query | wire.Done | wire.Stopped | wire.Cancel, route: bytes) -> None:
        if isinstance(message, wire.Cancel) and message.target != OWNER:
            mover = self.movers.get(message.key)
            if mover is not None and mover.mode == LAYERWISE:
                mover.fire("cancel", message)
            self.emit(Reply(route, wire.Ack(sender=self.sender, key=message.key, sequence=0)))
            return
        if message.mode not in OWNER_CLASSES:
            self.counters["unknown_mode"] += 1
            self.emit(Reply(route, wire.Error(reason=f"mode {message.mode!r} is not known here")))
            return
        owner = self.owners.get(message.key)
        if owner is None and len(self.owners) >= MAX_OWNER_TRANSFERS:
            self._refuse_unknown(message, route)
            return
        owner = owner or self._owner(message.key, message.mode)
        if owner.mode != message.mode:
            self.counters["other_mode"] += 1
        elif isinstance(message, wire.Cancel):
            owner.fire("cancel", message)
            self.emit(Reply(route, wire.Ack(sender=self.sender, key=message.key, sequence=0)))
        else:
            self._hear_leg(owner, message, route)

    def _refuse_unknown(
        self, message: wire.Query | wire.Done | wire.Stopped | wire.Cancel, route: bytes
    ) -> None:
        """There is no room to remember another transfer: a question is refused, a word not acknowledged."""
        self.counters["too_many_transfers"] += 1
        if isinstance(message, wire.Query):
            reason = f"this rank remembers {MAX_OWNER_TRANSFERS} transfers already"
            gone = wire.Gone(sender=self.sender, key=message.key, sequence=message.sequence, reason=reason)
            self.emit(Reply(route, gone))

    def _hear_leg(
        self, owner: OwnerTransfer, message: wire.Query | wire.Done | wire.Stopped, route: bytes
    ) -> None:
        lease = owner.lease_for(message.sender, route)
        if lease is None:
            self.counters["too_many_leases"] += 1
        elif isinstance(message, wire.Query):
            owner.fire("query", Question(message, lease))
        else:
            if lease.word_is_current(message):
                owner.bind(message)
            lease.fire("done" if isinstance(message, wire.Done) else "stopped", message)

    # Renewals

    def _watch_lease(self, started: StartCopies) -> None:
        leg = self._leg(started.leg)
        if leg is None:
            return
        owner = Sender(leg.peer.engine_id, leg.peer.rank, leg.peer.incarnation)
        renewal = self._renewals.get((owner, started.mode))
        if renewal is None:
            renewal = self._renewals[(owner, started.mode)] = PeerRenewal(leg.peer, started.mode)
        renewal.legs[leg.key] = leg
        due = self.now + (leg.lease_until - self.now) / RENEWALS_PER_LEASE
        if not renewal.due or due < renewal.due:
            self._arm_renewal(renewal, due)

    def _leg(self, key: LegKey) -> MoverLeg | None:
        transfer = self.movers.get(key.key)
        return transfer.legs.get(key) if transfer else None

    def _arm_renewal(self, renewal: PeerRenewal, due: float) -> None:
        renewal.due = due
        self._serial += 1
        heapq.heappush(self._renewal_timers, (due, self._serial, renewal))

    def _ask_renewal(self, renewal: PeerRenewal) -> None:
        renewal.due = 0.0
        question = renewal.ask(self.sender, self.next_sequence(), self.now)
        peer = renewal.peer
        if question is None:
            self._renewals.pop((Sender(peer.engine_id, peer.rank, peer.incarnation), renewal.mode), None)
            return
        self.emit(Send(peer.host, peer.port, question))
        soonest = min(leg.lease_until for leg in renewal.legs.values())
        step = max((soonest - self.now) / RENEWALS_PER_LEASE, self.timing.clock_step_seconds)
        self._arm_renewal(renewal, self.now + step)

    def _hear_renew(self, message: wire.Renew, route: bytes) -> None:
        extended: list[TransferKey] = []
        gone: list[TransferKey] = []
        for key in message.keys:
            owner = self.owners.get(key)
            lease = owner.leases.get(message.sender) if owner else None
            granted = (
                owner is not None
                and lease is not None
                and lease.state == "LENT"
                and owner.fire("renew", lease)
            )
            (extended if granted else gone).append(key)
        self._answer_renew(message, extended, gone, route)

    def _answer_renew(
        self, message: wire.Renew, extended: list[TransferKey], gone: list[TransferKey], route: bytes
    ) -> None:
        self.emit(
            Reply(
                route,
                wire.Renewed(
                    sender=self._as(message.target_incarnation),
                    sequence=message.sequence,
                    lease_seconds=self.timing.lease_seconds,
                    extended=extended,
                    gone=gone,
                ),
            )
        )

    # Running

    def _drain(self) -> None:
        while self._posted:
            entity, event, payload = self._posted.popleft()
            entity.fire(event, payload)

    def _settle(self) -> list[Effect]:
        self._drain()
        effects, self._effects = self._effects, []
        return effects
