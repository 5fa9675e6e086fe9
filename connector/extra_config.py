"""The settings in ``kv_connector_extra_config``, decoded strictly: what is unknown or wrong stops the
start.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from ..protocol.limits import Seconds
from ..protocol.modes import MODES
from ..protocol.timing import Timing
from .curve import CurveKeys, read_engine_keys

LONGEST_SECONDS = Seconds.__metadata__[0].le
PROTOCOLS = ("tcp", "rdma", "ascend")
LEAST_STAGING_BYTES = 4 << 20
"""With less, parts would be so small that asking for them costs more than they save."""


class ExtraConfig(Timing, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that can be set, the protocol's timers among it. Units are in the names."""

    host: str = ""
    """Address that the side channel and the data port bind to, and that peers reach; empty: vLLM's own
    (``VLLM_HOST_IP``).
    """
    port_range: str = ""
    """Ports that ranks may use for the side channel, like ``20000-20100``; empty: any free one."""
    mooncake_protocol: str = ""
    """``tcp``, ``rdma`` or ``ascend``; empty: rdma where the host has such a device, else tcp."""
    modes: tuple[str, ...] = MODES
    """The ways to move a cache that this engine takes part in."""
    curve_keys: str = ""
    """Directory with the keys (``dfirst keys``) that close the side channel to strangers; empty: open."""
    staging_bytes: int = 256 << 20
    """Memory of each rank in which small pieces of the cache are gathered, and from which they are
    scattered; 0: copy all directly.
    """
    trace_path: str = ""
    """Directory to which each process writes what happens, one JSON line an event; empty: nowhere."""
    metaserver_timeout_seconds: float = 5.0
    """How long announcing blocks to a router may take, retries included."""
    shutdown_seconds: float = 5.0
    """How long the end of a worker waits for its copies."""

    @property
    def ports(self) -> range:
        """The side channel's ports; an empty range for any free one."""
        if not self.port_range:
            return range(0)
        first, dash, last = self.port_range.partition("-")
        return range(int(first), int(last if dash else first) + 1)

    def keys(self) -> CurveKeys | None:
        """Read the keys of the side channel; None where it is open."""
        return read_engine_keys(self.curve_keys) if self.curve_keys else None

    @property
    def write_tail_seconds(self) -> float:
        """How long after its lease has ended a pushed byte may still land (rules R3 and R4): a write is
        tried for the copy time-out, and one that failed counts as in flight for the quarantine.
        """
        return self.copy_timeout_seconds + self.quarantine_seconds + self.stall_allowance_seconds

    def core_timing(self, copy_timeout_seconds: float, quarantine_seconds: float) -> Timing:
        """Return the core's timers for an engine that really uses these two.

        The core knows one time-out: the longest time from a look at the lease to the end of the copies that
        were started on it. Raises ``ValueError`` with one sentence if the other settings leave no room.
        """
        used = msgspec.structs.replace(
            self, copy_timeout_seconds=copy_timeout_seconds, quarantine_seconds=quarantine_seconds
        )
        _check(used)
        return msgspec.structs.replace(used, copy_timeout_seconds=copy_timeout_seconds + quarantine_seconds)


def decode_extra_config(settings: Mapping[str, Any] | None) -> ExtraConfig:
    """Return the settings; raise ``ValueError`` with one sentence if they cannot be used."""
    try:
        config = msgspec.convert(dict(settings or {}), ExtraConfig)
    except msgspec.ValidationError as error:
        raise ValueError(f"{_CANNOT_BE_USED}: {_in_words(error, settings or {})}") from error
    _check(config)
    return config


def _in_words(error: msgspec.ValidationError, settings: Mapping[str, Any]) -> str:
    """Return the error with the value that it is about, or with the names that would have been right."""
    what, _, path = str(error).partition(" - at ")
    name = path.strip("`$.").partition("[")[0]
    if name in settings:
        return f"{name} is {settings[name]!r}: {what[:1].lower()}{what[1:]}"
    return f"{error}. Known settings: {', '.join(sorted(ExtraConfig.__struct_fields__))}"


