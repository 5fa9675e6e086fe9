"""The Mooncake Transfer Engine behind one small class: its settings, its limits and its ways to fail.

What was measured with mooncake-transfer-engine-non-cuda 0.3.13.post1 (TCP, two processes) and decides the
shape of this file:

* A batch fails as soon as one of its descriptors has failed, and at the engine's own time-out. It is
  cancelled in neither case. With the peer stopped (SIGSTOP) in the middle of 900 reads the call came back
  after 5.1 s with -1; when the peer went on, the 42 MiB that were missing arrived in memory that had been
  reported as failed. Writes do the same. No waiting time makes that safe.
* The asynchronous calls cannot tell more: ``get_batch_transfer_status`` blocks as the synchronous call does,
  answers at the first failed descriptor and may free the batch, so that it must not be asked twice.
* Dropping the engine object closes its sockets and joins its thread. After that no byte of a read moved.
  Bytes of a write that have left this host's engine can still be taken in by a peer that wakes up.
* A peer that was killed is noticed in 5 to 20 ms (-1), and nothing moved afterwards. A port that nobody
  listens on fails in under 1 ms, before anything was submitted.
* The first contact with a peer waits for 60 s if the peer is stopped, under a lock of the engine object, so
  that it holds up the copies to all others. Nothing is submitted before it is over.
* An engine object costs 1 to 3 ms to make and four threads. Destroying it keeps the interpreter lock for up
  to a second, nearly all of it until its listener comes out of ``accept``.
* More than about 1,000 descriptors queued for one peer are refused.
* A call that waits keeps one core busy for as long as it waits. On two cores, submitting a batch and sleeping
  through most of it first took two thirds of the time and half the CPU time (512 descriptors of 4 or 64 KiB).
* Runs longer than some hundred KiB are slow: the kernel widens the windows of a connection that carries
  them, and from then on its bytes go through memory instead of the processor's caches. In pieces of 256 KiB
  the same 64 MiB moved at 2.3 to 2.6 GB/s with 0.8 s of CPU for a GB, in pieces of 1 to 16 MiB at 1.2 to
  1.6 GB/s with 1.3 to 1.6 s. A connection that has carried long runs stays slow. Four runs of a batch are
  under way at a time, so that a round trip of 0.1 ms still lets 10 GB/s through.
* With the P2P handshake both its ports are bound to all addresses, whatever ``MC_TCP_BIND_ADDRESS`` says.

Hence, over TCP, copies are issued by engine objects of their own ("movers"), one for each peer and unknown to
anybody else. When a batch fails its mover is thrown away, which ends its reads for certain and at once; a
failed write then waits for the quarantine. Over other transports there is one engine object for everything,
since registering memory again for each peer costs too much there, and every failed batch waits for the
quarantine.
"""

import logging
import math
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .fresh_ports import all_fresh, listening_ports
from .listeners import ONE_AT_A_TIME, keep_to_address

logger = logging.getLogger(__name__)

MAX_DESCRIPTORS = 512
"""Most descriptors in one batch: half of what the engine queues for a peer."""
_LEAST_TIMEOUT_SECONDS = 5
"""The engine rounds shorter time-outs up to this."""
MAX_TCP_RUN_BYTES = 256 << 10
"""Longer runs are cut, over TCP."""
_DESCRIPTOR_SECONDS, _BYTE_SECONDS = 14e-6, 1 / 2.7e9
"""What a batch is guessed to cost before this host has shown its own pace."""
_SLEPT_SHARE = 0.85
_LEAST_SLEEP_SECONDS = 0.0002
_REFUSED = -1
_MOST_DRAWS = 50
_INFINIBAND_DEVICES = Path("/sys/class/infiniband")


def default_protocol() -> str:
    """Return ``rdma`` on a host that has an RDMA device, else ``tcp``."""
    return "rdma" if _rdma_devices() else "tcp"


def _rdma_devices() -> list[Path]:
    return sorted(_INFINIBAND_DEVICES.iterdir()) if _INFINIBAND_DEVICES.is_dir() else []


def check_library() -> None:
    """Raise ``RuntimeError`` with one sentence if the Transfer Engine cannot be loaded here."""
    _engine_class()


