"""Layer-wise, decode rank: spec/machines/decode_layerwise.toml."""

from .binding import BoundMachine, effect, guard
from .commands import AbortTransfer, AcceptPush
from .effects import FAILED, RECEIVED
from .entity import TimerRang
from .messages import Cancel
from .modes import LAYERWISE
from .owner_leg import OwnerLeg
from .owner_transfer import OwnerTransfer, Question
from .plan import RequestPlan

LOST = ("STOPPED", "EXPIRED")
"""Lease states of a writer that did not finish."""
DEADLINE = TimerRang("deadline")


class DecodeLayerwise(OwnerTransfer):
    """Blocks that prefill ranks write."""

    mode = LAYERWISE
    own_side = "decode"
    __slots__ = ()

    @effect
    def note_blocks(self, command: AcceptPush) -> None:
        """Take the blocks that the scheduler announces."""
        self.request_id = command.request_id
        self.block_ids = command.block_ids
        self.prompt_tokens = command.prompt_tokens
        self.cached_tokens = command.cached_tokens

    def _expected(self, request: RequestPlan, own_rank: int) -> frozenset[int]:
        return request.writers(own_rank)

    @guard
    def nothing_due(self, _payload: object) -> bool:
        """Whether this rank holds none of the tokens that are to come, whoever writes."""
        return not self.core.peers.holds_tokens(
            self.core.sender.rank, range(self.cached_tokens, self.prompt_tokens)
        )

    @guard
    def all_done(self, _payload: object) -> bool:
        """Whether every expected writer said DONE."""
        if any(lease.at_work for lease in self.leases.values()):
            return False
        states = self.expected_states()
        return bool(states) and all(state == "DONE" for state in states or ())

    @guard
    def writer_lost(self, _payload: object) -> bool:
        """Whether a writer stopped or went silent. Once an engine writes here, the word of a rank of another
        one, or of an earlier incarnation, ends nothing (rules S5 and R7).
        """
        return bool(self._lost())

    @guard
    def asker_unfit(self, question: Question) -> bool:
        """Whether an asker that is meant here can never write: no rank of its engine can."""
        known = not self.layout_unknown(question) and not self._not_meant(question)
        return known and bool(self._misfit(question))

    @guard
    def writer_missing(self, _payload: object) -> bool:
        """Whether an expected writer never asked."""
        states = self.expected_states()
        return states is None or "" in states

    @effect
    def cancel_writers(self, cause: object) -> None:
        """Say CANCEL to those who may still write."""
        self._note(cause)
        for lease in self.live_leases:
            lease.cancel_mover(self.reason)

    @effect
    def report_received(self, _payload: object) -> None:
        """Tell vLLM that every byte has arrived."""
        self.report(RECEIVED)

    @effect
    def report_failed(self, cause: object) -> None:
        """Tell vLLM that not every byte has arrived and that none can any more."""
        self._note(cause)
        self.report(FAILED)

    def _lost(self) -> list[OwnerLeg]:
        bound = self.core.peers.known(self.layout_digest)
        leases = self._of_this_peer() if bound else self.leases.values()
        return [lease for lease in leases if lease.state in LOST]

    def _note(self, cause: object) -> None:
        """Keep the first reason for which not every byte arrived."""
        if self.reason:
            return
        lost = [lease.peer_name for lease in self._lost()]
        if isinstance(cause, Cancel | AbortTransfer):
            self.reason = cause.reason
        elif isinstance(cause, Question):
            self.reason = f"{cause.lease.peer_name} cannot write here: {self._misfit(cause)}"
        elif cause == DEADLINE:
            seconds = self.core.timing.transfer_deadline_seconds
            self.reason = f"the transfer was not over after {seconds:g} s"
        elif lost:
            self.reason = f"{', '.join(lost)} did not finish"
        else:
            self.reason = self._absence()

    def _absence(self) -> str:
        came = sorted(lease.peer_name for lease in self.leases.values() if lease.state not in ("NEW", *LOST))
        missing = f"not every prefill rank came in time, only {', '.join(came)}"
        return missing if came else "no prefill rank came in time"


DecodeLayerwise.machine = BoundMachine("decode_layerwise", DecodeLayerwise)
