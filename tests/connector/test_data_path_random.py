"""Whatever is asked of the data path in whatever order, each job ends once and alone with its peer."""

import queue
import random
import threading
import time
from collections import Counter

import numpy as np
import pytest
from dfirst.connector.copy_jobs import CopyResult, PullJob
from dfirst.connector.data_path import DataPath
from dfirst.protocol.copies import Copies

JOBS, PEERS = 400, 6


class WatchfulEngine:
    """Copies nothing, takes its time, fails now and then, and looks who is copying with whom."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.lock = threading.Lock()
        self.busy = Counter()
        self.crowded = False

    def connect(self, peer):
        return True

    def forget(self, peer):
        self.crowded |= bool(self.busy[peer])

    def read(self, peer, *columns):
        with self.lock:
            self.busy[peer] += 1
            self.crowded |= self.busy[peer] > 1
            wait, fine = self.random.random() / 5000, self.random.random() > 0.01
        time.sleep(wait)
        with self.lock:
            self.busy[peer] -= 1
        return fine

    write = read


def some_runs(count: int) -> Copies:
    column = np.arange(count, dtype=np.int64) * 100
    return Copies(column, column, np.full(count, 7, dtype=np.int64))


def disturb(path: DataPath, open_pushes: list[str], choice: random.Random) -> None:
    """Do something to one of the open pushes."""
    if not open_pushes:
        return
    key = choice.choice(open_pushes)
    what = choice.choice(["push", "push", "push", "drop", "stop", "close"])
    if what == "push":
        after = (lambda: time.sleep(0.0001)) if choice.random() < 0.3 else None
        ready = choice.random() < 0.5
        path.push(key, some_runs(choice.choice([1, 5, 600])), after, ready=lambda: ready)
    elif what == "drop":
        path.drop_queued(key)
    else:
        open_pushes.remove(key)
        (path.stop if what == "stop" else path.close_push)(key)


@pytest.mark.parametrize(("seed", "max_threads"), [(1, 2), (2, 4), (3, 64)])
def test_every_job_ends_once_and_no_peer_is_used_by_two_threads(seed, max_threads):
    choice, ends = random.Random(seed), queue.Queue()
    engine = WatchfulEngine(seed)
    path = DataPath(engine, ends.put, max_threads=max_threads, idle_seconds=0.002)
    open_pushes: list[str] = []
    for number in range(JOBS):
        key, peer = f"job-{number}", f"peer-{choice.randrange(PEERS)}"
        if choice.random() < 0.4:
            path.start_pull(PullJob(key, peer, some_runs(choice.choice([0, 3, 700]))))
            if choice.random() < 0.1:
                path.stop(key)
        else:
            path.open_push(key, peer)
            open_pushes.append(key)
        for _ in range(3):
            disturb(path, open_pushes, choice)
    for key in open_pushes:
        path.close_push(key)
    results: list[CopyResult] = [ends.get(timeout=20) for _ in range(JOBS)]
    assert sorted(result.key for result in results) == sorted(f"job-{number}" for number in range(JOBS))
    assert all(result.ok == (result.reason == "") for result in results)
    assert path.shutdown(20)
    assert ends.empty()
    assert not engine.crowded