_CANNOT_BE_USED = "kv_connector_extra_config of DFirstConnector cannot be used"


def _check(config: ExtraConfig) -> None:
    problem = next(_problems(config), None)
    if problem:
        raise ValueError(f"{_CANNOT_BE_USED}: {problem}")


def _problems(config: ExtraConfig) -> Iterator[str]:
    for name in (*Timing.__struct_fields__, "metaserver_timeout_seconds", "shutdown_seconds"):
        value = getattr(config, name)
        if not (value > 0 and math.isfinite(value)):
            yield f"{name} is {value:g} and must be a number above 0"
        elif value > LONGEST_SECONDS:
            yield f"{name} is {value:g} and must be at most {LONGEST_SECONDS}: no message may say more"
    if config.staging_bytes != 0 and config.staging_bytes < LEAST_STAGING_BYTES:
        yield f"staging_bytes is {config.staging_bytes} and must be 0 or at least {LEAST_STAGING_BYTES}"
    unknown = sorted(set(config.modes) - set(MODES))
    if unknown or not config.modes:
        yield f"modes is {list(config.modes)} and must name one or both of {', '.join(MODES)}"
    if config.mooncake_protocol not in ("", *PROTOCOLS):
        yield f"mooncake_protocol is {config.mooncake_protocol!r} and must be one of {', '.join(PROTOCOLS)}"
    yield from _address_problems(config)
    yield from _key_problems(config)
    yield from _timing_problems(config)


def _address_problems(config: ExtraConfig) -> Iterator[str]:
    if config.host in ("0.0.0.0", "::", "*"):
        yield f"host is {config.host!r}, and peers reach this rank under it: name one address of this host"
    try:
        ports = config.ports
    except ValueError:
        yield f"port_range is {config.port_range!r} and must look like 20000-20100"
        return
    if config.port_range and not (len(ports) and ports[0] > 0 and ports[-1] < 65536):
        yield f"port_range is {config.port_range!r} and must go up, within 1-65535"


def _key_problems(config: ExtraConfig) -> Iterator[str]:
    try:
        config.keys()
    except ValueError as error:
        yield str(error)


def _timing_problems(config: ExtraConfig) -> Iterator[str]:
    if config.query_retry_seconds >= config.query_timeout_seconds:
        yield (
            f"query_retry_seconds is {config.query_retry_seconds:g} and must be below "
            f"query_timeout_seconds, {config.query_timeout_seconds:g}"
        )
    margin = config.clock_drift_ratio * (config.lease_seconds + config.write_tail_seconds)
    if config.lease_seconds <= margin + config.clock_step_seconds:
        yield f"lease_seconds is {config.lease_seconds:g}, which the margin for drifting clocks uses up"
    if config.write_tail_seconds > config.transfer_deadline_seconds:
        yield (
            f"transfer_deadline_seconds is {config.transfer_deadline_seconds:g} and must be at least "
            f"copy_timeout_seconds + quarantine_seconds + stall_allowance_seconds, which are "
            f"{config.write_tail_seconds:g} as the engine uses them"
        )
    if config.done_retry_seconds >= config.farewell_seconds:
        yield (
            f"done_retry_seconds is {config.done_retry_seconds:g} and must be below farewell_seconds, "
            f"{config.farewell_seconds:g}: a last word that is lost would never be repeated"
        )
    farewell = max(config.farewell_seconds, config.lease_seconds + config.write_tail_seconds)
    if config.tombstone_seconds < farewell:
        yield (
            f"tombstone_seconds is {config.tombstone_seconds:g} and must be at least {farewell:g}, for which "
            f"last words are repeated (farewell_seconds, and no shorter than a lease and the end of its "
            f"writes): who has forgotten a transfer takes its last word for a new one's"
        )
