"""The engine alone: large contiguous copies, as fast as it goes."""

import time
from typing import Any

import numpy as np

from ..mooncake_engine import MAX_DESCRIPTORS, MAX_TCP_RUN_BYTES, MooncakeEngine

PIECES = (1 << 20, 4 << 20, 16 << 20)
"""Lengths that are tried; the fastest is compared with."""
_HOST, _TIMEOUT_SECONDS = "127.0.0.1", 20.0


class Reference:
    """An engine with all of a process's memory, used by its plain synchronous calls."""

    def __init__(self, memory: "np.ndarray[Any, np.dtype[np.uint8]]") -> None:
        self._memory = memory
        self._server = MooncakeEngine(_HOST, "tcp", _TIMEOUT_SECONDS)
        self._server.register([(memory.ctypes.data, memory.nbytes)])
        self._engine = self._server.plain()
        self._untouched = self._server.plain()
        """For short pieces: a connection that has carried long ones stays slower."""
        self.data_address = self._server.data_address

    def seconds(self, direction: str, peer: str, remote: int, size: int, piece: int) -> float:
        """Copy ``size`` bytes from the beginning of both memories on; return how long it took."""
        engine = self._untouched if piece <= MAX_TCP_RUN_BYTES else self._engine
        copy = getattr(engine, f"batch_transfer_sync_{direction}")
        lengths = [min(piece, size - start) for start in range(0, size, piece)]
        starts = list(range(0, size, piece))
        here = self._memory.ctypes.data
        began = time.perf_counter()
        for low in range(0, len(starts), MAX_DESCRIPTORS):
            part = slice(low, low + MAX_DESCRIPTORS)
            local = [here + start for start in starts[part]]
            there = [remote + start for start in starts[part]]
            if copy(peer, local, there, lengths[part]) != 0:
                raise RuntimeError(f"the engine alone could not {direction} {size} bytes")
        return time.perf_counter() - began
