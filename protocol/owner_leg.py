"""One lease, seen by the rank whose blocks are lent: spec/machines/owner_leg.toml."""

from typing import ClassVar, Protocol

from .binding import BoundMachine, effect
from .effects import Reply
from .entity import Core, CoreEntity
from .lease import owner_end, write_tail_seconds
from .messages import Ack, Cancel, Metadata, Query, Sender, TransferKey
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

    __slots__ = ("lent_until", "mover", "route", "tail_seconds", "transfer")

    def __init__(self, core: Core, transfer: OwnerTransfer, mover: Sender) -> None:
        super().__init__(core, transfer.key)
        self.transfer = transfer
        self.mover = mover
        self.route = b""
        self.lent_until = 0.0
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

    @effect
    def extend(self, question: Query | None) -> None:
        """Restart the count (rule R1)."""
        if question is not None:
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
                ),
            )
        )

    @effect
    def acknowledge(self, _payload: object) -> None:
        """The mover's last word is recorded (rule R9)."""
        self.timers.clear()
        self.core.emit(Reply(self.route, Ack(sender=self.core.sender, key=self.key)))

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
