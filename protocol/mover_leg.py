"""One leg, seen by the rank that copies: spec/machines/mover_leg.toml."""

from typing import ClassVar, NamedTuple, Protocol

import msgspec

from .binding import BoundMachine, effect, guard
from .commands import CopyEnded, LegKey, PartWanted
from .effects import PartReady, Send, StartCopies, StopCopies
from .entity import Core, CoreEntity
from .lease import farewell_seconds, mover_end, write_tail_seconds
from .messages import Ack, Cancel, Done, Gone, Metadata, Query, Stage, Staged, Stopped, TransferKey, Wait
from .modes import BLOCKWISE, LAYERWISE, OWNER
from .plan import Leg
from .shards import RankEntry
from .stages import Slot

MAX_OUTSTANDING = 16
"""Questions of one leg whose answers are still taken: the newest ones."""


class MoverTransfer(Protocol):
    """What a leg needs to know of its transfer."""

    mode: ClassVar[str]
    key: TransferKey
    prompt_tokens: int
    cached_tokens: int
    local_blocks: tuple[int, ...]

    def leg_changed(self) -> None:
        """Hear that a leg took a step that matters."""


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """The owner's rank as the leg addresses it."""

    engine_id: str
    rank: int
    host: str
    port: int
    incarnation: str


class Granted(msgspec.Struct, frozen=True):
    """A renewal, with the time at which it was asked for."""

    asked_at: float
    lease_seconds: float


class OpenPart(NamedTuple):
    """A part that the owner has not answered."""

    sequence: int
    starts: bytes
    lengths: bytes


