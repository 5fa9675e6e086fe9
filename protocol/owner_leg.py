"""One lease, seen by the rank whose blocks are lent: spec/machines/owner_leg.toml."""

from typing import ClassVar, Protocol

from .binding import BoundMachine, effect, guard
from .effects import Reply
from .entity import Core, CoreEntity
from .lease import owner_end, write_tail_seconds
from .messages import Ack, Cancel, Done, Metadata, Query, Sender, Stopped, TransferKey
from .modes import LAYERWISE, MOVER


class OwnerTransfer(Protocol):
    """What a lease needs to know of its transfer."""

    mode: ClassVar[str]
    key: TransferKey
    block_ids: tuple[int, ...]

    def lease_changed(self) -> None:
        """Hear that a lease was done, stopped or has expired."""


class OwnerLeg(CoreEntity):
    """What was lent to one mover."""

    __slots__ = ("grant", "lent_until", "mover", "number", "route", "tail_seconds", "transfer")

    def __init__(self, core: Core, transfer: OwnerTransfer, mover: Sender) -> None:
        super().__init__(core, transfer.key)
        self.transfer = transfer
        self.mover = mover
        self.route = b""
        self.lent_until = 0.0
        self.number = 0
        """The newest question's that was granted."""
        self.grant = 0
        # Never less than what this side is configured for, whatever the mover says of itself.
        self.tail_seconds = write_tail_seconds(core.timing) if transfer.mode == LAYERWISE else 0.0

    @property
    def peer_name(self) -> str:
        """The mover, for traces and logs."""
        return f"{self.mover.engine_id}/{self.mover.rank}"

    @property
    def live(self) -> bool:
        """Whether a copy of this mover may still reach the blocks."""
        return self.state == "LENT"

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
        """Restart the count (rule R1)."""
        if question is not None:
            self.number = max(self.number, question.sequence)
            self.grant = self.grant or self.core.next_sequence()
            self.tail_seconds = max(self.tail_seconds, question.tail_seconds)
        end = owner_end(self.core.timing, self.core.now, self.tail_seconds)
        self.lent_until = max(self.lent_until, end)
        self.core.arm(self, "lease_end", self.lent_until)

    @effect
    def answer_metadata(self, question: Query) -> None:
        """Grant: the blocks, and for how long from the question on."""
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
        """The mover's last word is recorded (rule R9), or was before."""
        if not self.live:
            self.timers.clear()
        ack = Ack(sender=self.core.sender, key=self.key, sequence=word.sequence)
        self.core.emit(Reply(self.route, ack))

    @effect
    def tell_transfer(self, _payload: object) -> None:
        """The transfer looks at all its leases again."""
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
