"""Block-wise, decode rank: spec/machines/decode_blockwise.toml."""

from collections.abc import Iterator

from .binding import BoundMachine, effect
from .commands import StartPull
from .effects import FAILED, RECEIVED
from .modes import BLOCKWISE
from .mover_transfer import MoverTransfer
from .plan import Leg, RequestPlan


class DecodeBlockwise(MoverTransfer):
    """Blocks that this rank fills by reading."""

    mode = BLOCKWISE
    own_side = "decode"
    __slots__ = ()

    def take(self, command: StartPull) -> None:
        """Note what is to be read, before the machine hears of it."""
        self.request_id = command.request_id
        self.local_blocks = command.block_ids
        self.prompt_tokens = command.prompt_tokens
        self.cached_tokens = command.cached_tokens

    def _own_legs(self, plan: RequestPlan) -> tuple[Leg, ...]:
        return plan.legs_of_decode(self.core.sender.rank)

    def _peer_rank(self, leg: Leg) -> int:
        return leg.prefill_rank

    def _releases(self, plan: RequestPlan) -> Iterator[int]:
        yield from plan.releases_of(self.core.sender.rank)

    @effect
    def report_received(self, _payload: object) -> None:
        """Tell vLLM that every byte was read in time."""
        self.report(RECEIVED)

    @effect
    def report_failed(self, cause: object) -> None:
        """Tell vLLM that not every byte was read and that no copy moves any more."""
        self.note(cause)
        self.report(FAILED)


DecodeBlockwise.machine = BoundMachine("decode_blockwise", DecodeBlockwise)
