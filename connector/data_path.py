"""Runs the copies of transfers: one thread for each peer, so that a peer that stalls delays no other.

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

from ..protocol.copies import Copies
from ..protocol.stages import Slot
from .copy_jobs import DROPPED, READ, STOPPED, WRITE, CopyResult, Engine, Job, Piece, PullJob
from .job_copier import JobCopier, WantPart
from .staging import Staging

logger = logging.getLogger(__name__)


class _Peer:
    """The line of jobs that have something to do with one peer."""

    def __init__(self, address: str, lock: threading.Lock) -> None:
        self.address = address
        self.line: deque[Job] = deque()
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
        self._max_threads = max_threads
        self._idle_seconds = idle_seconds
        self._lock = threading.Lock()
        self._copier = JobCopier(engine, self._lock, staging, want_part)
        self._jobs: dict[str, Job] = {}
        self._peers: dict[str, _Peer] = {}
        self._unserved: deque[_Peer] = deque()
        """Peers with work for which no thread was left."""
        self._threads: set[threading.Thread] = set()
        self._closing = False

    def start_pull(self, job: PullJob) -> None:
        """Copy everything that the job names from its peer to here."""
        pull = Job(job.key, job.peer, READ, job.may_start, closed=True)
        if len(job.copies):
            pull.pieces.append(Piece(job.copies, None, None, drops=0))
        with self._lock:
            self._admit(pull)
            self._queue(pull)

    def open_push(self, key: str, peer: str, may_start: Callable[[str], bool] | None = None) -> None:
        """Begin a push whose pieces follow. ``may_start`` is as in ``PullJob``."""
        with self._lock:
            self._admit(Job(key, peer, WRITE, may_start))

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
                job.pieces.append(Piece(copies, after, ready, job.drops))
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

    def _admit(self, job: Job) -> None:
        if self._closing:
            raise RuntimeError(f"{job.key}: the data path has been shut down")
        if job.key in self._jobs:
            raise ValueError(f"{job.key}: a copy of this name is under way")
        self._jobs[job.key] = job

    def _stop(self, job: Job) -> None:
        job.pieces.clear()
        if not job.closed or job.in_hand or job.queued:
            job.reason = job.reason or STOPPED
        if job.answers is not None:
            job.answers.wake()
        self._queue(job)

    def _queue(self, job: Job) -> None:
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

    def _next_job(self, peer: _Peer) -> Job | None:
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

    def _advance(self, peer: _Peer, job: Job) -> None:
        """Copy what the job has now; then end it, or put it back into the line when it gets more."""
        try:
            self._copier.copy_pieces(job)
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
