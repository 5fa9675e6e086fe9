"""Block-wise, prefill rank: spec/machines/prefill_blockwise.toml."""

from .binding import BoundMachine, effect, guard
from .commands import OfferBlocks
from .effects import SENT, Reply
from .messages import Done, LayoutQuery, Query, Stopped
from .modes import BLOCKWISE
from .owner_transfer import OwnerTransfer
from .plan import RequestPlan

OVER = ("DONE", "STOPPED", "EXPIRED")
"""Lease states of a reader that will read no more."""


class PrefillBlockwise(OwnerTransfer):
    """Blocks that decode ranks read."""

    mode = BLOCKWISE
    own_side = "prefill"
    __slots__ = ()

    @effect
    def note_blocks(self, command: OfferBlocks) -> None:
        """Take the blocks that the scheduler offers."""
        self.request_id = command.request_id
        self.block_ids = command.block_ids
        self.prompt_tokens = command.prompt_tokens

    def bind(self, word: Query | Done | Stopped) -> None:
        """The first reader's engine says how much of the prompt it has cached."""
        if not self.layout_digest:
            self.cached_tokens = word.cached_tokens
        super().bind(word)

    def _agreed_cached_tokens(self, query: Query) -> int:
        return self.cached_tokens if self.layout_digest else query.cached_tokens

    def _expected(self, request: RequestPlan, own_rank: int) -> frozenset[int]:
        return request.readers(own_rank)

    @guard
    def all_over(self, _payload: object) -> bool:
        """Whether nobody reads now and nobody who may read is still to come."""
        if self.live_leases:
            return False
        states = self.expected_states()
        if states is not None and all(state in OVER for state in states):
            return True
        return self.core.now >= self.held_until

    @effect
    def ask_missing_layout(self, _payload: object) -> None:
        """Ask those who have said a last word for the layout that it named, unless it is known; and again."""
        if not self.layout_digest or self.core.peers.known(self.layout_digest):
            self.disarm("layout_retry")
        elif "layout_retry" not in self.timers:
            question = LayoutQuery(sender=self.core.sender, digest=self.layout_digest)
            for lease in self.leases.values():
                if lease.state in OVER:
                    self.core.emit(Reply(lease.route, question))
            self.arm("layout_retry", self.core.timing.query_retry_seconds)

    @effect
    def report_sent(self, _payload: object) -> None:
        """Tell vLLM that it may have the blocks back."""
        self.report(SENT)


PrefillBlockwise.machine = BoundMachine("prefill_blockwise", PrefillBlockwise)
