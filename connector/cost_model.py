"""What copying costs on this host, and whether it is cheaper to gather, send one long run, and scatter.

The three costs are measured once, at the start of a rank, by copying from its own data port: what a
descriptor costs however short it is, what a byte costs in a long run, and what one costs in a local copy.
Over a network a byte may cost more; a descriptor and a local copy cost the same, and these two decide.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .kv_memory import KvMemory, Runs

_ROUNDS = 5
_PIECES, _PIECE_BYTES = 128, 4096
_LEAST_SHARE = 0.5


@dataclass(frozen=True)
class CostModel:
    """Seconds."""

    descriptor: float
    """For each run of a direct copy."""
    byte: float
    """For each byte that is sent."""
    copied_byte: float
    """For each byte that is gathered or scattered."""
    part: float = 400e-6
    """For each part that is gathered or scattered: the question and its answer."""

    def staging_pays(self, runs: int, size: int, part_bytes: int) -> bool:
        """Return whether ``size`` bytes in ``runs`` runs are better staged, in parts of ``part_bytes``.

        One part is gathered and another scattered while a third is sent, but where the processors have enough
        to do with sending, as over TCP, that hides nothing: both are counted in full.
        """
        parts = -(-size // part_bytes)
        direct = runs * self.descriptor + size * self.byte
        staged = parts * (self.descriptor + self.part) + size * self.byte + 2 * size * self.copied_byte
        return staged < direct


def measure(
    read: Callable[[list[int], list[int], list[int]], bool],
    memory: KvMemory,
    address: int,
    size: int,
) -> CostModel | None:
    """Return what copies cost, tried out on ``size`` bytes at ``address``; None if a copy failed.

    ``read`` copies from this rank's own data port: local addresses, remote addresses, lengths.
    """
    half = size // 2
    count = min(_PIECES, half // (2 * _PIECE_BYTES))
    offsets = [2 * _PIECE_BYTES * place for place in range(count)]
    local = [address + offset for offset in offsets]
    remote = [address + half + offset for offset in offsets]
    many = _seconds(lambda: read(local, remote, [_PIECE_BYTES] * count))
    one = _seconds(lambda: read([address], [address + half], [half]))
    starts = address + half + np.array(offsets, dtype=np.int64)
    runs = Runs(starts, np.full(count, _PIECE_BYTES, dtype=np.int64))
    copied = _seconds(lambda: memory.gather(runs, address) is None)
    if many is None or one is None or copied is None:
        return None
    byte = one / half
    # Where something else held up the long run, its bytes seem dear; in a short piece they count for less.
    descriptor = max(many / count - _PIECE_BYTES * byte, _LEAST_SHARE * many / count)
    return CostModel(descriptor, byte, copied / (count * _PIECE_BYTES))


def _seconds(copy: Callable[[], bool]) -> float | None:
    took = []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        if not copy():
            return None
        took.append(time.perf_counter() - started)
    # Others may use the processors too; what is quickest is nearest to the cost itself.
    return min(took)
