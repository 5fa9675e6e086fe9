"""The control thread of a rank: it owns the core and the side channel, and carries out what the core asks
for.

Everything else (vLLM's forward thread, the data path's threads) hands it values and goes on: nothing that
this thread does can hold up a forward pass (rule L2). It sleeps until a message, a value or a timer is
there. No error ends it: one that is not expected is logged with the transfer that it was about, and the
next item is taken.
"""

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import Protocol

import msgspec
import zmq

from ..protocol.commands import (
    Collected,
    Command,
    CopyEnded,
    CoreEvent,
    DirectoryKnown,
    LegKey,
    MessageReceived,
    PartWanted,
    StartPush,
)
from ..protocol.copies import Copies, copies
from ..protocol.effects import (
    SENT,
    Effect,
    PartReady,
    Reply,
    Report,
    Send,
    StageBlocks,
    StartCopies,
    StopCopies,
)
from ..protocol.messages import Message, TransferKey
from ..protocol.modes import BLOCKWISE
from ..protocol.rank import RankCore
from ..protocol.shards import Shard
from .copy_jobs import CopyResult, PullJob
from .data_path import DataPath
from .own_memory import OwnMemory
from .push_feed import Layer, PushFeed, leg_name
from .side_channel import SideChannel
from .staging import Stager, Staging
from .stats import Observed, RankStats
from .step import StepMetadata
from .trace import Tracer

logger = logging.getLogger(__name__)

MAX_SLEEP_SECONDS = 60.0
COPIES_SHARE = 0.75
"""Of the time in which a rank ends: for the batches in flight."""
PAUSE_AFTER_ERROR_SECONDS = 0.1
"""An error that comes again at once must not fill the log and a core."""


class StepBegan(msgspec.Struct, frozen=True):
    """A step's metadata has come, before its forward pass."""

    metadata: StepMetadata


class StepEnded(msgspec.Struct, frozen=True):
    """The forward pass has written all layers."""


Item = CoreEvent | StepBegan | Layer | StepEnded | CopyResult


class CopyMaker(Protocol):
    """Opens the data path once the loop can be told of results."""

    def __call__(self, loop: "RankLoop") -> DataPath: ...


