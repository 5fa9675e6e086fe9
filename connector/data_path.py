"""Runs the copies of transfers: one thread for each peer, so that a peer that stalls delays no other.

A job is a pull (everything known at its start) or a push (pieces arrive layer by layer until it is closed).
Jobs of one peer take turns in the order in which they have something to do; a job is never in the hands of
two threads, so its pieces move in the order in which they came. ``on_finished`` is called once for each job,
from the peer's thread, when no byte of the job can move any more.

Everything here that other threads see is under one lock, and it is not held while something is copied, waited
for or called back.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from ..protocol.copies import Copies, join
from ..protocol.stages import Slot
from .mooncake_engine import MAX_DESCRIPTORS, Batch
from .staged_copies import Answers, StagedCopies, Stopped
from .staging import Staging

logger = logging.getLogger(__name__)

MAX_BATCH_BYTES = 32 << 20
"""About 30 ms over loopback: so long may a stop have to wait for the batch in flight."""
MAX_MERGED_BYTES, MAX_MERGED_RUNS = 256 << 20, 1 << 20
"""Of pieces of a push that are looked at together: they are copied in batches, or in parts, all the same."""
_READ, _WRITE = "read", "write"
STOPPED, DROPPED, LEASE = "stopped", "dropped", "lease"
NO_ANSWER, COPY_FAILED = "no answer", "copy failed"


WantPart = Callable[[str, int, bytes, bytes], None]
"""A job's key, a place, and the owner's runs, packed as ``protocol.stages`` says."""


class Engine(Protocol):
    """What the data path needs of ``MooncakeEngine``. Both copies return when no byte can move any more."""

    def connect(self, peer: str, /) -> bool: ...
    def read(self, peer: str, local: list[int], remote: list[int], lengths: list[int], /) -> bool: ...
    def write(self, peer: str, local: list[int], remote: list[int], lengths: list[int], /) -> bool: ...
    def begin(
        self, direction: str, peer: str, local: list[int], remote: list[int], lengths: list[int], /
    ) -> Batch: ...
    def finish(self, batch: Batch, /) -> bool: ...
    def forget(self, peer: str, /) -> None: ...


@dataclass(frozen=True, eq=False)
class PullJob:
    """Bytes to copy from a peer."""

    key: str
    """Names the job in ``stop`` and in its result."""
    peer: str
    """Data address of the peer, ``host:port``."""
    copies: Copies
    may_start: Callable[[str], bool] | None = None
    """Asked with the key before each batch; False ends the job with reason ``lease``."""


class CopyResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a job ended. No byte of it moves any more."""

    key: str
    ok: bool
    """Every byte has arrived."""
    bytes: int
    """Bytes of the batches that arrived whole; more may have arrived if not ``ok``."""
    seconds: float
    """Time spent copying, without waiting for turns and events."""
    reason: str
    """Empty if ``ok``, else one of the words at the top of this file or an exception's text."""


@dataclass(eq=False)
class _Piece:
    copies: Copies
    after: Callable[[], None] | None
    ready: Callable[[], bool] | None
    drops: int
    """How often pieces of its job had been dropped when it came: a later drop is for it too."""


@dataclass(eq=False)
class _Job:
    key: str
    peer: str
    direction: str
    may_start: Callable[[str], bool] | None
    pieces: deque[_Piece] = field(default_factory=deque)
    closed: bool = False
    """No more pieces will come."""
    queued: bool = False
    """It stands in its peer's line, or a thread has it in hand."""
    in_hand: bool = False
    drops: int = 0
    """How often its pieces were dropped."""
    stages: bool = True
    """The owner has not refused to gather or scatter."""
    reason: str = ""
    """Why it cannot end well."""
    bytes: int = 0
    seconds: float = 0.0
    answers: Answers | None = None
    """Of the owner, on parts that it was asked to gather or scatter."""
    staged: StagedCopies | None = None
    staged_drops: int = 0
    """How often its pieces had been dropped when the last part was staged."""

    def is_over(self) -> bool:
        return bool(self.reason) or (self.closed and not self.pieces)


