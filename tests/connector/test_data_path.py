"""The data path moves bytes in the background and says so once, when nothing can move any more.

These tests use the real engine over TCP: two engine objects in this process, or a second process where a peer
has to die or to stall.
"""

import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from dfirst.connector.copy_jobs import CopyResult, PullJob
from dfirst.connector.data_path import DataPath
from dfirst.connector.mooncake_engine import MAX_DESCRIPTORS, MooncakeEngine
from dfirst.protocol.copies import Copies

SIZE = 8 << 20


class Results:
    """Collects what the data path reports."""

    def __init__(self):
        self.all = queue.Queue()

    def __call__(self, result: CopyResult):
        self.all.put((result, threading.current_thread().name))

    def next(self, timeout: float = 20.0) -> CopyResult:
        return self.all.get(timeout=timeout)[0]

    def none_within(self, seconds: float) -> bool:
        time.sleep(seconds)
        return self.all.empty()


@pytest.fixture(scope="module")
def engines():
    mine, other = (MooncakeEngine("127.0.0.1", "tcp", 5, quarantine_seconds=0.2) for _ in range(2))
    yield mine, other
    mine.close()
    other.close()


@pytest.fixture(scope="module")
def memory(engines):
    """Return (here, there): memory of this side, and of the peer, which is registered."""
    here, there = (np.zeros(SIZE, dtype=np.uint8) for _ in range(2))
    engines[0].register([(here.ctypes.data, SIZE)])
    engines[1].register([(there.ctypes.data, SIZE)])
    return here, there


@pytest.fixture
def filled(memory):
    here, there = memory
    here[:] = 0
    there[:] = np.arange(SIZE) % 251
    return here, there


@pytest.fixture
def results():
    return Results()


@pytest.fixture
def path(engines, results):
    data_path = DataPath(engines[0], results)
    yield data_path
    assert data_path.shutdown(20)


def runs(source: int, target: int, count: int, length: int, gap: int = 0) -> Copies:
    offsets = np.arange(count, dtype=np.int64) * (length + gap)
    return Copies(source + offsets, target + offsets, np.full(count, length, dtype=np.int64))


def pull_of(filled, peer: str, key: str = "pull", **shape) -> PullJob:
    here, there = filled
    shape = shape or {"count": 16, "length": 4096}
    return PullJob(key, peer, runs(there.ctypes.data, here.ctypes.data, **shape))


def piece_of(filled, place: int, length: int = 4096) -> Copies:
    """Return the copy of one stretch of this side's memory to the same place of the peer's."""
    here, there = filled
    return runs(here.ctypes.data + place * length, there.ctypes.data + place * length, 1, length)


class Gate:
    """An ``after`` that blocks until it is opened, and tells when it was reached."""

    def __init__(self):
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self):
        self.reached.set()
        assert self.opened.wait(20)