def boot_clock() -> float:
    """Return seconds since the host started, the time that it was suspended included (rule R2)."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class RankLoop:
    """A rank at work."""

    def __init__(
        self,
        core: RankCore,
        channel: SideChannel,
        shard: Shard,
        data_path: CopyMaker,
        tracer: Tracer,
        staging: Staging | None = None,
    ) -> None:
        """Begin with ``start``. The core lends the slots of ``staging``."""
        self._core = core
        self._channel = channel
        self._shard = shard
        self._tracer = tracer
        tracer.started(core.sender.incarnation, core.timing)
        self._data = data_path(self)
        self._stager = Stager(staging.memory, shard, self.post) if staging else None
        self._own_memory = OwnMemory(shard)
        self._feed = PushFeed(shard, self._data, self.may_start)
        self._legs: dict[str, LegKey] = {}
        self._stats = RankStats(core.sender.rank, tracer, core.counters, channel.counters)
        self._items: deque[Item] = deque()
        self._reports: deque[Report] = deque()
        self._reported = threading.Event()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._pipe_lock = threading.Lock()
        """Held while the pipe is written to, so that its number cannot become another file's meanwhile."""
        self._ending = False
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="dfirst-rank", daemon=True)

    # From other threads

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def post(self, item: Item) -> None:
        """Hand over a value; returns at once."""
        self._items.append(item)
        self._wake()

    def take_reports(self, patience_seconds: float = 0.0) -> list[Report]:
        """Return what vLLM is to be told, once; taking it is the release of the blocks. If there is nothing
        yet, wait for so long.
        """
        if not self._reports and patience_seconds > 0:
            self._reported.wait(patience_seconds)
        self._reported.clear()
        taken = []
        while self._reports:
            taken.append(self._reports.popleft())
        for report in taken:
            self._tracer.reported(report)
            self._items.append(Collected(report.key))
        if taken:
            self._wake()
        return taken

    def take_stats(self) -> Observed | None:
        """Return what was counted since the last call; None if nothing was."""
        return self._stats.take()

    def may_start(self, name: str) -> bool:
        """Return whether a copy of this leg may be started now: its lease runs."""
        leg = self._legs.get(name)
        return leg is not None and self._core.lease_runs(leg, boot_clock())

    def want_part(self, name: str, place: int, starts: bytes, lengths: bytes) -> None:
        """Have the other rank of a leg gather or scatter a part; the data path hears when it has."""
        leg = self._legs.get(name)
        if leg is not None:
            self.post(PartWanted(leg=leg, place=place, starts=starts, lengths=lengths))

    def stop(self, timeout_seconds: float) -> None:
        """End the copies, the thread and the sockets, in this time."""
        deadline = time.monotonic() + timeout_seconds
        if not self._data.shutdown(COPIES_SHARE * timeout_seconds):
            logger.warning("a copy was still in flight when the rank ended")
        if self._stager is not None and not self._stager.stop(max(deadline - time.monotonic(), 0.0)):
            logger.warning("a part was still being gathered or scattered when the rank ended")
        self._ending = True
        self._wake()
        if not self._thread.is_alive():
            return
        self._thread.join(max(deadline - time.monotonic(), 0.0))
        if self._thread.is_alive():
            logger.warning("the control thread did not end within %g s", timeout_seconds)

    def _wake(self) -> None:
        with self._pipe_lock:
            if self._ended:
                return
            try:
                os.write(self._wake_write, b"\0")
            except BlockingIOError:
                return  # the pipe is full: the thread has been woken more often than it has looked

    # The thread

    def _run(self) -> None:
        self._channel.poller.register(self._wake_read, zmq.POLLIN)
        while not self._ending:
            try:
                self._sleep()
                # Taken before the messages are: what has arrived by then counts before what has run out.
                due = boot_clock()
                self._take_items()
                for route, message in self._channel.receive():
                    self._hear(message, route)
                self._perform(self._core.tick(due))
            except Exception:
                logger.exception("the control thread goes on after an error")
                time.sleep(PAUSE_AFTER_ERROR_SECONDS)
        self._finish()

    def _finish(self) -> None:
        # The copies have ended by now: peers hear of it, instead of waiting for their leases to end.
        self._take_items()
        try:
            self._perform(self._core.end("this engine stops", boot_clock()))
        except Exception:
            logger.exception("peers could not be told that this engine stops")
        with self._pipe_lock:
            self._ended = True
            os.close(self._wake_read)
            os.close(self._wake_write)
        try:
            self._channel.close()
        finally:
            self._tracer.close()

    def _sleep(self) -> None:
        deadline = self._core.next_deadline()
        seconds = MAX_SLEEP_SECONDS if deadline is None else deadline - boot_clock()
        if self._items:
            seconds = 0
        self._channel.poller.poll(math.ceil(min(max(seconds, 0), MAX_SLEEP_SECONDS) * 1000))
        try:
            os.read(self._wake_read, 4096)
        except BlockingIOError:
            return  # woken by a message or a timer

    def _take_items(self) -> None:
        for _ in range(len(self._items)):
            item = self._items.popleft()
            try:
                self._take(item)
            except Exception:
                logger.exception("%s: %s could not be dealt with", about(item), type(item).__name__)

    def _hear(self, message: Message, route: bytes) -> None:
        try:
            self._tracer.received(message, route)
            self._give(MessageReceived(message, route))
        except Exception:
            logger.exception("%s: a %s could not be dealt with", about(message), type(message).__name__)

    def _take(self, item: Item) -> None:
        if isinstance(item, Layer):
            self._feed.layer_computed(item)
        elif isinstance(item, StepBegan):
            self._begin_step(item.metadata)
        elif isinstance(item, StepEnded):
            self._feed.step_ended()
        elif isinstance(item, CopyResult):
            self._copy_ended(item)
        elif isinstance(item, CopyEnded):
            self._tracer.copied(item.leg, 0, 0.0, item.ok)
            self._give(item)
        else:
            self._give(item)

    def _begin_step(self, metadata: StepMetadata) -> None:
        if metadata.directory is not None:
            self._give(DirectoryKnown(metadata.directory))
        self._feed.preempted(metadata.preempted)
        for command in metadata.commands:
            try:
                self._command(command)
            except Exception:
                logger.exception("%s: %s could not be carried out", about(command), type(command).__name__)
        self._feed.step_began(metadata.chunks)

    def _command(self, command: Command) -> None:
        if isinstance(command, StartPush):
            self._feed.started(command.key, command.cached_tokens)
        self._give(command)

    def _copy_ended(self, result: CopyResult) -> None:
        leg = self._legs.pop(result.key, None)
        if leg is None:
            logger.error("%s: copies ended that this rank does not know", result.key)
            return
        self._tracer.copied(leg, result.bytes, result.seconds, result.ok)
        mover = self._core.movers.get(leg.key)
        if mover is not None:
            self._stats.copied(mover.mode, result.bytes, result.seconds)
        self._give(CopyEnded(leg, result.ok, result.reason))

    # What the core asks for

    def _give(self, event: CoreEvent) -> None:
        self._perform(self._core.handle(event, boot_clock()))

    def _perform(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            try:
                self._carry_out(effect)
            except Exception:
                # The others are carried out all the same: a report may be among them.
                logger.exception("%s: %s could not be carried out", about(effect), type(effect).__name__)

    def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, Send):
            self._tracer.sent(effect.message)
            self._channel.send(effect.host, effect.port, effect.message)
        elif isinstance(effect, Reply):
            self._tracer.sent(effect.message, effect.route)
            self._channel.reply(effect.route, effect.message)
        elif isinstance(effect, StartCopies):
            self._start_copies(effect)
        elif isinstance(effect, StopCopies):
            self._data.stop(leg_name(effect.leg))
        elif isinstance(effect, PartReady):
            self._data.part_ready(leg_name(effect.leg), effect.place, effect.slot)
        elif isinstance(effect, StageBlocks):
            self._stage(effect)
        else:
            self._report(effect)

    def _start_copies(self, started: StartCopies) -> None:
        name = leg_name(started.leg)
        self._legs[name] = started.leg
        self._tracer.copying(started.leg)
        try:
            if started.mode == BLOCKWISE:
                moved = pulled(started, self._shard)
                self._own_memory.check(moved.target_addresses, moved.lengths)
                self._data.start_pull(PullJob(name, started.peer.data_address, moved, self.may_start))
            else:
                self._feed.leg_opened(started)
        except Exception as error:
            # Most often the peer's blocks or layout cannot be what it says. No byte moves.
            logger.warning("%s: nothing is copied", name, exc_info=not isinstance(error, ValueError))
            self._data.stop(name)
            del self._legs[name]
            self.post(CopyEnded(started.leg, False, f"{type(error).__name__}: {error}"))

    def _stage(self, part: StageBlocks) -> None:
        if self._stager is None:
            raise RuntimeError("slots were lent that this rank does not have")
        self._stager.stage(part)

    def _report(self, report: Report) -> None:
        self._feed.ended(report.key)
        if report.reason:
            # Blocks that were not all sent are reported to vLLM as sent: that is how it gets them back.
            came_to = (
                "its blocks are free again, not all were sent" if report.outcome == SENT else report.outcome
            )
            logger.warning("%s: %s: %s", report.key.transfer_id, came_to, report.reason)
        self._reports.append(report)
        self._reported.set()


def about(value: object) -> str:
    """Name the transfer that a value is about, for the log."""
    for holder in (value, getattr(value, "message", None), getattr(value, "leg", None)):
        key = getattr(holder, "key", None)
        if isinstance(key, TransferKey):
            return f"{key.transfer_id}.{key.attempt}"
        if isinstance(key, str):
            return key
    return "no transfer"


def pulled(started: StartCopies, own: Shard) -> Copies:
    """Return what a pull moves: every token from the end of the cached prefix to the end of the prompt.

    Raises ``ValueError`` if the owner lent fewer blocks than that, or none of its own.
    """
    return copies(
        started.plan,
        started.peer.shard,
        own,
        started.remote_blocks,
        started.local_blocks,
        range(started.cached_tokens, started.prompt_tokens),
    )
