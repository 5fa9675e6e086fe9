"""Everything about the router that can be set, in one frozen record; units stand at the end of a name."""

import enum

import msgspec

from ..hosts import check_host
from .addresses import check_engines


class Mode(enum.Enum):
    """Which engine hears of a request first, and so who moves the bytes."""

    BLOCKWISE = "blockwise"
    """The prefill engine computes first, then the decode engine pulls."""
    BLOCKWISE_D_FIRST = "blockwise-d-first"
    """Both hear of it at once; the decode engine asks early and pulls when the prompt is computed."""
    LAYERWISE = "layerwise"
    """The decode engine makes room first, then the prefill engine pushes."""

    @property
    def on_the_wire(self) -> str:
        """What the engines call it: who hears first is no affair of theirs."""
        return Mode.BLOCKWISE.value if self is Mode.BLOCKWISE_D_FIRST else self.value


class RouterSettings(msgspec.Struct, frozen=True, kw_only=True):
    prefill: tuple[str, ...]
    """Base addresses of the prefill engines, such as ``http://10.0.0.1:8100``."""
    decode: tuple[str, ...]
    host: str = "0.0.0.0"
    port: int = 8000
    mode: Mode = Mode.BLOCKWISE
    """For requests without the header ``X-DFirst-Mode``. The mode's name may be given instead."""
    advertised_host: str | None = None
    """Where decode engines reach this router; None: ``host``, or this machine's address towards them."""
    curve_keys: str | None = None
    """Directory with the keys by which engines with ``curve_keys`` know this router."""

    max_body_bytes: int = 32 * 1024 * 1024
    max_concurrent_requests: int = 1024
    max_transfers_per_request: int = 128
    """The most pieces that ``n`` times the number of prompts may split into."""

    body_timeout_seconds: float = 60.0
    """For the client to send its request."""
    connect_timeout_seconds: float = 5.0
    prefill_timeout_seconds: float = 600.0
    """From sending a prompt to a prefill engine to the end of its answer."""
    request_timeout_seconds: float = 3600.0
    """From the request's first byte to the answer's last."""
    models_timeout_seconds: float = 10.0
    """For a decode engine to name its models."""
    cancel_timeout_seconds: float = 10.0
    """For telling one engine's ranks that a transfer is over; a few repetitions must fit in."""
    prefill_grace_seconds: float = 5.0
    """How long a prefill may run on after the decode engine has answered in full."""
    shutdown_seconds: float = 30.0
    """For requests under way when the router is asked to stop."""

    retry_engine_after_seconds: float = 10.0
    """How long an engine that refused a connection is passed over."""
    engine_keep_alive_seconds: float = 2.0
    """How long an idle connection is kept; below the 5 seconds after which vLLM's server closes it."""
    stale_connection_seconds: float = 1.0
    """A reused connection that breaks this soon without an answer was closed while idle: send again."""
    repeat_log_seconds: float = 60.0
    """A warning that could come with every request is logged at most this often."""

    def __post_init__(self) -> None:
        if isinstance(self.mode, str):
            msgspec.structs.force_setattr(self, "mode", parse_mode(self.mode))
        check_host("--host", self.host)
        if self.advertised_host is not None:
            check_host("--advertised-host", self.advertised_host)
        check_engines(self.prefill, self.decode)
        for role, urls in (("prefill", self.prefill), ("decode", self.decode)):
            msgspec.structs.force_setattr(self, role, tuple(url.rstrip("/") for url in urls))
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if name.startswith("max_") and value < 1:
                raise ValueError(f"{name} is {value}: give at least 1")
            if name.endswith("_seconds") and value < 0:
                raise ValueError(f"{name} is {value}: give no negative time")


def parse_mode(name: str) -> Mode:
    try:
        return Mode(name.strip().lower())
    except ValueError:
        known = ", ".join(mode.value for mode in Mode)
        raise ValueError(f"unknown mode {name[:40]!r}: use one of {known}") from None
