"""Gather and scatter: scattered runs of the KV caches to and from one long run of a staging buffer.

A list of runs is cut into rows of one length, the largest that divides all its addresses and lengths, and the
rows are moved by one index operation on the device that holds the caches: numpy's on the host, torch's on an
accelerator. The loops here go over the tensors that a list touches, never over blocks.
"""

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from ..protocol.copies import Int64Array
from ..protocol.tokens import group_starts

if TYPE_CHECKING:
    import torch

UInt8Array = npt.NDArray[np.uint8]
LEAST_ROW_BYTES = 32
"""Below this a list would be mostly index: it is copied directly."""


@dataclass(frozen=True, eq=False)
class Runs:
    """Runs of one rank's memory, in the order in which they follow each other in a staging buffer."""

    starts: Int64Array
    """Addresses."""
    lengths: Int64Array
    """Bytes."""

    @property
    def bytes(self) -> int:
        return int(self.lengths.sum())


def joined(starts: Int64Array, lengths: Int64Array) -> Runs:
    """Return the runs with neighbours made one, in the order given."""
    if len(starts) < 2:
        return Runs(starts, lengths)
    breaks = starts[:-1] + lengths[:-1] != starts[1:]
    if bool(breaks.all()):
        return Runs(starts, lengths)
    firsts = group_starts(breaks)
    return Runs(starts[firsts], np.add.reduceat(lengths, firsts))


class KvMemory(Protocol):
    """Registered memory of this rank. Both methods return when the bytes are where they belong.

    Runs that leave the memory, or that no row length from ``LEAST_ROW_BYTES`` on divides, raise
    ``ValueError`` before a byte has moved.
    """

    def gather(self, runs: Runs, address: int) -> None:
        """Copy the runs, one behind the other, to ``address``."""

    def scatter(self, runs: Runs, address: int) -> None:
        """Copy what lies at ``address``, one run behind the other, to the runs."""


@dataclass(frozen=True, eq=False)
class _Segment:
    """Neighbours in the buffer that lie in one tensor, as rows of that tensor from its byte ``first`` on."""

    tensor: int
    first: int
    row_bytes: int
    rows: Int64Array
    offset: int
    """Where the first row lies in the buffer."""


