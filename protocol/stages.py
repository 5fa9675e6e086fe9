"""Staging as the two ranks of a leg speak of it: slots that are lent, and lists of runs on the wire."""

from collections.abc import Sequence

import msgspec
import numpy as np

from .tokens import Int64Array

MAX_RUNS = 65_536
"""Most runs in one part."""


class Slot(msgspec.Struct, frozen=True):
    """Staging memory that is lent to one lease at a time: ``places`` stretches of ``place_bytes``, side by
    side.
    """

    address: int
    places: int
    place_bytes: int

    def place(self, number: int) -> int:
        """Return the address of a place."""
        return self.address + number * self.place_bytes


class Slots:
    """The slots that are free."""

    def __init__(self, slots: Sequence[Slot] = ()) -> None:
        self._free = list(slots)

    def next(self) -> Slot | None:
        """Return the slot that ``take`` would give; None if all are lent."""
        return self._free[-1] if self._free else None

    def take(self) -> Slot:
        """Lend a slot."""
        return self._free.pop()

    def give_back(self, slot: Slot) -> None:
        """Nothing touches this slot any more."""
        self._free.append(slot)


def pack(column: Int64Array) -> bytes:
    """Return numbers as they travel: 8 bytes each, little-endian; a column of equal ones as its first."""
    if len(column) > 1 and int(column.min()) == int(column.max()):
        column = column[:1]
    return column.astype("<i8").tobytes()


def unpack(starts: bytes, lengths: bytes) -> tuple[Int64Array, Int64Array]:
    """Return the two columns of a list of runs. Raises ``ValueError`` if they are none."""
    if len(starts) % 8 or len(lengths) % 8:
        raise ValueError(
            f"a list of runs of {len(starts)} and {len(lengths)} bytes is not one of 8-byte numbers"
        )
    first = np.frombuffer(starts, dtype="<i8").astype(np.int64)
    second = np.frombuffer(lengths, dtype="<i8").astype(np.int64)
    if len(second) == 1 and len(first) != 1:
        second = np.repeat(second, len(first))
    if len(first) != len(second) or len(first) > MAX_RUNS:
        raise ValueError(
            f"{len(first)} addresses with {len(second)} lengths are no list of at most {MAX_RUNS} runs"
        )
    return first, second


def total_bytes(starts: bytes, lengths: bytes) -> int:
    """Return the bytes of a packed list of runs; a bad list raises ``ValueError``."""
    first, second = unpack(starts, lengths)
    if not len(first):
        return 0
    if int(second.min()) < 1 or int(second.max()) > 1 << 40:
        raise ValueError(f"a run of {int(second.min())} bytes is none")
    return int(second.sum())
