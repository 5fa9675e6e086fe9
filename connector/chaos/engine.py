"""A Mooncake engine whose copies fail, stand still, or arrive in part."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from ..mooncake_engine import Batch
from .orders import COPY_FAULTS, OrderBook

logger = logging.getLogger(__name__)

Copy = Callable[[str, list[int], list[int], list[int]], bool]


class CopyEngine(Protocol):
    """What is wrapped: the part of the engine that the data path uses."""

    def connect(self, peer: str, /) -> bool: ...
    def read(self, peer: str, local: list[int], remote: list[int], lengths: list[int], /) -> bool: ...
    def write(self, peer: str, local: list[int], remote: list[int], lengths: list[int], /) -> bool: ...
    def forget(self, peer: str, /) -> None: ...


class FaultyEngine:
    """Like the engine itself, every call returns only when no byte of it can move any more."""

    def __init__(self, engine: CopyEngine, book: OrderBook) -> None:
        self._engine = engine
        self._book = book

    def connect(self, peer: str) -> bool:
        return self._engine.connect(peer)

    def forget(self, peer: str) -> None:
        self._engine.forget(peer)

    def read(self, peer: str, local: list[int], remote: list[int], lengths: list[int]) -> bool:
        return self._copy("read", self._engine.read, peer, local, remote, lengths)

    def write(self, peer: str, local: list[int], remote: list[int], lengths: list[int]) -> bool:
        return self._copy("write", self._engine.write, peer, local, remote, lengths)

    def begin(
        self, direction: str, peer: str, local: list[int], remote: list[int], lengths: list[int]
    ) -> Batch:
        """Nothing moves any more when this returns: the leave to copy is fresh now (rule R3)."""
        copy = self.read if direction == "read" else self.write
        copied = copy(peer, local, remote, lengths)
        return Batch(direction, peer, (local, remote, lengths), time.perf_counter(), copied=copied)

    def finish(self, batch: Batch) -> bool:
        return bool(batch.copied)

    def _copy(
        self, direction: str, copy: Copy, peer: str, local: list[int], remote: list[int], lengths: list[int]
    ) -> bool:
        order = self._book.take(COPY_FAULTS, direction)
        if order is None:
            return copy(peer, local, remote, lengths)
        if order.fault == "copy fails":
            return False
        if order.fault == "copy stalls":
            time.sleep(order.seconds)
            return copy(peer, local, remote, lengths)
        part = half_of(lengths)
        copy(peer, local[: len(part)], remote[: len(part)], part)
        return False


def half_of(lengths: Sequence[int]) -> list[int]:
    """Return the first half of the bytes of a batch: whole runs, and the beginning of the one it ends in."""
    left = sum(lengths) // 2
    part: list[int] = []
    for length in lengths:
        if left <= 0:
            break
        part.append(min(length, left))
        left -= length
    return part
