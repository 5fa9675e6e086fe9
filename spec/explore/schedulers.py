"""The scheduler cores of a world, each of their situations a number, as with the ranks."""

from collections.abc import Hashable
from typing import Any, NamedTuple

from dfirst.protocol.commands import Command, Renounce
from dfirst.protocol.messages import TransferKey
from dfirst.protocol.scheduler import (
    Allocation,
    DecodeRequest,
    Finish,
    PrefillRequest,
    SchedulerCore,
    TransferRequest,
)

from .sites import PROMPT_TOKENS, D, P, Sites
from .violation import Violation

BLOCKS = (1,)
Code = tuple[Any, ...]


class Call(NamedTuple):
    """What a hook of vLLM made of a scheduler core."""

    scheduler: int
    commands: tuple[Command, ...]
    announced: bool


class Schedulers:
    """All situations of both engines' scheduler cores."""

    def __init__(self, sites: Sites, observer: Any) -> None:
        self.sites = sites
        self.observer = observer
        self.codes: list[Code] = []
        self._ids: dict[Code, int] = {}
        self._calls: dict[tuple[Hashable, ...], Call] = {}
        self.fresh = self._number(((), ()))

    def call(self, scheduler: int, hook: str, *arguments: Hashable) -> Call:
        """Return what a hook makes of a scheduler core."""
        known = (scheduler, hook, arguments)
        found = self._calls.get(known)
        if found is None:
            core = self._revive(scheduler)
            try:
                getattr(self, f"_{hook}")(core, *arguments)
            except Violation:
                raise
            except Exception as error:
                raise Violation("F3", f"the scheduler ended with {type(error).__name__}: {error}") from error
            commands = core.take_commands()
            announced = bool(core.take_announcements())
            found = Call(self._number(_encode(core)), commands, announced)
            self._calls[known] = found
        return found

    # Hooks

    def _seen(self, core: SchedulerCore, engine: int, key: int, request_id: str, incarnation: int) -> None:
        layerwise = self.sites.configuration.layerwise
        other = 1 - engine
        names_remote = (engine == D) != layerwise
        request = TransferRequest(
            key=self.sites.keys[key],
            mode=self.sites.configuration.mode,
            request_id=request_id,
            prompt_tokens=PROMPT_TOKENS - (self.sites.configuration.disagree and engine == P),
            remote=self.sites.remote(other, incarnation) if names_remote else None,
            metaserver="router" if layerwise and engine == D else "",
            cached_tokens=self.sites.cached_tokens if layerwise and engine == P else 0,
        )
        core.seen(request, decodes=engine == D)

    def _allocated(self, core: SchedulerCore, request_id: str, local: bool) -> None:
        """A request that must not load anything is given blocks of its own."""
        external = core.external_tokens(request_id, 0)
        if local and external:
            raise Violation("S6", f"{request_id} would load a transfer that another request is loading")
        cached = self.sites.cached_tokens
        core.allocated(
            request_id, Allocation(block_ids=BLOCKS, cached_tokens=cached, external_tokens=external)
        )

    def _cached(self, core: SchedulerCore, request_id: str) -> None:
        core.allocated(
            request_id, Allocation(block_ids=BLOCKS, cached_tokens=PROMPT_TOKENS, external_tokens=0)
        )
        if not any(isinstance(command, Renounce) for command in core.commands):
            raise Violation("S4", f"{request_id} has everything cached, and P hears nothing of it")

    def _finished(self, core: SchedulerCore, request_id: str, computed: bool) -> None:
        core.finished(request_id, Finish(block_ids=BLOCKS, prompt_computed=computed))
        left = core.requests.get(request_id)
        if left is not None and left.state not in ("ABORTING", "HELD"):
            raise Violation("L1", f"{request_id} is finished, and stays here in {left.state} for ever")

    def _reported(self, core: SchedulerCore, request_id: str, event: str) -> None:
        before = core.requests.get(request_id)
        state = None if before is None else before.state
        core.reported(request_id, event)
        if before is None or before.state == state:
            raise Violation("S6", f"vLLM heard {event} of {request_id}, which waited for nothing ({state})")

    def _announce_failed(self, core: SchedulerCore, request_id: str) -> None:
        core.announce_failed(request_id, "")

    # Keeping

    def _number(self, code: Code) -> int:
        number = self._ids.get(code)
        if number is None:
            number = self._ids[code] = len(self.codes)
            self.codes.append(code)
        return number

    def _revive(self, scheduler: int) -> SchedulerCore:
        requests, holders = self.codes[scheduler]
        core = SchedulerCore(self.observer)
        for request, decodes, state in requests:
            made = DecodeRequest(core, request) if decodes else PrefillRequest(core, request)
            made.state = state
            core.requests[request.request_id] = made
        for key, request_id in holders:
            core._holders[key] = core.requests[request_id]
        return core


def _encode(core: SchedulerCore) -> Code:
    requests = tuple(
        (entity.request, isinstance(entity, DecodeRequest), entity.state) for entity in core.requests.values()
    )
    holders: tuple[tuple[TransferKey, str], ...] = tuple(
        (key, entity.request.request_id) for key, entity in core._holders.items()
    )
    return (requests, holders)
