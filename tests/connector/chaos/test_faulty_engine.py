"""Copies that fail, stand still or arrive in part do exactly that."""

import time
from pathlib import Path

import pytest
from dfirst.connector.chaos.engine import FaultyEngine, half_of
from dfirst.connector.chaos.orders import FaultDesk, OrderBook

PEER = "127.0.0.1:1"


class FakeEngine:
    """Notes what it is asked to copy, and says that it went well."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, list[int], list[int], list[int]]] = []

    def connect(self, peer: str) -> bool:
        return True

    def forget(self, peer: str) -> None:
        return None

    def read(self, peer: str, local: list[int], remote: list[int], lengths: list[int]) -> bool:
        self.asked.append(("read", local, remote, lengths))
        return True

    def write(self, peer: str, local: list[int], remote: list[int], lengths: list[int]) -> bool:
        self.asked.append(("write", local, remote, lengths))
        return True


@pytest.fixture
def desk(tmp_path: Path) -> FaultDesk:
    return FaultDesk(tmp_path)


@pytest.fixture
def real() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def faulty(desk: FaultDesk, real: FakeEngine) -> FaultyEngine:
    return FaultyEngine(real, OrderBook(desk.directory, "D", 0))


def test_without_an_order_all_is_copied(faulty: FaultyEngine, real: FakeEngine) -> None:
    assert faulty.connect(PEER)
    assert faulty.write(PEER, [1], [2], [3])
    assert faulty.read(PEER, [4], [5], [6])
    assert real.asked == [("write", [1], [2], [3]), ("read", [4], [5], [6])]


def test_a_copy_that_fails_moves_nothing_and_the_next_one_all(
    desk: FaultDesk, faulty: FaultyEngine, real: FakeEngine
) -> None:
    desk.order("D", "copy fails", "read")
    assert faulty.write(PEER, [1], [2], [3])
    assert not faulty.read(PEER, [1], [2], [3])
    assert real.asked == [("write", [1], [2], [3])]
    assert faulty.read(PEER, [1], [2], [3])


def test_a_copy_in_part_moves_the_first_half_and_fails(
    desk: FaultDesk, faulty: FaultyEngine, real: FakeEngine
) -> None:
    desk.order("D", "copy in part", "write")
    assert not faulty.write(PEER, [10, 20, 30], [40, 50, 60], [4, 8, 4])
    assert real.asked == [("write", [10, 20], [40, 50], [4, 4])]


def test_a_copy_that_stalls_is_made_after_a_while(
    desk: FaultDesk, faulty: FaultyEngine, real: FakeEngine
) -> None:
    desk.order("D", "copy stalls", "read", seconds=0.2)
    started = time.monotonic()
    assert faulty.read(PEER, [1], [2], [3])
    assert time.monotonic() - started >= 0.2
    assert real.asked == [("read", [1], [2], [3])]


@pytest.mark.parametrize(
    ("lengths", "half"), [([8], [4]), ([1], []), ([4, 4], [4]), ([2, 2, 8], [2, 2, 2]), ([], [])]
)
def test_half_of_a_batch(lengths: list[int], half: list[int]) -> None:
    assert half_of(lengths) == half
