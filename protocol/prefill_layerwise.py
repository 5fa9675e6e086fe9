"""Layer-wise, prefill rank: spec/machines/prefill_layerwise.toml."""

from .binding import BoundMachine, effect
from .commands import StartPush
from .effects import SENT
from .modes import LAYERWISE
from .mover_transfer import MoverTransfer
from .plan import Leg, RequestPlan


class PrefillLayerwise(MoverTransfer):
    """Blocks that this rank writes into decode ranks, layer by layer."""

    mode = LAYERWISE
    own_side = "prefill"
    __slots__ = ()

    def take(self, command: StartPush) -> None:
        """Note what is to be written, before the machine hears of it."""
        self.request_id = command.request_id
        self.prompt_tokens = command.prompt_tokens
        self.cached_tokens = command.cached_tokens

    def _own_legs(self, plan: RequestPlan) -> tuple[Leg, ...]:
        return plan.legs_of_prefill(self.core.sender.rank)

    def _peer_rank(self, leg: Leg) -> int:
        return leg.decode_rank

    @effect
    def note_finished(self, _payload: object) -> None:
        """Note that vLLM has finished the request before the pushes were over."""
        self.finished = True

    @effect
    def finish_if_noted(self, _payload: object) -> None:
        """If vLLM has finished the request already, let its blocks go: the pushes are over."""
        self.disarm("deadline")
        if self.finished:
            self.core.post(self, "finish")

    @effect
    def report_sent(self, _payload: object) -> None:
        """Tell vLLM that it may have the blocks back."""
        self.report(SENT)


PrefillLayerwise.machine = BoundMachine("prefill_layerwise", PrefillLayerwise)
