"""A transfer on the rank that copies: what the decode side (block-wise) and the prefill side (layer-wise)
have in common. The machines are spec/machines/decode_blockwise.toml and prefill_layerwise.toml.
"""

from array import array
from collections.abc import Iterator
from typing import ClassVar

from .binding import effect, guard
from .commands import AbortTransfer, LegKey, RemoteEngine, RemoteRank, StartPull, StartPush
from .effects import Report, Send
from .entity import Core, CoreEntity
from .messages import Cancel, LayoutQuery, TransferKey
from .mover_leg import MoverLeg, Peer
from .plan import LayoutMismatch, Leg, RequestPlan
from .shards import RankEntry


class MoverTransfer(CoreEntity):
    """The mover's object: one leg for each rank of the other engine that it has to do with."""

    mode: ClassVar[str]
    own_side: ClassVar[str]
    __slots__ = (
        "_blocks",
        "cached_tokens",
        "finished",
        "legs",
        "prompt_tokens",
        "reason",
        "remote",
        "request_id",
    )

    def __init__(self, core: Core, key: TransferKey, remote: RemoteEngine) -> None:
        super().__init__(core, key)
        self.remote = remote
        self.request_id = ""
        self.local_blocks = ()
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.finished = False
        self.reason = ""
        self.legs: dict[LegKey, MoverLeg] = {}

    @property
    def local_blocks(self) -> tuple[int, ...]:
        """This rank's blocks; none in a push. Kept as plain numbers: as Python's integers they would be most
        of what a transfer in flight takes.
        """
        return tuple(self._blocks)

    @local_blocks.setter
    def local_blocks(self, numbers: tuple[int, ...]) -> None:
        self._blocks = array("q", numbers)

    def leg_changed(self) -> None:
        """A leg took a step: look at all of them, after the present event."""
        self.core.post(self, "leg_changed")

    # Guards: the layout

    @guard
    def layout_unknown(self, _payload: object) -> bool:
        """Whether the other engine has not been met yet."""
        return not self.core.peers.known(self.remote.layout_digest)

    @guard
    def layout_known(self, _payload: object) -> bool:
        """Whether the other engine has been met and fits."""
        return not self.layout_unknown(None) and self._mismatch() == ""

    @guard
    def something_to_move(self, _payload: object) -> bool:
        """Whether the plan has bytes for this rank."""
        return bool(self._own_legs(self.request_plan()))

    # Guards: the legs

    @guard
    def leg_failed(self, _payload: object) -> bool:
        """Whether any leg cannot be whole."""
        return any(leg.failure for leg in self.legs.values())

    @guard
    def all_lent(self, _payload: object) -> bool:
        """Whether every owner has lent its blocks."""
        return all(leg.lent for leg in self.legs.values())

    @guard
    def all_copied(self, _payload: object) -> bool:
        """Whether every leg has its bytes, and in time."""
        return all(leg.copied for leg in self.legs.values())

    @guard
    def all_quiet(self, _payload: object) -> bool:
        """Whether no copy of any leg can touch memory any more."""
        return all(leg.quiet for leg in self.legs.values())

    # Effects

    @effect
    def start_deadline(self, _payload: object) -> None:
        """Bound it all by the transfer deadline."""
        self.arm("deadline", self.core.timing.transfer_deadline_seconds)

    @effect
    def ask_layout(self, _payload: object) -> None:
        """Say LAYOUT_QUERY to the first rank that the router named, and again until it answers."""
        if self.remote.ranks:
            contact = self.remote.ranks[0]
            message = LayoutQuery(sender=self.core.sender, digest=self.remote.layout_digest)
            self.core.emit(Send(contact.host, contact.port, message))
        self.arm("layout_retry", self.core.timing.query_retry_seconds)

    @effect
    def watch_silence(self, _payload: object) -> None:
        """Give the other engine the query time-out."""
        self.arm("silence", self.core.timing.query_timeout_seconds)

    @effect
    def open_legs(self, _payload: object) -> None:
        """Make a leg for every rank that the plan names, and set it going; no layout is waited for now."""
        self.disarm("layout_retry", "silence")
        plan = self.request_plan()
        for leg in self._own_legs(plan):
            self._open(self._entry(self._peer_rank(leg)), leg, "open")
        for rank in self._releases(plan):
            self._open(self._entry(rank), None, "release")

    @effect
    def renounce_peers(self, cause: object) -> None:
        """Have CANCEL said to every rank that the router named: nobody will come."""
        self.note(cause)
        self.disarm("layout_retry", "silence", "deadline")
        for rank, address in enumerate(self.remote.ranks):
            leg = MoverLeg(self.core, self, self._peer(rank, address), None, None)
            self.legs[leg.leg_key] = leg
            self.core.post(leg, "renounce", self.reason)

    @effect
    def cancel_legs(self, cause: object) -> None:
        """Take every leg back: copies in flight end, none is started."""
        self.note(cause)
        for leg in self.legs.values():
            self.core.post(leg, "cancel")
        self.leg_changed()

    @effect
    def entomb(self, _payload: object) -> None:
        """Remember the transfer for a while, without its blocks."""
        self.timers.clear()
        self.local_blocks = ()
        self.arm("tomb_end", self.core.timing.tombstone_seconds)

    @effect
    def note_again(self, command: StartPull | StartPush) -> None:
        """Take up a second request with the name of one that has ended: what it wants is gone."""
        self.disarm("tomb_end")
        self.request_id = command.request_id
        self.reason = f"transfer {self.key.transfer_id} has ended here before"

    @effect
    def forget(self, _payload: object) -> None:
        """Remember it no more."""
        self.core.forget(self)

    def report(self, outcome: str) -> None:
        """Tell vLLM, once; this hands the blocks back (rules R5 and S3)."""
        self.disarm("deadline", "layout_retry", "silence")
        self.core.emit(Report(self.key, self.request_id, outcome, self.reason))

    def note(self, cause: object) -> None:
        """Keep the first reason for which the transfer cannot be whole."""
        if self.reason:
            return
        failures = [leg.failure for leg in self.legs.values() if leg.failure]
        if failures:
            self.reason = failures[0]
        elif isinstance(cause, AbortTransfer | Cancel):
            self.reason = cause.reason
        elif isinstance(cause, str) and cause:
            self.reason = cause
        else:
            self.reason = self._mismatch() or self._timeout_text()

    # Helpers

    def request_plan(self) -> RequestPlan:
        """Return who moves what in this transfer; both layouts are known and fit."""
        plan = self.core.peers.plan(self.remote.layout_digest, self.own_side)
        return plan.request(self.key.transfer_id, self.prompt_tokens, self.cached_tokens)

    def _own_legs(self, plan: RequestPlan) -> tuple[Leg, ...]:
        raise NotImplementedError

    def _peer_rank(self, leg: Leg) -> int:
        raise NotImplementedError

    def _releases(self, plan: RequestPlan) -> Iterator[int]:
        yield from ()

    def _entry(self, rank: int) -> RankEntry:
        return self.core.peers.rank(self.remote.layout_digest, rank)

    def _open(self, entry: RankEntry, plan: Leg | None, event: str) -> None:
        address = RemoteRank(entry.host, entry.port, entry.incarnation)
        leg = MoverLeg(self.core, self, self._peer(entry.rank, address), plan, entry)
        self.legs[leg.leg_key] = leg
        self.core.post(leg, event)

    def _peer(self, rank: int, address: RemoteRank) -> Peer:
        return Peer(
            engine_id=self.remote.engine_id,
            rank=rank,
            host=address.host,
            port=address.port,
            incarnation=address.incarnation,
        )

    def _mismatch(self) -> str:
        if not self.core.peers.known(self.remote.layout_digest):
            return ""
        try:
            self.request_plan()
        except (LayoutMismatch, ValueError) as error:
            return str(error)
        return ""

    def _timeout_text(self) -> str:
        timing = self.core.timing
        if self.state == "FAILED":
            contact = self.remote.ranks[0] if self.remote.ranks else None
            where = f" at {contact.host}:{contact.port}" if contact else ""
            return (
                f"engine {self.remote.engine_id}{where} did not give its layout within "
                f"{timing.query_timeout_seconds:g} s"
            )
        return f"the transfer was not over after {timing.transfer_deadline_seconds:g} s"
