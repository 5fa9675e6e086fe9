"""The scheduler side of one engine: what vLLM was told of each request, and what the ranks are to be told.

One object for each request, moved by spec/machines/decode_request.toml or prefill_request.toml. Like the
ranks' core it does no I/O: commands for the ranks, and announcements for a router's metaserver, wait here
until they are taken.
"""

from typing import ClassVar

import msgspec

from .binding import BoundMachine, Observer, effect, guard
from .commands import (
    AbortTransfer,
    AcceptPush,
    Command,
    FinishPush,
    OfferBlocks,
    RemoteEngine,
    Renounce,
    StartPull,
    StartPush,
)
from .messages import TransferKey
from .modes import BLOCKWISE, LAYERWISE


class TransferRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a request says of its transfer."""

    key: TransferKey
    mode: str
    request_id: str
    """vLLM's own id of the request on this engine."""
    prompt_tokens: int
    remote: RemoteEngine | None = None
    """The other engine, where the request names it: decode block-wise, prefill layer-wise."""
    metaserver: str = ""
    """Decode, layer-wise: where the blocks are announced."""
    cached_tokens: int = 0
    """Prefill, layer-wise: what the decode engine has already."""


class Announcement(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks that a router's metaserver is to be told of."""

    request: TransferRequest
    block_ids: tuple[int, ...]
    cached_tokens: int


class Allocation(msgspec.Struct, frozen=True, kw_only=True):
    """What vLLM allocated for a request."""

    block_ids: tuple[int, ...]
    """All its blocks, from the first token on."""
    cached_tokens: int
    """Tokens at its start whose cache is there already."""
    external_tokens: int
    """Tokens that are to be loaded from the other engine."""


class Finish(msgspec.Struct, frozen=True, kw_only=True):
    """How a request ended."""

    block_ids: tuple[int, ...]
    prompt_computed: bool
    """Whether it ran to its end, so that the whole prompt's cache is in the blocks."""


class RequestEntity:
    """A request that one of the two scheduler machines moves."""

    machine: ClassVar[BoundMachine]
    __slots__ = ("core", "request", "state")

    def __init__(self, core: "SchedulerCore", request: TransferRequest) -> None:
        self.core = core
        self.request = request
        self.state = self.machine.spec.initial

    @property
    def key(self) -> TransferKey:
        """The transfer."""
        return self.request.key

    @property
    def observer(self) -> Observer:
        """Who hears of this object's steps."""
        return self.core.observer

    def fire(self, event: str, payload: object = None) -> bool:
        """Give the request an event; return whether a row of the spec took it."""
        return self.machine.fire(self, event, payload)

    @guard
    def transfer_in_use(self, _payload: object) -> bool:
        """Whether another request of this engine is under way with the same transfer."""
        return self.core.in_use(self)


class DecodeRequest(RequestEntity):
    """A request whose prompt another engine computes."""

    __slots__ = ()

    @guard
    def something_to_load(self, allocation: Allocation) -> bool:
        """Whether vLLM expects tokens from the other engine."""
        return allocation.external_tokens > 0

    @effect
    def announce_load(self, allocation: Allocation) -> None:
        """Tell every rank of the blocks; layer-wise the router as well."""
        request = self.request
        if request.mode == LAYERWISE:
            self.core.commands.append(
                AcceptPush(
                    key=self.key,
                    request_id=request.request_id,
                    block_ids=allocation.block_ids,
                    prompt_tokens=request.prompt_tokens,
                    cached_tokens=allocation.cached_tokens,
                )
            )
            self.core.announcements.append(
                Announcement(
                    request=request, block_ids=allocation.block_ids, cached_tokens=allocation.cached_tokens
                )
            )
        elif request.remote is not None:
            self.core.commands.append(
                StartPull(
                    key=self.key,
                    request_id=request.request_id,
                    remote=request.remote,
                    block_ids=allocation.block_ids,
                    prompt_tokens=request.prompt_tokens,
                    cached_tokens=allocation.cached_tokens,
                )
            )

    @effect
    def renounce(self, _payload: object) -> None:
        """Have the ranks release the prefill side's blocks; layer-wise none exist before this engine asks for
        them.
        """
        if self.request.remote is not None:
            self.core.commands.append(Renounce(self.key, self.request.remote))

    @effect
    def abort_load(self, cause: object) -> None:
        """Have the ranks let go of the blocks as soon as that is safe."""
        reason = cause if isinstance(cause, str) else "the request was aborted"
        self.core.commands.append(AbortTransfer(self.key, reason))


class PrefillRequest(RequestEntity):
    """A request whose prompt is computed here for another engine."""

    __slots__ = ()

    @guard
    def layerwise(self, _payload: object) -> bool:
        """Whether the decode engine's blocks exist already."""
        return self.request.mode == LAYERWISE

    @guard
    def prompt_computed(self, finish: Finish) -> bool:
        """Whether the request ran to its end."""
        return finish.prompt_computed

    @effect
    def announce_push(self, _payload: object) -> None:
        """Have the ranks ask for the decode engine's blocks."""
        request = self.request
        if request.remote is not None:
            self.core.commands.append(
                StartPush(
                    key=self.key,
                    request_id=request.request_id,
                    remote=request.remote,
                    prompt_tokens=request.prompt_tokens,
                    cached_tokens=request.cached_tokens,
                )
            )

    @effect
    def offer_blocks(self, finish: Finish) -> None:
        """Have the ranks hold the blocks for the decode engine."""
        self.core.commands.append(
            OfferBlocks(
                key=self.key,
                request_id=self.request.request_id,
                block_ids=finish.block_ids,
                prompt_tokens=self.request.prompt_tokens,
            )
        )

    @effect
    def announce_finish(self, _payload: object) -> None:
        """Have the ranks report the blocks when the pushes are over."""
        self.core.commands.append(FinishPush(self.key))

    @effect
    def announce_abort(self, _payload: object) -> None:
        """Tell the ranks that the rest of the prompt will not be computed."""
        self.core.commands.append(AbortTransfer(self.key, "the prefill was aborted"))


DecodeRequest.machine = BoundMachine("decode_request", DecodeRequest)
PrefillRequest.machine = BoundMachine("prefill_request", PrefillRequest)


class SchedulerCore:
    """All requests of one engine that take part in a transfer."""

    def __init__(self, observer: Observer) -> None:
        self.observer = observer
        self.requests: dict[str, RequestEntity] = {}
        self._holders: dict[TransferKey, RequestEntity] = {}
        self.commands: list[Command] = []
        self.announcements: list[Announcement] = []

    def seen(self, request: TransferRequest, decodes: bool) -> None:
        """vLLM added a request; ``decodes`` if its prompt is computed elsewhere."""
        entity = DecodeRequest(self, request) if decodes else PrefillRequest(self, request)
        entity.fire("seen")
        self.requests[request.request_id] = entity
        self._holders.setdefault(request.key, entity)

    def external_tokens(self, request_id: str, computed_tokens: int) -> int:
        """Return how many tokens of the prompt are to come from the other engine. Changes nothing."""
        entity = self.requests.get(request_id)
        if not isinstance(entity, DecodeRequest) or entity.state != "QUEUED":
            return 0
        return max(entity.request.prompt_tokens - computed_tokens, 0)

    def allocated(self, request_id: str, allocation: Allocation) -> None:
        """vLLM allocated blocks."""
        self._fire(request_id, "allocated", allocation)

    def finished(self, request_id: str, finish: Finish) -> bool:
        """vLLM finished or aborted the request; return whether its blocks stay with the ranks."""
        self._fire(request_id, "finished", finish)
        entity = self.requests.get(request_id)
        return isinstance(entity, PrefillRequest) and entity.state == "HELD"

    def reported(self, request_id: str, event: str) -> None:
        """All ranks have reported: ``received``, ``failed`` or ``sent``."""
        self._fire(request_id, event)

    def announce_failed(self, request_id: str, reason: str) -> None:
        """The metaserver could not be told."""
        self._fire(request_id, "announce_failed", reason)

    def in_use(self, asker: RequestEntity) -> bool:
        """Return whether another request is under way with the asker's transfer."""
        return self._holders.get(asker.key, asker) is not asker

    def transfer(self, request_id: str) -> TransferRequest | None:
        """Return what a request says of its transfer; None if it takes part in none."""
        entity = self.requests.get(request_id)
        return None if entity is None else entity.request

    def pushing(self, request_id: str) -> TransferRequest | None:
        """Return a request whose layers are being pushed, else None."""
        entity = self.requests.get(request_id)
        return entity.request if entity is not None and entity.state == "PUSHING" else None

    def take_commands(self) -> tuple[Command, ...]:
        """Return what the ranks are to be told with the next step."""
        taken, self.commands = tuple(self.commands), []
        return taken

    def take_announcements(self) -> tuple[Announcement, ...]:
        """Return what metaservers are to be told."""
        taken, self.announcements = tuple(self.announcements), []
        return taken

    def _fire(self, request_id: str, event: str, payload: object = None) -> None:
        entity = self.requests.get(request_id)
        if entity is None:
            return
        entity.fire(event, payload)
        if entity.state == "FREED":
            del self.requests[request_id]
            if self._holders.get(entity.key) is entity:
                del self._holders[entity.key]


def mode_of(decodes: bool, request_names_remote: bool, metaserver: str) -> str:
    """Return the mode that a request asks for: a metaserver means layer-wise."""
    if decodes:
        return LAYERWISE if metaserver else BLOCKWISE
    return LAYERWISE if request_names_remote else BLOCKWISE