class _OneRun:
    """Batches of one run each, for a job."""

    def __init__(self, engine: Engine, job: _Job) -> None:
        self._engine = engine
        self._job = job

    def begin(self, local: int, remote: int, length: int) -> object:
        return self._engine.begin(self._job.direction, self._job.peer, [local], [remote], [length])

    def finish(self, batch: object, length: int) -> bool:
        assert isinstance(batch, Batch)
        copied = self._engine.finish(batch)
        if not copied:
            self._job.reason = self._job.reason or COPY_FAILED
        return copied


def _is_ready(piece: _Piece) -> bool:
    return piece.after is None or (piece.ready is not None and piece.ready())


class _Peer:
    """The line of jobs that have something to do with one peer."""

    def __init__(self, address: str, lock: threading.Lock) -> None:
        self.address = address
        self.line: deque[_Job] = deque()
        self.wake = threading.Condition(lock)
        self.served = False
        """A thread looks after this line."""


class DataPath:
    """Copies in the background; all methods return at once and may be called from any thread."""

    def __init__(
        self,
        engine: Engine,
        on_finished: Callable[[CopyResult], None],
        max_threads: int = 64,
        idle_seconds: float = 60.0,
        staging: Staging | None = None,
        want_part: WantPart | None = None,
    ) -> None:
        """``want_part`` asks the peer to gather or scatter; its answer comes by ``part_ready``."""
        self._engine = engine
        self._on_finished = on_finished
        self._staging = staging
        self._want_part = want_part
        self._max_threads = max_threads
        self._idle_seconds = idle_seconds
        self._lock = threading.Lock()
        self._jobs: dict[str, _Job] = {}
        self._peers: dict[str, _Peer] = {}
        self._unserved: deque[_Peer] = deque()
        """Peers with work for which no thread was left."""
        self._threads: set[threading.Thread] = set()
        self._closing = False

    def start_pull(self, job: PullJob) -> None:
        """Copy everything that the job names from its peer to here."""
        pull = _Job(job.key, job.peer, _READ, job.may_start, closed=True)
        if len(job.copies):
            pull.pieces.append(_Piece(job.copies, None, None, drops=0))
        with self._lock:
            self._admit(pull)
            self._queue(pull)

    def open_push(self, key: str, peer: str, may_start: Callable[[str], bool] | None = None) -> None:
        """Begin a push whose pieces follow. ``may_start`` is as in ``PullJob``."""
        with self._lock:
            self._admit(_Job(key, peer, _WRITE, may_start))

    def push(
        self,
        key: str,
        copies: Copies,
        after: Callable[[], None] | None = None,
        ready: Callable[[], bool] | None = None,
    ) -> None:
        """Add a piece to a push. A push that has ended takes no more: its pieces are forgotten.

        ``after`` runs on the peer's thread before the piece is copied; it may block until its bytes are in.
        ``ready`` says without blocking whether ``after`` would return at once: only such pieces are merged
        with an earlier one, which would else wait for the later one's bytes.
        """
        with self._lock:
            job = self._jobs.get(key)
            if job is None or job.reason:
                return
            if job.closed:
                raise ValueError(f"{key}: a piece came after the push was closed")
            if len(copies):
                job.pieces.append(_Piece(copies, after, ready, job.drops))
                self._queue(job)

    def drop_queued(self, key: str) -> None:
        """Forget the pieces that have not been copied (their blocks are being reused); later ones are copied.

        Only the batch in flight still moves; what is pushed later follows it, on the same thread. A push that
        was closed cannot be made whole again: it ends with reason ``dropped``.
        """
        with self._lock:
            job = self._jobs.get(key)
            if job is not None:
                if job.closed and (job.pieces or job.in_hand):
                    job.reason = job.reason or DROPPED
                job.pieces.clear()
                job.drops += 1

    def close_push(self, key: str) -> None:
        """No more pieces will come: the push ends when all that it has are copied."""
        with self._lock:
            job = self._jobs.get(key)
            if job is not None:
                job.closed = True
                self._queue(job)

    def stop(self, key: str) -> None:
        """Issue no further batch of this job: it ends with ``stopped``, unless all was copied already."""
        with self._lock:
            job = self._jobs.get(key)
            if job is not None:
                self._stop(job)

    def part_ready(self, key: str, place: int, slot: Slot | None) -> None:
        """The owner has gathered or scattered what was wanted in a place; without a slot it does not."""
        with self._lock:
            job = self._jobs.get(key)
        if job is not None and job.answers is not None:
            job.answers.take(place, slot)

    def shutdown(self, timeout_seconds: float) -> bool:
        """Stop all jobs and end the threads; False if one still waits for its batch at the end of that."""
        with self._lock:
            self._closing = True
            for job in list(self._jobs.values()):
                self._stop(job)
            for peer in self._peers.values():
                peer.wake.notify_all()
            threads = list(self._threads)
        deadline = time.monotonic() + timeout_seconds
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def _admit(self, job: _Job) -> None:
        if self._closing:
            raise RuntimeError(f"{job.key}: the data path has been shut down")
        if job.key in self._jobs:
            raise ValueError(f"{job.key}: a copy of this name is under way")
        self._jobs[job.key] = job

    def _stop(self, job: _Job) -> None:
        job.pieces.clear()
        if not job.closed or job.in_hand or job.queued:
            job.reason = job.reason or STOPPED
        if job.answers is not None:
            job.answers.wake()
        self._queue(job)

    def _queue(self, job: _Job) -> None:
        """Put a job with something to do into its peer's line, and see that a thread looks after the line."""
        if job.queued:
            return
        job.queued = True
        peer = self._peers.get(job.peer)
        if peer is None:
            peer = self._peers[job.peer] = _Peer(job.peer, self._lock)
        peer.line.append(job)
        if peer.served:
            peer.wake.notify()
        elif len(self._threads) < self._max_threads:
            self._start_thread(peer)
        elif peer not in self._unserved:
            self._unserved.append(peer)
            self._wake_an_idle_thread()

    def _start_thread(self, peer: _Peer) -> None:
        peer.served = True
        thread = threading.Thread(
            target=self._serve, args=(peer,), name=f"dfirst-copy-{peer.address}", daemon=True
        )
        self._threads.add(thread)
        thread.start()

    def _wake_an_idle_thread(self) -> None:
        idle = next((peer for peer in self._peers.values() if peer.served and not peer.line), None)
        if idle is not None:
            idle.wake.notify()

    def _serve(self, peer: _Peer) -> None:
        """Look after one peer's line until nothing came for a while, then after a peer that has no thread."""
        while True:
            job = self._next_job(peer)
            if job is not None:
                self._advance(peer, job)
                continue
            with self._lock:
                if not self._unserved:
                    self._threads.discard(threading.current_thread())
                    return
                peer = self._unserved.popleft()
                peer.served = True
            threading.current_thread().name = f"dfirst-copy-{peer.address}"

    def _next_job(self, peer: _Peer) -> _Job | None:
        """Wait for the next job in the line; None if this thread should leave the peer."""
        deadline = time.monotonic() + self._idle_seconds
        with self._lock:
            while not peer.line:
                left = deadline - time.monotonic()
                if left <= 0 or self._closing or self._unserved:
                    # Before another thread can take this peer up: what the engine keeps for it is this one's.
                    self._engine.forget(peer.address)
                    peer.served = False
                    del self._peers[peer.address]
                    return None
                peer.wake.wait(left)
            job = peer.line.popleft()
            job.in_hand = True
            return job

    def _advance(self, peer: _Peer, job: _Job) -> None:
        """Copy what the job has now; then end it, or put it back into the line when it gets more."""
        try:
            self._copy_pieces(job)
        except Exception as error:
            logger.exception("%s: copying with %s failed", job.key, job.peer)
            with self._lock:
                job.reason = job.reason or f"{type(error).__name__}: {error}"
        with self._lock:
            job.in_hand = False
            if not job.is_over():
                job.queued = False
                if job.pieces:
                    self._queue(job)
                return
            job.pieces.clear()
            del self._jobs[job.key]
        result = CopyResult(
            key=job.key, ok=not job.reason, bytes=job.bytes, seconds=job.seconds, reason=job.reason
        )
        try:
            self._on_finished(result)
        except Exception:
            logger.exception("%s: the end of the copy could not be reported", job.key)

    def _copy_pieces(self, job: _Job) -> None:
        while True:
            with self._lock:
                if job.reason or (not job.pieces and not job.closed):
                    return
                piece = job.pieces.popleft() if job.pieces else None
            if piece is None:
                self._settle(job)
                return
            if not self._engine.connect(job.peer):
                with self._lock:
                    job.reason = job.reason or NO_ANSWER
                return
            if piece.after is not None:
                piece.after()
            followers = self._take_ready(job, piece)
            whole = join([piece.copies, *followers]) if followers else piece.copies
            self._copy(job, piece.drops, whole)

    def _copy(self, job: _Job, drops: int, whole: Copies) -> None:
        rest: Copies | None = whole
        if self._staging_pays(job, whole):
            rest = self._copy_staged(job, drops, whole)
        if rest is None:
            return
        # What the owner still scatters must not land on what is written now: it may be of a prompt that was
        # preempted, and is computed again.
        self._settle(job)
        for batch in rest.split(MAX_DESCRIPTORS, MAX_BATCH_BYTES):
            if not self._may_copy(job, drops):
                return
            self._copy_batch(job, batch)

    def _staging_pays(self, job: _Job, whole: Copies) -> bool:
        if self._staging is None or self._want_part is None or not job.stages:
            return False
        return self._staging.costs.staging_pays(len(whole), whole.bytes, self._staging.place_bytes)

    def _copy_staged(self, job: _Job, drops: int, whole: Copies) -> Copies | None:
        """Copy by way of staging; return what is to be copied directly after all."""
        assert self._staging is not None
        own_slot = self._staging.own.take()
        if own_slot is None:
            return whole
        try:
            if job.staged_drops != drops:
                self._settle(job)
                job.staged_drops = drops
            staged = self._staged_of(job)
            copy = staged.pull if job.direction == _READ else staged.push
            started, before = time.monotonic(), staged.bytes
            try:
                rest = copy(whole, own_slot, lambda: self._may_copy(job, drops))
            finally:
                with self._lock:
                    job.seconds += time.monotonic() - started
                    job.bytes += staged.bytes - before
        except Stopped:
            return None
        finally:
            self._staging.own.give_back(own_slot)
        # An owner that did not stage a part has nothing to stage with, or cannot; it is not asked again.
        job.stages = job.stages and rest is None
        return rest

    def _staged_of(self, job: _Job) -> StagedCopies:
        if job.staged is None:
            assert self._staging is not None
            ask = self._want_part
            assert ask is not None
            answers = Answers(self._lock, lambda: bool(job.reason))
            job.staged = StagedCopies(
                self._staging.memory,
                self._staging.place_bytes,
                _OneRun(self._engine, job),
                lambda place, starts, lengths: ask(job.key, place, starts, lengths),
                answers,
            )
            with self._lock:
                job.answers = answers
        return job.staged

    def _settle(self, job: _Job) -> None:
        """Wait until the owner has scattered all that was written."""
        if job.staged is None or job.direction == _READ:
            return
        try:
            job.staged.settle()
        except Stopped:
            return

    def _take_ready(self, job: _Job, first: _Piece) -> list[Copies]:
        """Take the pieces that follow and need no waiting, as many as are worth being looked at together."""
        taken: list[Copies] = []
        runs, size = len(first.copies), first.copies.bytes
        while True:
            with self._lock:
                following = job.pieces[0] if job.pieces else None
            if following is None or following.drops != first.drops or not _is_ready(following):
                return taken
            runs, size = runs + len(following.copies), size + following.copies.bytes
            if runs > MAX_MERGED_RUNS or size > MAX_MERGED_BYTES:
                return taken
            with self._lock:
                if not job.pieces or job.pieces[0] is not following:
                    return taken
                job.pieces.popleft()
            if following.after is not None:
                following.after()
            taken.append(following.copies)

    def _may_copy(self, job: _Job, drops: int) -> bool:
        with self._lock:
            if job.reason or job.drops != drops:
                return False
        if job.may_start is not None and not job.may_start(job.key):
            with self._lock:
                job.reason = job.reason or LEASE
            return False
        return True

    def _copy_batch(self, job: _Job, batch: Copies) -> None:
        source, target = batch.source_addresses.tolist(), batch.target_addresses.tolist()
        lengths = batch.lengths.tolist()
        started = time.monotonic()
        if job.direction == _READ:
            copied = self._engine.read(job.peer, target, source, lengths)
        else:
            copied = self._engine.write(job.peer, source, target, lengths)
        with self._lock:
            job.seconds += time.monotonic() - started
            if copied:
                job.bytes += batch.bytes
            else:
                job.reason = job.reason or COPY_FAILED
