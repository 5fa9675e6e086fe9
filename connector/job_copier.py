"""Copies the pieces of one job, directly or by way of staging, whichever is cheaper.

It has no thread of its own: it works on the thread of the job's peer. What other threads see of a job is
under the data path's lock, and that is not held while something is copied, waited for or called back.
"""

import threading
import time
from collections.abc import Callable

from ..protocol.copies import Copies, join
from .copy_jobs import COPY_FAILED, LEASE, NO_ANSWER, READ, Engine, Job, Piece
from .mooncake_engine import MAX_DESCRIPTORS, Batch
from .staged_copies import Answers, StagedCopies, Stopped, part_bytes
from .staging import Staging

MAX_BATCH_BYTES = 32 << 20
"""About 30 ms over loopback: so long may a stop have to wait for the batch in flight."""
MAX_MERGED_BYTES, MAX_MERGED_RUNS = 256 << 20, 1 << 20
"""Of pieces of a push that are looked at together: they are copied in batches, or in parts, all the same."""
WantPart = Callable[[str, int, bytes, bytes], None]
"""A job's key, a place, and the owner's runs, packed as ``protocol.stages`` says."""


class JobCopier:
    """Copies what jobs have to copy now."""

    def __init__(
        self, engine: Engine, lock: threading.Lock, staging: Staging | None, want_part: WantPart | None
    ) -> None:
        """``lock`` is the one that guards jobs; ``want_part`` asks the peer to gather or scatter."""
        self._engine = engine
        self._lock = lock
        self._staging = staging
        self._want_part = want_part

    def copy_pieces(self, job: Job) -> None:
        """Copy what is there, until there is nothing or the job cannot go on."""
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

    def _copy(self, job: Job, drops: int, whole: Copies) -> None:
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

    def _staging_pays(self, job: Job, whole: Copies) -> bool:
        if self._staging is None or self._want_part is None or not job.stages:
            return False
        size = part_bytes(whole.bytes, self._staging.place_bytes)
        return self._staging.costs.staging_pays(len(whole), whole.bytes, size)

    def _copy_staged(self, job: Job, drops: int, whole: Copies) -> Copies | None:
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
            copy = staged.pull if job.direction == READ else staged.push
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
        # What was left once would be left again: the owner has nothing to stage with, or no rows can be made.
        job.stages = job.stages and rest is None
        return rest

    def _staged_of(self, job: Job) -> StagedCopies:
        if job.staged is None:
            assert self._staging is not None
            ask = self._want_part
            assert ask is not None
            answers = Answers(self._lock, lambda: bool(job.reason))
            job.staged = StagedCopies(
                self._staging.memory,
                self._staging.place_bytes,
                _OneRun(self._engine, self._lock, job),
                lambda place, starts, lengths: ask(job.key, place, starts, lengths),
                answers,
            )
            with self._lock:
                job.answers = answers
        return job.staged

    def _settle(self, job: Job) -> None:
        """Wait until the owner has scattered all that was written."""
        if job.staged is None or job.direction == READ:
            return
        try:
            job.staged.settle()
        except Stopped:
            return

    def _take_ready(self, job: Job, first: Piece) -> list[Copies]:
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

    def _may_copy(self, job: Job, drops: int) -> bool:
        with self._lock:
            if job.reason or job.drops != drops:
                return False
        if job.may_start is not None and not job.may_start(job.key):
            with self._lock:
                job.reason = job.reason or LEASE
            return False
        return True

    def _copy_batch(self, job: Job, batch: Copies) -> None:
        source, target = batch.source_addresses.tolist(), batch.target_addresses.tolist()
        lengths = batch.lengths.tolist()
        started = time.monotonic()
        if job.direction == READ:
            copied = self._engine.read(job.peer, target, source, lengths)
        else:
            copied = self._engine.write(job.peer, source, target, lengths)
        with self._lock:
            job.seconds += time.monotonic() - started
            if copied:
                job.bytes += batch.bytes
            else:
                job.reason = job.reason or COPY_FAILED


class _OneRun:
    """Batches of one run each, for a job."""

    def __init__(self, engine: Engine, lock: threading.Lock, job: Job) -> None:
        self._engine = engine
        self._lock = lock
        self._job = job

    def begin(self, local: int, remote: int, length: int) -> object:
        return self._engine.begin(self._job.direction, self._job.peer, [local], [remote], [length])

    def finish(self, batch: object, length: int) -> bool:
        assert isinstance(batch, Batch)
        copied = self._engine.finish(batch)
        if not copied:
            with self._lock:
                self._job.reason = self._job.reason or COPY_FAILED
        return copied


def _is_ready(piece: Piece) -> bool:
    return piece.after is None or (piece.ready is not None and piece.ready())