class _Extents:
    """The tensors' places in the address space."""

    def __init__(self, ranges: Sequence[tuple[int, int]]) -> None:
        ordered = sorted(range(len(ranges)), key=lambda number: ranges[number][0])
        self._order = np.array(ordered, dtype=np.int64)
        self._starts = np.array([ranges[number][0] for number in ordered], dtype=np.int64)
        self._ends = self._starts + np.array([ranges[number][1] for number in ordered], dtype=np.int64)

    def segments(self, runs: Runs) -> list[_Segment]:
        """Return the runs as rows. Raises ``ValueError`` as ``KvMemory`` says."""
        if not len(runs.starts):
            return []
        place = np.searchsorted(self._starts, runs.starts, side="right") - 1
        inside = (place >= 0) & (runs.lengths > 0)
        # Never the sum of the two: a peer names the runs, and could make it overflow.
        inside &= runs.lengths <= self._ends[np.maximum(place, 0)] - runs.starts
        if not inside.all():
            wrong = int(np.flatnonzero(~inside)[0])
            raise ValueError(
                f"a run of {runs.lengths[wrong]} bytes at {runs.starts[wrong]:#x} is not in the registered "
                "memory"
            )
        cuts = [*group_starts(place[1:] != place[:-1]).tolist(), len(place)]
        offsets = np.cumsum(runs.lengths) - runs.lengths
        return [
            self._segment(int(place[low]), runs.starts[low:high], runs.lengths[low:high], int(offsets[low]))
            for low, high in pairwise(cuts)
        ]

    def find(self, address: int, size: int) -> tuple[int, int]:
        """Return the tensor that holds a stretch of memory, and where in it the stretch begins."""
        place = int(np.searchsorted(self._starts, address, side="right")) - 1
        if place < 0 or address + size > int(self._ends[place]):
            raise ValueError(f"{size} bytes at {address:#x} are not in the registered memory")
        return int(self._order[place]), address - int(self._starts[place])

    def _segment(self, place: int, starts: Int64Array, lengths: Int64Array, offset: int) -> _Segment:
        first = int(starts.min())
        row = _row_bytes(starts - first, lengths)
        if row < LEAST_ROW_BYTES:
            raise ValueError(
                f"runs at multiples of {row} bytes are not gathered; {LEAST_ROW_BYTES} are needed"
            )
        return _Segment(
            int(self._order[place]),
            first - int(self._starts[place]),
            row,
            _rows((starts - first) // row, lengths // row),
            offset,
        )


def _row_bytes(offsets: Int64Array, lengths: Int64Array) -> int:
    """Return the largest number that divides all of them."""
    length = int(lengths[0])
    one_length = int(lengths.min()) == int(lengths.max())
    # A power of two, and the runs are at multiples of it: the usual case, found in a tenth of the time.
    if one_length and length & (length - 1) == 0 and not np.bitwise_or.reduce(offsets) & (length - 1):
        return length
    return int(np.gcd(np.gcd.reduce(offsets), np.gcd.reduce(lengths)))


def _rows(firsts: Int64Array, counts: Int64Array) -> Int64Array:
    """Return the numbers of all rows of runs that begin at ``firsts`` and have ``counts`` rows each."""
    if int(counts.min()) == int(counts.max()):
        return (firsts[:, None] + np.arange(int(counts[0]), dtype=np.int64)).ravel()
    ends = np.cumsum(counts)
    return np.arange(int(ends[-1]), dtype=np.int64) + np.repeat(firsts - (ends - counts), counts)


class HostMemory:
    """Caches in this process's own memory."""

    def __init__(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Take the (address, length) ranges that were registered; they must outlive this object."""
        self._extents = _Extents(ranges)
        self._arrays = [_bytes_at(address, length) for address, length in ranges]

    def gather(self, runs: Runs, address: int) -> None:
        for rows, segment, buffer in self._pairs(runs, address):
            np.take(rows, segment.rows, axis=0, out=buffer, mode="clip")

    def scatter(self, runs: Runs, address: int) -> None:
        for rows, segment, buffer in self._pairs(runs, address):
            rows[segment.rows] = buffer

    def _pairs(self, runs: Runs, address: int) -> Iterator[tuple[UInt8Array, _Segment, UInt8Array]]:
        for segment in self._extents.segments(runs):
            array = self._arrays[segment.tensor][segment.first :]
            count = len(array) // segment.row_bytes
            rows = array[: count * segment.row_bytes].reshape(count, segment.row_bytes)
            size = len(segment.rows) * segment.row_bytes
            tensor, first = self._extents.find(address + segment.offset, size)
            buffer = self._arrays[tensor][first : first + size].reshape(-1, segment.row_bytes)
            yield rows, segment, buffer


class DeviceMemory:
    """Caches on an accelerator, as flat byte tensors; the staging buffer is one of them."""

    def __init__(self, tensors: Sequence["torch.Tensor"]) -> None:
        """Take one-dimensional ``uint8`` tensors on one device."""
        self._tensors = list(tensors)
        self._extents = _Extents([(tensor.data_ptr(), tensor.numel()) for tensor in self._tensors])

    def gather(self, runs: Runs, address: int) -> None:
        import torch

        for rows, index, buffer in self._pairs(runs, address):
            torch.index_select(rows, 0, index, out=buffer)
        self._wait()

    def scatter(self, runs: Runs, address: int) -> None:
        for rows, index, buffer in self._pairs(runs, address):
            rows.index_copy_(0, index, buffer)
        self._wait()

    def _pairs(
        self, runs: Runs, address: int
    ) -> Iterator[tuple["torch.Tensor", "torch.Tensor", "torch.Tensor"]]:
        import torch

        for segment in self._extents.segments(runs):
            flat = self._tensors[segment.tensor][segment.first :]
            count = flat.numel() // segment.row_bytes
            rows = flat[: count * segment.row_bytes].view(count, segment.row_bytes)
            index = torch.from_numpy(segment.rows).to(flat.device)
            size = len(segment.rows) * segment.row_bytes
            tensor, first = self._extents.find(address + segment.offset, size)
            buffer = self._tensors[tensor][first : first + size].view(-1, segment.row_bytes)
            yield rows, index, buffer

    def _wait(self) -> None:
        """The device works behind the host's back, and peers read and write without asking it."""
        import torch

        device = self._tensors[0].device
        if device.type != "cpu":
            event = torch.Event(device.type)
            event.record()
            event.synchronize()


def _bytes_at(address: int, length: int) -> UInt8Array:
    return np.frombuffer((ctypes.c_uint8 * length).from_address(address), dtype=np.uint8)
