"""A transfer on the rank whose blocks are lent: what the prefill side (block-wise) and the decode side
(layer-wise) have in common. The machines are spec/machines/prefill_blockwise.toml and
decode_layerwise.toml.
"""

from array import array
from collections.abc import Iterable
from typing import ClassVar

import msgspec

from .binding import effect, guard
from .effects import Reply, Report
from .entity import Core, CoreEntity
from .messages import Cancel, Done, Gone, LayoutQuery, Query, Sender, Stopped, TransferKey, Wait
from .owner_leg import OwnerLeg
from .plan import LayoutMismatch, RequestPlan

MAX_LEASES = 4096
"""Movers that one transfer remembers; more than any layout has ranks."""


class Question(msgspec.Struct, frozen=True):
    """A QUERY and the lease of the mover that sent it."""

    query: Query
    lease: OwnerLeg


class OwnerTransfer(CoreEntity):
    """The owner's object. Leases are kept per mover rank and incarnation (rule R8)."""

    mode: ClassVar[str]
    own_side: ClassVar[str]
    __slots__ = (
        "_blocks",
        "cached_tokens",
        "held_until",
        "layout_digest",
        "leases",
        "parked",
        "prompt_tokens",
        "reason",
        "request_id",
    )

    def __init__(self, core: Core, key: TransferKey) -> None:
        super().__init__(core, key)
        self.request_id = ""
        self.block_ids = ()
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.layout_digest = ""
        self.leases: dict[Sender, OwnerLeg] = {}
        self.parked: dict[Sender, Query] = {}
        self.held_until = 0.0
        self.reason = ""

    @property
    def block_ids(self) -> tuple[int, ...]:
        """The blocks that may be lent. Kept as plain numbers: as Python's integers they would be most of
        what a transfer in flight takes.
        """
        return tuple(self._blocks)

    @block_ids.setter
    def block_ids(self, numbers: tuple[int, ...]) -> None:
        self._blocks = array("q", numbers)

    def lease_for(self, mover: Sender, route: bytes) -> OwnerLeg | None:
        """Return the mover's lease, a new one if it has none; None if there are too many."""
        lease = self.leases.get(mover)
        if lease is None:
            if len(self.leases) >= MAX_LEASES:
                return None
            lease = self.leases[mover] = OwnerLeg(self.core, self, mover)
        lease.route = route
        return lease

    def lease_changed(self) -> None:
        """A lease took a step: look at all of them, after the present event."""
        self.core.post(self, "lease_changed")

    def bind(self, word: Query | Done | Stopped) -> None:
        """Take from the first mover that is lent to, or says a last word, what the plan of this transfer
        is made from.
        """
        if not self.layout_digest:
            self.layout_digest = word.layout_digest

    def awaits_layout(self, digest: str | None) -> bool:
        """Whether this layout (None: this engine's own) may settle a question or a word that came early."""
        if digest is None:
            return bool(self.parked or self.leases)
        asked = any(query.layout_digest == digest for query in self.parked.values())
        return asked or (bool(self.leases) and self.layout_digest == digest)

    @property
    def live_leases(self) -> list[OwnerLeg]:
        """The leases under which copies may still move."""
        return [lease for lease in self.leases.values() if lease.live]

    def expected(self) -> frozenset[int] | None:
        """Return the ranks whose DONE this rank must hear; None while the other layout is unknown."""
        if not self.core.peers.known(self.layout_digest):
            return None
        plan = self.core.peers.plan(self.layout_digest, self.own_side)
        request = plan.request(self.key.transfer_id, self.prompt_tokens, self.cached_tokens)
        return self._expected(request, self.core.sender.rank)

    def expected_states(self) -> list[str] | None:
        """Return the lease state of each expected mover rank ("" if it never came); None if unknown."""
        try:
            expected = self.expected()
        except (LayoutMismatch, ValueError):
            return None
        if expected is None:
            return None
        states = {lease.mover.rank: lease.state for lease in self._of_this_peer()}
        return [states.get(rank, "") for rank in sorted(expected)]

    def _of_this_peer(self) -> Iterable[OwnerLeg]:
        peers = self.core.peers
        return (lease for lease in self.leases.values() if peers.holds(self.layout_digest, lease.mover))

    def _expected(self, request: RequestPlan, own_rank: int) -> frozenset[int]:
        raise NotImplementedError

    # Guards

    @guard
    def layout_unknown(self, question: Question) -> bool:
        """Whether the asker's engine has not been met yet."""
        return not self.core.peers.known(question.query.layout_digest)

    @guard
    def asker_expected(self, question: Question) -> bool:
        """Whether the layouts fit and the plan has bytes for this mover here."""
        return not self.layout_unknown(question) and not self._refusal(question)

    @guard
    def any_lent(self, _payload: object) -> bool:
        """Whether a copy may still reach the blocks."""
        return bool(self.live_leases)

    # Effects: questions

    @effect
    def park(self, question: Question) -> None:
        """Keep the newest question of each mover until it can be answered."""
        kept = self.parked.get(question.lease.mover)
        if kept is None or kept.sequence <= question.query.sequence:
            self.parked[question.lease.mover] = question.query

    @effect
    def answer_parked(self, _payload: object) -> None:
        """Judge the parked questions again."""
        parked, self.parked = self.parked, {}
        for mover, query in parked.items():
            self.core.post(self, "query", Question(query, self.leases[mover]))

    @effect
    def refuse_parked(self, cause: object) -> None:
        """Answer GONE, and why, to all who were told to wait."""
        late = f"no blocks came for this transfer within {self.core.timing.hold_seconds:g} s"
        self.reason = cause.reason if isinstance(cause, Cancel) else late
        for mover, query in self.parked.items():
            answer = Gone(sender=self.core.sender, key=self.key, sequence=query.sequence, reason=self.reason)
            self.core.emit(Reply(self.leases[mover].route, answer))

    @effect
    def answer_wait(self, question: Question) -> None:
        """Answer WAIT: not yet."""
        query = question.query
        answer = Wait(sender=self.core.sender, key=self.key, sequence=query.sequence)
        self.core.emit(Reply(question.lease.route, answer))

    @effect
    def answer_gone(self, question: Question) -> None:
        """Answer GONE: never, and why."""
        reason = self._refusal(question) if self._judges() else ""
        reason = reason or self.reason or f"this transfer is in state {self.state} here"
        answer = Gone(sender=self.core.sender, key=self.key, sequence=question.query.sequence, reason=reason)
        self.core.emit(Reply(question.lease.route, answer))

    @effect
    def ask_layout(self, question: Question) -> None:
        """Say LAYOUT_QUERY to an asker whose engine has not been met."""
        query = question.query
        message = LayoutQuery(sender=self.core.sender, digest=query.layout_digest)
        self.core.emit(Reply(question.lease.route, message))

    @effect
    def lend(self, question: Question) -> None:
        """Lend the blocks to the asker, at once: nothing may release them in between. A mover whose last
        word overtook its question gets nothing, but whom to expect is known from here on.
        """
        self.bind(question.query)
        if not question.lease.fire("lend", question.query):
            self.lease_changed()

    @effect
    def renew_lease(self, lease: OwnerLeg) -> None:
        """Extend one mover's lease."""
        lease.fire("renew")

    # Effects: the end

    @effect
    def hold(self, _payload: object) -> None:
        """Give the other side the hold time to come."""
        self.held_until = self.core.now + self.core.timing.hold_seconds
        self.core.arm(self, "hold_end", self.held_until)

    @effect
    def start_deadline(self, _payload: object) -> None:
        """Bound it all by the transfer deadline."""
        self.arm("deadline", self.core.timing.transfer_deadline_seconds)

    @effect
    def look_again(self, _payload: object) -> None:
        """Look at the leases again: words that came early may end the transfer now."""
        self.lease_changed()

    @effect
    def entomb(self, cause: object) -> None:
        """Remember the transfer for a while, without its blocks."""
        if isinstance(cause, Cancel):
            self.reason = self.reason or cause.reason
        self.timers.clear()
        self.parked.clear()
        self.block_ids = ()
        self.arm("tomb_end", self.core.timing.tombstone_seconds)

    @effect
    def forget(self, _payload: object) -> None:
        """Remember it no more."""
        self.core.forget(self)

    def report(self, outcome: str) -> None:
        """Tell vLLM, once; this is the release of the blocks (rule S3)."""
        self.timers.clear()
        self.core.emit(Report(self.key, self.request_id, outcome, self.reason))

    # Helpers

    def _agreed_cached_tokens(self, _query: Query) -> int:
        return self.cached_tokens

    def _judges(self) -> bool:
        return self.state in ("METADATA_QUERY", "PULLS_PENDING", "PUSHES_PENDING")

    def _refusal(self, question: Question) -> str:
        """Return why the asker gets nothing, or an empty text."""
        return self._not_meant(question) or self._misfit(question) or self._nothing_for(question)

    def _not_meant(self, question: Question) -> str:
        query = question.query
        if self.layout_digest not in ("", query.layout_digest):
            return "another engine has asked for this transfer before"
        if not self.core.peers.holds(query.layout_digest, query.sender):
            return "the asker is not a rank of the directory that it names"
        return ""

    def _misfit(self, question: Question) -> str:
        """Return why no rank of the asker's engine can copy here, or an empty text."""
        query = question.query
        cached_tokens = self._agreed_cached_tokens(query)
        if (query.prompt_tokens, query.cached_tokens) != (self.prompt_tokens, cached_tokens):
            return (
                f"the asker speaks of {query.prompt_tokens} prompt tokens, {query.cached_tokens} cached, "
                f"this rank of {self.prompt_tokens} and {cached_tokens}"
            )
        if not 0 <= query.tail_seconds <= self.core.timing.transfer_deadline_seconds:
            return f"a write that may land {query.tail_seconds:g} s after its lease outlasts this deadline"
        try:
            self._request_of(query)
        except (LayoutMismatch, ValueError) as error:
            return str(error)
        return ""

    def _nothing_for(self, question: Question) -> str:
        asker = question.query.sender.rank
        if asker in self._expected(self._request_of(question.query), self.core.sender.rank):
            return ""
        return f"the plan has no bytes for rank {asker} at this rank"

    def _request_of(self, query: Query) -> RequestPlan:
        plan = self.core.peers.plan(query.layout_digest, self.own_side)
        return plan.request(self.key.transfer_id, query.prompt_tokens, query.cached_tokens)