class Peer:
    """A peer in a process of its own."""

    def __init__(self, size: int = SIZE):
        script = Path(__file__).with_name("peer_process.py")
        self.process = subprocess.Popen(
            [sys.executable, script, str(size)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        address, memory = self.process.stdout.readline().split()
        self.address, self.memory = address, int(memory)

    def end(self):
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()


@pytest.fixture
def peer():
    started = Peer()
    yield started
    started.end()


def test_a_pull_brings_every_byte_and_is_reported_once(path, results, filled, engines):
    here, there = filled
    path.start_pull(pull_of(filled, engines[1].data_address, count=16, length=4096, gap=4096))
    result = results.next()
    assert result.ok
    assert (result.key, result.bytes, result.reason) == ("pull", 16 * 4096, "")
    moved = np.arange(SIZE) // 4096 % 2 == 0
    moved[16 * 8192 :] = False
    assert (here[moved] == there[moved]).all()
    assert (here[~moved] == 0).all()
    assert results.none_within(0.1)


def test_more_runs_than_the_engine_queues_arrive_in_batches(path, results, filled, engines):
    here, there = filled
    count = 5 * MAX_DESCRIPTORS
    path.start_pull(pull_of(filled, engines[1].data_address, count=count, length=1000, gap=8))
    result = results.next()
    assert (result.ok, result.bytes) == (True, count * 1000)
    assert (here[:1000] == there[:1000]).all()
    last = (count - 1) * 1008
    assert (here[last : last + 1000] == there[last : last + 1000]).all()


def test_an_empty_pull_is_done_at_once(path, results, filled, engines):
    path.start_pull(pull_of(filled, engines[1].data_address, count=0, length=1))
    assert results.next().ok


def test_a_push_arrives_piece_by_piece_and_ends_when_it_is_closed(path, results, filled, engines):
    here, there = filled
    here[:] = 9
    expected = there.copy()
    path.open_push("push", engines[1].data_address)
    for layer in range(4):
        path.push("push", piece_of(filled, 2 * layer))
        expected[2 * layer * 4096 : (2 * layer + 1) * 4096] = 9
    assert results.none_within(0.2)
    path.close_push("push")
    result = results.next()
    assert (result.ok, result.bytes) == (True, 4 * 4096)
    assert (there == expected).all()


def test_a_piece_is_copied_only_after_its_bytes_are_there(path, results, filled, engines):
    here, there = filled
    gate = Gate()
    path.open_push("push", engines[1].data_address)
    path.push("push", piece_of(filled, 0), after=gate)
    path.close_push("push")
    assert gate.reached.wait(20)
    here[:4096] = 77
    gate.opened.set()
    assert results.next().ok
    assert (there[:4096] == 77).all()


def test_a_piece_does_not_wait_for_the_bytes_of_a_later_one(path, results, filled, engines):
    here, there = filled
    here[:] = 55
    gate = Gate()
    path.open_push("push", engines[1].data_address)
    path.push("push", piece_of(filled, 0))
    path.push("push", piece_of(filled, 1), after=gate, ready=lambda: False)
    assert gate.reached.wait(20)
    assert (there[:4096] == 55).all()
    gate.opened.set()
    path.close_push("push")
    assert results.next().ok


@pytest.mark.parametrize(
    ("limit", "value", "batches"),
    [
        ("MAX_MERGED_RUNS", 100, [8]),
        ("MAX_MERGED_RUNS", 3, [3, 3, 2]),
        ("MAX_MERGED_BYTES", 2 * 4096, [2, 2, 2, 2]),
    ],
)
def test_pieces_that_are_ready_are_copied_together_within_a_limit(
    path, results, filled, engines, monkeypatch, limit, value, batches
):
    monkeypatch.setattr(f"dfirst.connector.job_copier.{limit}", value)
    written, write = [], engines[0].write

    def recorded(peer, local, remote, lengths):
        written.append(len(lengths))
        return write(peer, local, remote, lengths)

    monkeypatch.setattr(engines[0], "write", recorded)
    gate = Gate()
    path.open_push("push", engines[1].data_address)
    path.push("push", piece_of(filled, 0), after=gate)
    assert gate.reached.wait(20)
    for place in range(1, 8):
        path.push("push", piece_of(filled, 2 * place))
    gate.opened.set()
    path.close_push("push")
    assert results.next().ok
    assert written == batches


def test_dropped_pieces_never_move_and_later_ones_do(path, results, filled, engines):
    here, there = filled
    here[:] = 33
    before = there.copy()
    gate = Gate()
    path.open_push("push", engines[1].data_address)
    path.push("push", piece_of(filled, 0), after=gate)
    path.push("push", piece_of(filled, 1))
    assert gate.reached.wait(20)
    path.drop_queued("push")
    path.push("push", piece_of(filled, 2))
    path.close_push("push")
    gate.opened.set()
    result = results.next()
    assert (result.ok, result.bytes) == (True, 4096)
    assert (there[: 2 * 4096] == before[: 2 * 4096]).all()
    assert (there[2 * 4096 : 3 * 4096] == 33).all()


def test_a_closed_push_that_loses_pieces_does_not_end_well(path, results, filled, engines):
    gate = Gate()
    path.open_push("push", engines[1].data_address)
    path.push("push", piece_of(filled, 0), after=gate)
    path.close_push("push")
    assert gate.reached.wait(20)
    path.drop_queued("push")
    gate.opened.set()
    result = results.next()
    assert (result.ok, result.reason) == (False, "dropped")


def test_a_stopped_job_issues_no_further_batch(path, results, filled, engines):
    gate = Gate()
    path.open_push("push", engines[1].data_address)
    path.push("push", piece_of(filled, 0), after=gate)
    assert gate.reached.wait(20)
    path.stop("push")
    path.push("push", piece_of(filled, 1))
    assert results.none_within(0.2), "its end waits for what is in hand"
    gate.opened.set()
    result = results.next()
    assert (result.ok, result.reason, result.bytes) == (False, "stopped", 0)


def test_a_push_that_waits_for_pieces_can_be_stopped(path, results, engines):
    path.open_push("push", engines[1].data_address)
    path.stop("push")
    assert results.next().reason == "stopped"
    path.stop("push")
    path.close_push("push")
    assert results.none_within(0.1), "a job that has ended is not reported again"


def test_a_lease_that_has_run_out_stops_the_next_batch(path, results, filled, engines):
    _, there = filled
    asked = []
    before = there.copy()
    path.open_push("push", engines[1].data_address, may_start=lambda key: not asked.append(key) and False)
    path.push("push", piece_of(filled, 0))
    result = results.next()
    assert (result.ok, result.reason, asked) == (False, "lease", ["push"])
    assert (there == before).all()


def test_an_exception_fails_its_own_job_and_no_other(path, results, filled, engines):
    def broken():
        raise OSError("no such event")

    path.open_push("broken", engines[1].data_address)
    path.push("broken", piece_of(filled, 0), after=broken)
    result = results.next()
    assert (result.key, result.ok, result.reason) == ("broken", False, "OSError: no such event")
    path.start_pull(pull_of(filled, engines[1].data_address))
    assert results.next().ok


def test_memory_that_is_not_registered_is_refused(path, results, filled, engines):
    here, _ = filled
    path.start_pull(PullJob("pull", engines[1].data_address, runs(4096, here.ctypes.data, 1, 64)))
    result = results.next()
    assert (result.ok, result.reason, result.bytes) == (False, "copy failed", 0)
    path.start_pull(pull_of(filled, engines[1].data_address))
    assert results.next().ok, "the next copy has a fresh start"


def test_a_key_names_one_job_at_a_time(path, results, engines):
    path.open_push("push", engines[1].data_address)
    with pytest.raises(ValueError, match="push"):
        path.open_push("push", engines[1].data_address)
    path.stop("push")
    assert results.next().reason == "stopped"


def test_nobody_at_the_address_fails_at_once(path, results, filled):
    path.start_pull(pull_of(filled, "127.0.0.1:9"))
    result = results.next(timeout=2)
    assert (result.ok, result.reason) == (False, "no answer")


def test_a_peer_that_is_killed_fails_its_pull_soon(path, results, filled, peer):
    here, _ = filled
    path.start_pull(PullJob("first", peer.address, runs(peer.memory, here.ctypes.data, 1, 64)))
    assert results.next().ok
    peer.process.kill()
    path.start_pull(PullJob("second", peer.address, runs(peer.memory, here.ctypes.data, 64, 64, gap=64)))
    result = results.next(timeout=4)
    assert (result.key, result.ok) == ("second", False)


@pytest.mark.slow
def test_a_stalled_peer_delays_no_other_and_its_bytes_never_come_late(path, results, filled, engines, peer):
    here, _ = filled
    path.start_pull(PullJob("first", peer.address, runs(peer.memory, here.ctypes.data, 1, 64)))
    assert results.next().ok
    peer.process.send_signal(signal.SIGSTOP)
    here[:] = 0
    stalled = runs(peer.memory, here.ctypes.data + SIZE // 2, 256, 4096, gap=4096)
    path.start_pull(PullJob("stalled", peer.address, stalled))
    started = time.monotonic()
    path.start_pull(pull_of(filled, engines[1].data_address, key="other"))
    assert results.next().key == "other"
    assert time.monotonic() - started < 3
    result = results.next()
    assert (result.key, result.ok) == ("stalled", False)
    here[SIZE // 2 :] = 0
    peer.process.send_signal(signal.SIGCONT)
    time.sleep(1)
    assert (here[SIZE // 2 :] == 0).all()


def test_threads_go_to_peers_that_wait_when_there_are_too_few(engines, results, filled):
    path = DataPath(engines[0], results, max_threads=1)
    path.start_pull(pull_of(filled, engines[1].data_address, key="one"))
    path.start_pull(pull_of(filled, "127.0.0.1:9", key="two"))
    path.start_pull(pull_of(filled, engines[1].data_address, key="three"))
    assert {results.next().key for _ in range(3)} == {"one", "two", "three"}
    assert path.shutdown(20)


def test_threads_end_when_they_have_nothing_to_do(engines, results, filled):
    path = DataPath(engines[0], results, idle_seconds=0.1)
    path.start_pull(pull_of(filled, engines[1].data_address))
    _, name = results.all.get(timeout=20)
    assert name == f"dfirst-copy-{engines[1].data_address}"
    time.sleep(0.5)
    assert name not in {thread.name for thread in threading.enumerate()}
    path.start_pull(pull_of(filled, engines[1].data_address))
    assert results.next().ok
    assert path.shutdown(20)


def test_after_shutdown_nothing_is_taken_on(engines, results, filled):
    path = DataPath(engines[0], results)
    path.open_push("push", engines[1].data_address)
    assert path.shutdown(20)
    assert results.next().reason == "stopped"
    with pytest.raises(RuntimeError, match="shut down"):
        path.start_pull(pull_of(filled, engines[1].data_address))