def _engine_class() -> Any:
    try:
        from mooncake.engine import TransferEngine
    except ImportError as error:
        raise RuntimeError(
            f"the Mooncake Transfer Engine cannot be loaded ({error}): install the Debian packages "
            "libibverbs1 and librdmacm1, and dfirst with one of its extras cpu, cuda or ascend"
        ) from error
    return TransferEngine


@dataclass(eq=False)
class _Mover:
    """An engine object that issues copies."""

    engine: Any
    number: int = 0
    """Tells it from those before it."""
    pace: float = 0.1
    """Seconds that batches took for each second guessed. It starts low: sleeping too little costs least."""
    free_at: float = 0.0
    """When its last batch ended."""


@dataclass(eq=False)
class Batch:
    """A batch that was begun. Over other transports than TCP it has also ended by then."""

    direction: str
    peer: str
    columns: tuple[list[int], list[int], list[int]]
    """Local addresses, remote addresses, lengths."""
    started: float
    mover: int = 0
    """The number of what issued it."""
    number: int = 0
    """The engine's; 0 if it took none."""
    copied: bool | None = None
    """Whether all has arrived; None while nobody knows."""


class MooncakeEngine:
    """Registers memory, serves it to peers, and copies from and to theirs.

    ``read`` and ``write`` block, may be called from many threads (one at a time for each peer), and return
    only when no byte of the batch can move any more.
    """

    def __init__(
        self,
        host: str,
        protocol: str,
        copy_timeout_seconds: float,
        quarantine_seconds: float | None = None,
        lent_seconds: float = 30.0,
    ) -> None:
        """Start to serve at ``host``, at ports that nobody there has had lately (rule R6).

        ``copy_timeout_seconds`` is for how long the engine tries a batch (at least 5, its own lower limit; a
        ``MC_TRANSFER_TIMEOUT`` in the environment wins). ``quarantine_seconds`` is how long a batch counts as
        in flight after it failed in a way that leaves its end unknown; without it, the time-out once more.
        ``lent_seconds`` is how long a peer may go on to start copies to a process that has ended.
        """
        _check_protocol(protocol)
        _set_environment(host, protocol, copy_timeout_seconds)
        self.copy_timeout_seconds = float(max(_LEAST_TIMEOUT_SECONDS, int(os.environ["MC_TRANSFER_TIMEOUT"])))
        self.quarantine_seconds = (
            self.copy_timeout_seconds if quarantine_seconds is None else quarantine_seconds
        )
        self._host = host
        self._protocol = protocol
        self._lock = threading.Lock()
        self._movers: dict[str, _Mover] = {}
        self._spare_movers: list[_Mover] = []
        self._made_movers = 0
        self._registered: list[int] = []
        self._rest_seconds = lent_seconds + self.copy_timeout_seconds + self.quarantine_seconds
        self._server: Any = self._new_engine(serves=True)
        self.data_address = f"{host}:{self._server.get_rpc_port()}"

    def register(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Let peers copy from and to these (address, length) ranges."""
        addresses = [address for address, _ in ranges]
        lengths = [length for _, length in ranges]
        if self._server.batch_register_memory(addresses, lengths) != 0:
            raise RuntimeError(
                f"Mooncake refused to register {len(ranges)} ranges of {sum(lengths)} bytes for "
                f"{self._protocol}: check the limit on locked memory (ulimit -l)"
            )
        self._registered.extend(addresses)

    def connect(self, peer: str) -> bool:
        """Make the first contact with a peer; False if it does not answer within the copy time-out.

        Ask for leave to copy after it: ``read`` and ``write`` then submit at once.
        """
        if self._mover(peer) is not None:
            return True
        ended, given_up = threading.Event(), threading.Event()
        threading.Thread(
            target=self._make_contact,
            args=(peer, self._take_spare(), ended, given_up),
            name=f"dfirst-contact-{peer}",
            daemon=True,
        ).start()
        ended.wait(self.copy_timeout_seconds)
        with self._lock:
            given_up.set()
            answered = peer in self._movers
        if not answered:
            logger.warning("%s: no answer, nothing was submitted", peer)
        return answered

    def _make_contact(
        self, peer: str, mover: _Mover, ended: threading.Event, given_up: threading.Event
    ) -> None:
        """Open the peer's segment with an empty batch: it moves nothing, so that it can be left to itself."""
        answered = mover.engine.batch_transfer_sync_read(peer, [], [], []) == 0
        with self._lock:
            if answered and not given_up.is_set():
                self._movers[peer] = mover
            elif mover.engine is not self._server:
                self._spare_movers.append(mover)
        ended.set()

    def read(
        self,
        peer: str,
        local_addresses: Sequence[int],
        remote_addresses: Sequence[int],
        lengths: Sequence[int],
    ) -> bool:
        """Copy from the peer at data address ``peer``; on False any part of it may have been copied."""
        return self._copy("read", peer, local_addresses, remote_addresses, lengths)

    def write(
        self,
        peer: str,
        local_addresses: Sequence[int],
        remote_addresses: Sequence[int],
        lengths: Sequence[int],
    ) -> bool:
        """Copy to the peer at data address ``peer``; on False any part of it may have been copied."""
        return self._copy("write", peer, local_addresses, remote_addresses, lengths)

    def forget(self, peer: str) -> None:
        """Nothing is going on with this peer: what was kept for it may serve another one."""
        with self._lock:
            mover = self._movers.pop(peer, None)
            if mover is not None and mover.engine is not self._server:
                self._spare_movers.append(mover)

    def close(self) -> None:
        """Serve no more. No copy may be going on."""
        with self._lock:
            self._movers.clear()
            self._spare_movers.clear()
        if self._registered and self._server.batch_unregister_memory(self._registered) != 0:
            logger.warning("Mooncake did not unregister %d ranges", len(self._registered))
        self._registered.clear()
        self._server = None

    def begin(
        self,
        direction: str,
        peer: str,
        local_addresses: Sequence[int],
        remote_addresses: Sequence[int],
        lengths: Sequence[int],
    ) -> Batch:
        """Start to ``read`` or ``write``. ``finish`` must follow, for a peer's batches in their order."""
        if len(lengths) > MAX_DESCRIPTORS:
            raise ValueError(f"{len(lengths)} descriptors in a batch; the limit is {MAX_DESCRIPTORS}")
        columns = (list(local_addresses), list(remote_addresses), list(lengths))
        batch = Batch(direction, peer, columns, time.perf_counter())
        if not self.connect(peer):
            batch.number = _REFUSED
        elif self._protocol == "tcp":
            mover = self._movers[peer]
            submit = getattr(mover.engine, f"batch_transfer_async_{direction}")
            batch.mover, batch.number = mover.number, submit(peer, *_cut(*columns))
        else:
            # Now, while the leave to copy is fresh, and not when it is waited for (rule R3).
            batch.copied = self._run(batch)
        return batch

    def finish(self, batch: Batch) -> bool:
        """Wait until no byte of a batch can move any more; on False any part of it may have been copied."""
        if batch.number == _REFUSED or not self._is_current(batch):
            # It was not begun, or has ended with the mover that an earlier batch of this peer took along.
            return False
        if self._wait(batch) if batch.copied is None else batch.copied:
            return True
        logger.warning(
            "%s: a %s of %d descriptors failed after %.2f s",
            batch.peer,
            batch.direction,
            len(batch.columns[2]),
            time.perf_counter() - batch.started,
        )
        self._end_failed_batch(batch.direction, batch.peer)
        return False

    def _copy(
        self,
        direction: str,
        peer: str,
        local_addresses: Sequence[int],
        remote_addresses: Sequence[int],
        lengths: Sequence[int],
    ) -> bool:
        return self.finish(self.begin(direction, peer, local_addresses, remote_addresses, lengths))

    def _wait(self, batch: Batch) -> bool:
        if batch.number == 0:
            return False
        mover = self._movers[batch.peer]
        # What was begun behind another batch has the lanes to itself from that one's end on.
        started = max(batch.started, mover.free_at)
        guess = len(batch.columns[2]) * _DESCRIPTOR_SECONDS + sum(batch.columns[2]) * _BYTE_SECONDS
        left = _SLEPT_SHARE * mover.pace * guess - (time.perf_counter() - started)
        if left > _LEAST_SLEEP_SECONDS:
            time.sleep(left)
        copied: bool = mover.engine.get_batch_transfer_status([batch.number]) == 0
        mover.free_at = time.perf_counter()
        seconds = mover.free_at - started
        if copied:
            # Down at once, up in small steps: one slow batch must not send the next ones to sleep for long.
            mover.pace = min(seconds / guess, 1.5 * mover.pace)
        return copied

    def _run(self, batch: Batch) -> bool:
        # The synchronous call tries other devices before it gives up, the asynchronous one does not.
        run = getattr(self._movers[batch.peer].engine, f"batch_transfer_sync_{batch.direction}")
        return bool(run(batch.peer, *batch.columns) == 0)

    def plain(self) -> Any:
        """Return an engine object of the library itself, for whoever compares with it."""
        return self._new_engine()

    def _mover(self, peer: str) -> _Mover | None:
        """Return what copies for this peer; None before the first contact."""
        with self._lock:
            return self._movers.get(peer)

    def _is_current(self, batch: Batch) -> bool:
        mover = self._mover(batch.peer)
        return mover is not None and mover.number == batch.mover

    def _take_spare(self) -> _Mover:
        if self._protocol != "tcp":
            return _Mover(self._server)
        with self._lock:
            if self._spare_movers:
                return self._spare_movers.pop()
            self._made_movers += 1
            number = self._made_movers
        return _Mover(self._new_engine(), number)

    def _end_failed_batch(self, direction: str, peer: str) -> None:
        if self._protocol == "tcp":
            with self._lock:
                mover = self._movers.pop(peer)
            # The last reference: its destructor returns when none of its descriptors can move any more.
            del mover
            if direction == "read":
                return
        time.sleep(self.quarantine_seconds)

    def _new_engine(self, serves: bool = False) -> Any:
        refused = []  # until there is another: their ports cannot be drawn again
        for _ in range(_MOST_DRAWS):
            with ONE_AT_A_TIME:
                before = listening_ports()
                engine = self._started_engine()
                fresh = all_fresh(listening_ports() - before, self._rest_seconds, keep=serves)
            if fresh:
                return engine
            refused.append(engine)
        raise RuntimeError(
            f"Mooncake has drawn {_MOST_DRAWS} times data ports that were used on this host within the last "
            f"{self._rest_seconds:g} s: give it more of them with MC_MIN_RPC_PORT and MC_MAX_RPC_PORT"
        )

    def _started_engine(self) -> Any:
        engine = _engine_class()()
        with keep_to_address(self._host):
            if engine.initialize(self._host, "P2PHANDSHAKE", self._protocol, "") != 0:
                raise RuntimeError(
                    f"Mooncake cannot start on {self._host} with {self._protocol}: check that the address is "
                    "one of this host and that a port from MC_MIN_RPC_PORT to MC_MAX_RPC_PORT is free"
                )
        return engine


def _cut(local: list[int], remote: list[int], lengths: list[int]) -> tuple[list[int], list[int], list[int]]:
    """Return the same runs, none of them longer than ``MAX_TCP_RUN_BYTES``."""
    if max(lengths, default=0) <= MAX_TCP_RUN_BYTES:
        return local, remote, lengths
    pieces = [
        (here + start, there + start, min(MAX_TCP_RUN_BYTES, length - start))
        for here, there, length in zip(local, remote, lengths, strict=True)
        for start in range(0, length, MAX_TCP_RUN_BYTES)
    ]
    here, there, cut = zip(*pieces, strict=True)
    return list(here), list(there), list(cut)


def _check_protocol(protocol: str) -> None:
    if protocol == "rdma" and not _rdma_devices():
        raise ValueError(f"protocol rdma needs a device in {_INFINIBAND_DEVICES} and there is none: use tcp")
    if os.environ.get("MC_TCP_PROTO") == "1":
        # In that version a write counts as done when it has left this host, and may land after its lease.
        raise ValueError("MC_TCP_PROTO=1 turns acknowledgements off, and leases rest on them: unset it")


def _set_environment(host: str, protocol: str, copy_timeout_seconds: float) -> None:
    """Set what the engine reads from the environment when an engine object is made; the user's values win."""
    defaults = {
        "MC_TRANSFER_TIMEOUT": str(math.ceil(copy_timeout_seconds)),
        "MC_LOG_LEVEL": "ERROR",
        "MC_TCP_BIND_ADDRESS": host,
    }
    if protocol == "tcp":
        # The protocol given to the engine chooses an allocator only: with a device there it would use RDMA.
        defaults["MC_FORCE_TCP"] = "1"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
