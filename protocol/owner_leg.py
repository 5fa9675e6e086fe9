"""One lease, seen by the rank whose blocks are lent: spec/machines/owner_leg.toml."""

from typing import ClassVar, Protocol

from .binding import BoundMachine, effect, guard
from .commands import PartStaged
from .effects import Reply, StageBlocks
from .entity import Core, CoreEntity
from .lease import owner_end, write_tail_seconds
from .messages import Ack, Cancel, Done, Metadata, Query, Sender, Stage, Staged, Stopped, TransferKey
from .modes import LAYERWISE, MOVER
from .stages import Slot, total_bytes

AT_WORK, STAGED, REFUSED = "at work", "staged", "refused"
"""What became of the newest part of a place."""


class OwnerTransfer(Protocol):
    """What a lease needs to know of its transfer."""

    mode: ClassVar[str]
    key: TransferKey
    block_ids: tuple[int, ...]

    def lease_changed(self) -> None:
        """Hear that a lease was done, stopped or has expired."""


class OwnerLeg(CoreEntity):
    """What was lent to one mover."""

    __slots__ = (
        "grant",
        "lent_until",
        "mover",
        "number",
        "parts",
        "route",
        "slot",
        "tail_seconds",
        "transfer",
    )

    def __init__(self, core: Core, transfer: OwnerTransfer, mover: Sender) -> None:
        super().__init__(core, transfer.key)
        self.transfer = transfer
        self.mover = mover
        self.route = b""
        self.lent_until = 0.0
        self.number = 0
        """The newest question's that was granted."""
        self.grant = 0
        self.slot: Slot | None = None
        self.parts: dict[int, tuple[int, str]] | None = None
        """For each place of the slot the number of its newest part, and what became of it."""
        # Never less than what this side is configured for, whatever the mover says of itself.
        self.tail_seconds = write_tail_seconds(core.timing) if transfer.mode == LAYERWISE else 0.0

    @property
    def peer_name(self) -> str:
        """The mover, for traces and logs."""
        return f"{self.mover.engine_id}/{self.mover.rank}"

    @property
    def live(self) -> bool:
        """Whether a copy of this mover, or what this rank does for it, may still reach the blocks."""
        return self.state == "LENT" or self.at_work

    @property
    def at_work(self) -> bool:
        """Whether this rank gathers or scatters for this mover."""
        parts = self.parts or {}
        return any(how == AT_WORK for _, how in parts.values())

    @guard
    def word_is_current(self, word: Done | Stopped) -> bool:
        """Whether a last word is about what is lent now, and not about what was lent, and forgotten since,
        when the same transfer was under way before (rule R8): a DONE names its grant, a STOPPED comes after
        the newest question.
        """
        if isinstance(word, Done):
            return word.grant == self.grant
        return word.sequence >= self.number

    @effect
    def extend(self, question: Query | None) -> None:
        """Restart the lease's count (rule R1)."""
        if question is not None:
            self.number = max(self.number, question.sequence)
            self.grant = self.grant or self.core.next_sequence()
            self.tail_seconds = max(self.tail_seconds, question.tail_seconds)
        end = owner_end(self.core.timing, self.core.now, self.tail_seconds)
        self.lent_until = max(self.lent_until, end)
        self.core.arm(self, "lease_end", self.lent_until)

    @effect
    def answer_metadata(self, question: Query) -> None:
        """Answer METADATA: the blocks, and for how long from the question on."""
        self.core.emit(
            Reply(
                self.route,
                Metadata(
                    sender=self.core.sender,
                    key=self.key,
                    sequence=question.sequence,
                    lease_seconds=self.core.timing.lease_seconds,
                    block_ids=list(self.transfer.block_ids),
                    grant=self.grant,
                ),
            )
        )

    @effect
    def acknowledge(self, word: Done | Stopped) -> None:
        """Answer ACK: the mover's last word is recorded (rule R9), or was before."""
        if self.state != "LENT":
            self.timers.clear()
        ack = Ack(sender=self.core.sender, key=self.key, sequence=word.sequence)
        self.core.emit(Reply(self.route, ack))

    # Staging

    @guard
    def new_part(self, stage: Stage) -> bool:
        """Whether a part was not taken before, is of what is lent now (its number was drawn after that of the
        question), and no other is at work in its place.
        """
        sequence, how = self._part(stage.place)
        return stage.sequence > max(sequence, self.number) and how != AT_WORK

    @guard
    def has_room(self, stage: Stage) -> bool:
        """Whether there is a slot, and room in it for this part."""
        slot = self.slot or self.core.slots.next()
        if slot is None or not 0 <= stage.place < slot.places:
            return False
        try:
            return total_bytes(stage.starts, stage.lengths) <= slot.place_bytes
        except ValueError:
            return False

    @guard
    def part_ended(self, stage: Stage) -> bool:
        """Whether a part was answered before."""
        sequence, how = self._part(stage.place)
        return sequence == stage.sequence and how != AT_WORK

    @effect
    def take_slot(self, _stage: Stage) -> None:
        """Make a slot this lease's own, from its first part on."""
        if self.slot is None:
            self.slot = self.core.slots.take()

    @effect
    def start_staging(self, stage: Stage) -> None:
        """Gather or scatter; a STAGE that names no bytes only asks for the slot, and takes the same way."""
        assert self.slot is not None
        self._note(stage.place, stage.sequence, AT_WORK)
        self.core.emit(
            StageBlocks(
                key=self.key,
                mover=self.mover,
                place=stage.place,
                address=self.slot.place(stage.place),
                into_blocks=self.transfer.mode == LAYERWISE,
                starts=stage.starts,
                lengths=stage.lengths,
                block_ids=self.transfer.block_ids,
            )
        )

    @effect
    def refuse_part(self, stage: Stage) -> None:
        """Answer STAGED: there is no room, the mover copies this part directly."""
        self._note(stage.place, stage.sequence, REFUSED)
        self._answer(stage.place)

    @effect
    def note_staged(self, ended: PartStaged) -> None:
        """Note that a part is through."""
        self._note(ended.place, self._part(ended.place)[0], REFUSED if ended.reason else STAGED)

    @effect
    def answer_staged(self, about: Stage | PartStaged) -> None:
        """Answer STAGED: what became of a place's newest part."""
        self._answer(about.place)

    @effect
    def free_slot(self, _payload: object) -> None:
        """Give the slot back as soon as nothing is gathered into it or scattered out of it."""
        if self.at_work:
            return
        if self.slot is not None:
            self.core.slots.give_back(self.slot)
        self.slot = None

    def _part(self, place: int) -> tuple[int, str]:
        return (self.parts or {}).get(place, (0, ""))

    def _note(self, place: int, sequence: int, how: str) -> None:
        if self.parts is None:
            self.parts = {}
        self.parts[place] = (sequence, how)

    def _answer(self, place: int) -> None:
        sequence, how = self._part(place)
        slot = self.slot if how == STAGED else None
        self.core.emit(
            Reply(
                self.route,
                Staged(
                    sender=self.core.sender,
                    key=self.key,
                    sequence=sequence,
                    place=place,
                    slot_address=slot.address if slot else 0,
                    slot_places=slot.places if slot else 0,
                    place_bytes=slot.place_bytes if slot else 0,
                ),
            )
        )

    @effect
    def tell_transfer(self, _payload: object) -> None:
        """Have the transfer look at all its leases again."""
        self.transfer.lease_changed()

    def cancel_mover(self, reason: str) -> None:
        """Ask the mover to end its copies; whatever it answers, or not, the lease bounds the wait."""
        self.core.emit(
            Reply(
                self.route,
                Cancel(
                    sender=self.core.sender,
                    key=self.key,
                    target_incarnation=self.mover.incarnation,
                    target=MOVER,
                    mode=self.transfer.mode,
                    reason=reason,
                ),
            )
        )


OwnerLeg.machine = BoundMachine("owner_leg", OwnerLeg)
