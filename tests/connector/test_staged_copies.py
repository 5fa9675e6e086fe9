"""Copies by way of staging arrive as direct ones do, whatever is asked, refused, late or stopped."""

import queue
import random
import threading
import time

import numpy as np
import pytest
from dfirst.connector.copy_jobs import CopyResult, PullJob
from dfirst.connector.data_path import DataPath
from dfirst.connector.extra_config import LEAST_STAGING_BYTES, ExtraConfig
from dfirst.connector.kv_memory import HostMemory, Runs
from dfirst.connector.mooncake_engine import MooncakeEngine
from dfirst.connector.staged_copies import LEAST_PART_BYTES, part_bytes
from dfirst.connector.staging import LEAST_SLOTS, PLACES, Staging, open_staging
from dfirst.connector.staging import PLACE_BYTES as LARGEST_PLACE_BYTES
from dfirst.protocol.copies import Copies, join
from dfirst.protocol.stages import Slot, unpack

from .ranks import ALWAYS_STAGE

SIZE, GRAIN, PLACE_BYTES = 1 << 19, 64, 2048
SLOTS = 4 * PLACES * PLACE_BYTES


class Owner:
    """The other side: its memory, and what gathers and scatters there, in a thread of its own."""

    def __init__(self) -> None:
        self.memory = np.zeros(SIZE, dtype=np.uint8)
        self.engine = MooncakeEngine("127.0.0.1", "tcp", 5, quarantine_seconds=0.2)
        self.engine.register([(self.memory.ctypes.data, SIZE)])
        self.staging = opened(self.engine, self.memory)
        self.refuses = 0.0
        """How often a part is refused."""
        self.pause_seconds = 0.0
        self.silent = False
        self.parts = 0
        self._random = random.Random(3)
        self._asked: queue.Queue[tuple[DataPath, str, int, bytes, bytes] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def ask(self, path: DataPath, key: str, place: int, starts: bytes, lengths: bytes) -> None:
        self._asked.put((path, key, place, starts, lengths))

    def end(self) -> None:
        self._asked.put(None)
        self._thread.join(10)
        self.engine.close()

    def _work(self) -> None:
        while (asked := self._asked.get()) is not None:
            path, key, place, starts, lengths = asked
            slot: Slot | None = self.staging.slots[0]
            if self.silent:
                continue
            if self._random.random() < self.refuses:
                slot = None
            elif starts:
                self.parts += 1
                time.sleep(self.pause_seconds)
                memory = self.staging.memory
                move = memory.gather if key.startswith("pull") else memory.scatter
                move(Runs(*unpack(starts, lengths)), self.staging.slots[0].place(place))
            path.part_ready(key, place, slot)


def opened(engine: MooncakeEngine, memory: np.ndarray) -> Staging:
    ranges = [(memory.ctypes.data, SIZE)]
    made = open_staging(engine, ranges, SLOTS, (), PLACE_BYTES, ALWAYS_STAGE)
    assert made is not None
    return made


@pytest.fixture(scope="module")
def owner():
    made = Owner()
    yield made
    made.end()


@pytest.fixture(scope="module")
def mover():
    """Return (its memory, its engine, its staging)."""
    memory = np.zeros(SIZE, dtype=np.uint8)
    engine = MooncakeEngine("127.0.0.1", "tcp", 5, quarantine_seconds=0.2)
    engine.register([(memory.ctypes.data, SIZE)])
    yield memory, engine, opened(engine, memory)
    engine.close()


@pytest.fixture
def ends():
    return queue.Queue()


@pytest.fixture
def path(owner, mover, ends):
    owner.refuses, owner.pause_seconds, owner.silent, owner.parts = 0.0, 0.0, False, 0
    made = DataPath(mover[1], ends.put, staging=mover[2], want_part=lambda *asked: owner.ask(made, *asked))
    yield made
    owner.silent = False
    assert made.shutdown(20)


def drawn(seed: int, source: np.ndarray, target: np.ndarray, count: int = 300) -> Copies:
    """Draw runs between the two memories: of one length or several, scattered on both sides."""
    generator = np.random.default_rng(seed)
    width = 8 * GRAIN
    slots = min(len(source), len(target)) // width
    lengths = np.full(count, 4 * GRAIN, dtype=np.int64)
    if seed % 2:
        lengths = generator.integers(1, 9, count) * GRAIN
    sources = source.ctypes.data + generator.permutation(slots)[:count] * width
    targets = target.ctypes.data + generator.permutation(slots)[:count] * width
    return join([Copies(sources.astype(np.int64), targets.astype(np.int64), lengths)])


def written(pieces: list[Copies], source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return what the target holds when the pieces were copied one after the other."""
    expected = target.copy()
    for copies in pieces:
        columns = (copies.source_addresses, copies.target_addresses, copies.lengths)
        for start, end, length in zip(*(column.tolist() for column in columns), strict=True):
            here, there = start - source.ctypes.data, end - target.ctypes.data
            expected[there : there + length] = source[here : here + length]
    return expected


def filled(source: np.ndarray, target: np.ndarray) -> None:
    source[:] = np.random.default_rng(1).integers(0, 256, SIZE, dtype=np.uint8)
    target[:] = 9


def result(ends: "queue.Queue[CopyResult]") -> CopyResult:
    return ends.get(timeout=30)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("refuses", [0.0, 0.05])
def test_what_is_pulled_arrives_byte_for_byte(path, ends, owner, mover, seed, refuses):
    owner.refuses = refuses
    filled(owner.memory, mover[0])
    copies = drawn(seed, owner.memory, mover[0])
    expected = written([copies], owner.memory, mover[0])
    path.start_pull(PullJob("pull", owner.engine.data_address, copies))
    ended = result(ends)
    assert (ended.ok, ended.bytes) == (True, copies.bytes)
    assert (mover[0] == expected).all()
    assert owner.parts > PLACES or refuses


@pytest.mark.parametrize("seed", range(8))
def test_what_is_pushed_arrives_byte_for_byte_before_the_push_is_over(path, ends, owner, mover, seed):
    owner.pause_seconds = 0.001
    filled(mover[0], owner.memory)
    pieces = list(drawn(seed, mover[0], owner.memory).split(75))
    expected = written(pieces, mover[0], owner.memory)
    path.open_push("push", owner.engine.data_address)
    for copies in pieces:
        path.push("push", copies)
    path.close_push("push")
    ended = result(ends)
    assert (ended.ok, ended.bytes) == (True, sum(copies.bytes for copies in pieces))
    assert owner.parts >= PLACES
    assert (owner.memory == expected).all()


def in_one_direction(kind: str, owner: Owner, mover) -> tuple[np.ndarray, np.ndarray]:
    """Return the memory that is read and the one that is written."""
    return (owner.memory, mover[0]) if kind == "pull" else (mover[0], owner.memory)


def run(kind: str, path: DataPath, ends, owner: Owner, copies: Copies) -> CopyResult:
    peer = owner.engine.data_address
    if kind == "pull":
        path.start_pull(PullJob("pull", peer, copies))
    else:
        path.open_push("push", peer)
        path.push("push", copies)
        path.close_push("push")
    return result(ends)


@pytest.mark.parametrize("long", [4096, 4096 + GRAIN, 20_032])
@pytest.mark.parametrize("kind", ["pull", "push"])
def test_long_runs_are_cut_where_rows_stay_long(path, ends, owner, mover, monkeypatch, kind, long):
    # Parts smaller than places, as those of transfers are that are small themselves.
    monkeypatch.setattr("dfirst.connector.staged_copies.LEAST_PART_BYTES", 256)
    monkeypatch.setattr("dfirst.connector.staged_copies.LEAST_PARTS", 30)
    source, target = in_one_direction(kind, owner, mover)
    filled(source, target)
    base = 1 << 18
    short = drawn(4, source[:base], target[:base], 100)
    whole = join(
        [
            short,
            Copies(
                np.array([source.ctypes.data + base], dtype=np.int64),
                np.array([target.ctypes.data + base + 8 * GRAIN], dtype=np.int64),
                np.array([long], dtype=np.int64),
            ),
        ]
    )
    expected = written([whole], source, target)
    ended = run(kind, path, ends, owner, whole)
    assert (ended.ok, ended.reason, ended.bytes) == (True, "", whole.bytes)
    assert owner.parts == -(-whole.bytes // part_bytes(whole.bytes, PLACE_BYTES)), "all of it was staged"
    assert (target == expected).all()


@pytest.mark.parametrize("kind", ["pull", "push"])
def test_what_no_rows_can_be_made_of_here_is_copied_directly(path, ends, owner, mover, kind):
    source, target = in_one_direction(kind, owner, mover)
    filled(source, target)
    whole = drawn(2, source[: SIZE // 2], target[: SIZE // 2], 100)
    # On the owner's side runs stay where rows can be made of them.
    mine = whole.target_addresses if kind == "pull" else whole.source_addresses
    mine[::7] += 8
    expected = written([whole], source, target)
    ended = run(kind, path, ends, owner, whole)
    assert (ended.ok, ended.reason, ended.bytes) == (True, "", whole.bytes)
    assert (target == expected).all()


def test_an_owner_without_a_slot_is_written_to_directly(path, ends, owner, mover):
    owner.refuses = 1.0
    filled(mover[0], owner.memory)
    copies = drawn(0, mover[0], owner.memory)
    expected = written([copies], mover[0], owner.memory)
    path.open_push("push", owner.engine.data_address)
    path.push("push", copies)
    path.close_push("push")
    assert result(ends).ok
    assert (owner.memory == expected).all()
    assert owner.parts == 0


def test_a_reader_does_not_wait_for_ever_for_a_part(path, ends, owner, mover, monkeypatch):
    monkeypatch.setattr("dfirst.connector.staged_copies.PATIENCE_SECONDS", 0.2)
    owner.silent = True
    filled(owner.memory, mover[0])
    copies = drawn(2, owner.memory, mover[0])
    expected = written([copies], owner.memory, mover[0])
    path.start_pull(PullJob("pull", owner.engine.data_address, copies))
    assert result(ends).ok
    assert (mover[0] == expected).all()


@pytest.mark.parametrize("kind", ["pull", "push"])
def test_a_job_that_waits_for_a_part_can_be_stopped(path, ends, owner, mover, kind):
    owner.silent = True
    copies = drawn(2, owner.memory, mover[0]) if kind == "pull" else drawn(2, mover[0], owner.memory)
    if kind == "pull":
        path.start_pull(PullJob("pull", owner.engine.data_address, copies))
    else:
        path.open_push("push", owner.engine.data_address)
        path.push("push", copies)
    time.sleep(0.2)
    assert ends.empty()
    path.stop(kind)
    ended = result(ends)
    assert (ended.ok, ended.reason) == (False, "stopped")


@pytest.mark.parametrize("kind", ["pull", "push"])
def test_a_lease_that_has_run_out_sends_no_further_part(path, ends, owner, mover, kind):
    left = [3]

    def may_start(_key: str) -> bool:
        left[0] -= 1
        return left[0] >= 0

    if kind == "pull":
        filled(owner.memory, mover[0])
        copies = drawn(4, owner.memory, mover[0])
        path.start_pull(PullJob("pull", owner.engine.data_address, copies, may_start))
    else:
        filled(mover[0], owner.memory)
        copies = drawn(4, mover[0], owner.memory)
        path.open_push("push", owner.engine.data_address, may_start)
        path.push("push", copies)
    ended = result(ends)
    assert (ended.ok, ended.reason) == (False, "lease")
    assert ended.bytes <= 3 * PLACE_BYTES


def test_a_prompt_that_is_computed_again_is_not_overwritten_by_what_was_scattered_late(
    path, ends, owner, mover
):
    owner.pause_seconds = 0.02
    filled(mover[0], owner.memory)
    copies = drawn(6, mover[0], owner.memory, 40)
    path.open_push("push", owner.engine.data_address)
    path.push("push", copies)
    time.sleep(0.05)
    path.drop_queued("push")
    mover[0][:] = np.random.default_rng(2).integers(0, 256, SIZE, dtype=np.uint8)
    expected = written([copies], mover[0], owner.memory)
    path.push("push", copies)
    path.close_push("push")
    assert result(ends).ok
    assert (owner.memory == expected).all()


def test_only_memory_that_is_registered_is_staged(mover):
    memory, _, staging = mover
    assert isinstance(staging.memory, HostMemory)
    start, length = np.array([memory.ctypes.data + SIZE - 64]), np.array([4096])
    with pytest.raises(ValueError, match="not in the registered memory"):
        staging.memory.gather(Runs(start, length), staging.slots[0].address)


def test_what_is_small_goes_in_several_parts_and_none_is_larger_than_a_place() -> None:
    place = 8 << 20
    assert part_bytes(1 << 30, place) == place
    assert part_bytes(6 << 22, place) == part_bytes(11 << 22, place) == 1 << 22
    assert part_bytes((6 << 22) - 1, place) == 1 << 21
    assert part_bytes(1 << 20, place) == LEAST_PART_BYTES
    assert part_bytes(1 << 30, 4096) == 4096


class FakeCopyEngine:
    """Registers nothing: what is divided here is never copied."""

    data_address = "fake:1"

    def register(self, ranges) -> None:
        self.ranges = ranges

    def read(self, peer, local, remote, lengths) -> bool:
        raise AssertionError("costs are given, none is to be tried out")

    def forget(self, peer) -> None:
        raise AssertionError("costs are given, none is to be tried out")


@pytest.mark.parametrize("size", [LEAST_STAGING_BYTES, 100_000_000, ExtraConfig().staging_bytes])
def test_little_memory_makes_small_slots_and_not_none(size):
    engine = FakeCopyEngine()
    made = open_staging(engine, [], size, costs=ALWAYS_STAGE)
    assert made is not None
    ((start, length),) = engine.ranges
    assert length <= size
    assert len(made.slots) * 2 >= LEAST_SLOTS
    assert made.place_bytes <= LARGEST_PLACE_BYTES
    for slot in made.slots:
        assert start <= slot.address
        assert slot.place(PLACES) <= start + length


def test_without_memory_nothing_is_staged():
    assert open_staging(FakeCopyEngine(), [], 0, costs=ALWAYS_STAGE) is None