class MoverLeg(CoreEntity):
    """A leg on the mover's side. ``plan`` and ``entry`` are None where it moves nothing."""

    __slots__ = (
        "asked",
        "copied",
        "entry",
        "failure",
        "grant",
        "last_word",
        "lease_until",
        "lent",
        "number",
        "parts",
        "peer",
        "plan",
        "transfer",
    )

    def __init__(
        self, core: Core, transfer: MoverTransfer, peer: Peer, plan: Leg | None, entry: RankEntry | None
    ) -> None:
        super().__init__(core, transfer.key)
        self.transfer = transfer
        self.peer = peer
        self.plan = plan
        self.entry = entry
        self.asked: dict[int, float] = {}
        self.number = 0
        """Of the newest question."""
        self.grant = 0
        """What the owner calls that which it has lent."""
        self.parts: dict[int, OpenPart] = {}
        """What the owner was asked to gather or scatter and has not answered, by the place."""
        self.lease_until = 0.0
        self.lent = plan is None
        self.copied = plan is None
        self.failure = ""
        self.last_word: Done | Stopped | Cancel | None = None

    @property
    def leg_key(self) -> LegKey:
        """What the data path and the renewals call this leg."""
        return LegKey(self.key, self.peer.engine_id, self.peer.rank, self.peer.incarnation)

    @property
    def peer_name(self) -> str:
        """The owner, for traces and logs."""
        return f"{self.peer.engine_id}/{self.peer.rank}"

    @property
    def quiet(self) -> bool:
        """Whether no copy of this leg can touch memory any more."""
        return self.state in ("DONE_UNACKED", "FREED")

    # Guards

    @guard
    def outstanding(self, answer: Metadata | Wait | Gone | Ack) -> bool:
        """Whether an answer is to this leg's own question, or to its own last word (rule R8)."""
        if isinstance(answer, Ack):
            return answer.sequence == getattr(self.last_word, "sequence", 0)
        return answer.sequence in self.asked

    @guard
    def grant_still_runs(self, answer: Metadata) -> bool:
        """Whether anything is left of the lease by the time that its grant has come."""
        end = mover_end(self.core.timing, self.asked[answer.sequence], answer.lease_seconds)
        return self.core.now < end

    @guard
    def ended_in_time(self, _ended: object) -> bool:
        """Whether a read ended inside the lease (rule S1). A write always did: its owner waits long enough
        (rule R3).
        """
        return self.transfer.mode != BLOCKWISE or self.core.now < self.lease_until

    # Effects: the question

    @effect
    def send_query(self, _payload: object) -> None:
        """Say QUERY, under a new number, and ask again if no answer comes."""
        sequence = self.number = self.core.next_sequence()
        self.asked[sequence] = self.core.now
        if len(self.asked) > MAX_OUTSTANDING:
            del self.asked[next(iter(self.asked))]
        self._send(
            Query(
                sender=self.core.sender,
                key=self.key,
                sequence=sequence,
                target_incarnation=self.peer.incarnation,
                mode=self.transfer.mode,
                layout_digest=self.core.peers.own_digest,
                prompt_tokens=self.transfer.prompt_tokens,
                cached_tokens=self.transfer.cached_tokens,
                tail_seconds=self._tail_seconds,
            )
        )
        self.arm("query_retry", self.core.timing.query_retry_seconds)

    @effect
    def watch_silence(self, _payload: object) -> None:
        """Give the owner the whole query time-out from now."""
        self.arm("silence", self.core.timing.query_timeout_seconds)

    @effect
    def ask_again_later(self, _payload: object) -> None:
        """The owner lives and will answer by itself: ask within half a lease, as it may have missed the
        question.
        """
        timing = self.core.timing
        self.arm("query_retry", min(timing.lease_seconds, timing.query_timeout_seconds) / 2)

    # Effects: the lease and the copies

    @effect
    def take_lease(self, answer: Metadata) -> None:
        """Note what was lent and until when."""
        self.disarm("query_retry", "silence")
        self.lent = True
        self.grant = answer.grant
        self._extend(self.asked[answer.sequence], answer.lease_seconds)

    @effect
    def extend_lease(self, grant: Granted) -> None:
        """Move the end on; a late grant never moves it back (rule R1)."""
        self._extend(grant.asked_at, grant.lease_seconds)

    @effect
    def start_copies(self, answer: Metadata) -> None:
        """Hand the leg to the data path."""
        if self.plan is None or self.entry is None:
            raise RuntimeError(f"{self.key} has a lease on {self.peer_name} but nothing to move")
        self.core.emit(
            StartCopies(
                leg=self.leg_key,
                mode=self.transfer.mode,
                plan=self.plan,
                peer=self.entry,
                local_blocks=self.transfer.local_blocks,
                remote_blocks=tuple(answer.block_ids),
                prompt_tokens=self.transfer.prompt_tokens,
                cached_tokens=self.transfer.cached_tokens,
            )
        )

    @effect
    def stop_copies(self, _payload: object) -> None:
        """Issue no further copy; those in flight end by themselves."""
        self.disarm("lease_end", "stage_retry")
        self.parts.clear()
        self.core.emit(StopCopies(self.leg_key))

    # Staging

    @guard
    def part_outstanding(self, answer: Staged) -> bool:
        """Whether an answer is to the part that is waited for (rule R8)."""
        part = self.parts.get(answer.place)
        return part is not None and part.sequence == answer.sequence

    @effect
    def send_stage(self, wanted: PartWanted) -> None:
        """Say STAGE: the owner gathers or scatters a part."""
        part = OpenPart(self.core.next_sequence(), wanted.starts, wanted.lengths)
        self.parts[wanted.place] = part
        self._send_stage(wanted.place, part)
        self.arm("stage_retry", self.core.timing.query_retry_seconds)

    @effect
    def stage_again(self, _payload: object) -> None:
        """Repeat each STAGE that was not answered."""
        for place, part in self.parts.items():
            self._send_stage(place, part)
        self.arm("stage_retry", self.core.timing.query_retry_seconds)

    @effect
    def hand_on_part(self, answer: Staged) -> None:
        """Tell the data path what became of a part."""
        del self.parts[answer.place]
        if not self.parts:
            self.disarm("stage_retry")
        slot = None
        if answer.slot_places:
            slot = Slot(answer.slot_address, answer.slot_places, answer.place_bytes)
        self.core.emit(PartReady(leg=self.leg_key, place=answer.place, slot=slot))

    # Effects: the last word

    @effect
    def say_done(self, _payload: object) -> None:
        """Say DONE: all bytes of this leg are where they belong, or there were none."""
        self.copied = True
        self._say(
            Done(
                sender=self.core.sender,
                key=self.key,
                sequence=self._word_number(),
                grant=self.grant,
                target_incarnation=self.peer.incarnation,
                mode=self.transfer.mode,
                layout_digest=self.core.peers.own_digest,
                prompt_tokens=self.transfer.prompt_tokens,
                cached_tokens=self.transfer.cached_tokens,
            )
        )

    @effect
    def say_stopped(self, _payload: object) -> None:
        """Say STOPPED: no copy of this leg is in flight and none will come."""
        self._say(
            Stopped(
                sender=self.core.sender,
                key=self.key,
                sequence=self._word_number(),
                target_incarnation=self.peer.incarnation,
                mode=self.transfer.mode,
                layout_digest=self.core.peers.own_digest,
                cached_tokens=self.transfer.cached_tokens,
                reason=self.failure or "the transfer was cancelled",
            )
        )

    @effect
    def say_cancel(self, reason: str) -> None:
        """Say CANCEL: the owner's blocks will not be asked for."""
        self._say(
            Cancel(
                sender=self.core.sender,
                key=self.key,
                target_incarnation=self.peer.incarnation,
                target=OWNER,
                mode=self.transfer.mode,
                reason=reason,
            )
        )

    @effect
    def say_again(self, _payload: object) -> None:
        """Repeat the last word."""
        if self.last_word is not None:
            self._send(self.last_word)
            self.arm("done_retry", self.core.timing.done_retry_seconds)

    @effect
    def stop_timers(self, _payload: object) -> None:
        """Wait for nothing more."""
        self.timers.clear()

    # Effects: the transfer

    @effect
    def fail_leg(self, cause: object) -> None:
        """Note why this leg cannot be whole."""
        self.failure = self.failure or self._failure_text(cause)

    @effect
    def tell_transfer(self, _payload: object) -> None:
        """Have the transfer look at all its legs again."""
        self.transfer.leg_changed()

    # Helpers

    def _word_number(self) -> int:
        return self.number or self.core.next_sequence()

    @property
    def _tail_seconds(self) -> float:
        return write_tail_seconds(self.core.timing) if self.transfer.mode == LAYERWISE else 0.0

    def _failure_text(self, cause: object) -> str:
        if isinstance(cause, Gone):
            return f"{self.peer_name} refused: {cause.reason}"
        if isinstance(cause, CopyEnded):
            return f"copies with {self.peer_name}: {cause.reason or 'ended after the lease'}"
        if self.state == "DRAINING":
            return f"the lease of {self.peer_name} ended before the copies did"
        timeout = self.core.timing.query_timeout_seconds
        return f"{self.peer_name} at {self.peer.host}:{self.peer.port} did not answer for {timeout:g} s"

    def _extend(self, asked_at: float, lease_seconds: float) -> None:
        self.lease_until = max(self.lease_until, mover_end(self.core.timing, asked_at, lease_seconds))
        self.core.arm(self, "lease_end", self.lease_until)

    def _send_stage(self, place: int, part: OpenPart) -> None:
        self._send(
            Stage(
                sender=self.core.sender,
                key=self.key,
                sequence=part.sequence,
                target_incarnation=self.peer.incarnation,
                mode=self.transfer.mode,
                place=place,
                starts=part.starts,
                lengths=part.lengths,
            )
        )

    def _say(self, word: Done | Stopped | Cancel) -> None:
        self.timers.clear()
        self.parts.clear()
        self.last_word = word
        self._send(word)
        self.arm("done_retry", self.core.timing.done_retry_seconds)
        self.arm("farewell_end", farewell_seconds(self.core.timing, self._tail_seconds))

    def _send(self, message: Query | Stage | Done | Stopped | Cancel) -> None:
        self.core.emit(Send(self.peer.host, self.peer.port, message))


MoverLeg.machine = BoundMachine("mover_leg", MoverLeg)
