"""Stretches of memory, and whether what somebody names is wholly within one."""

import numpy as np
import numpy.typing as npt

from ..protocol.copies import Int64Array


class Stretches:
    """Stretches in ascending order; those that touch or overlap are one."""

    def __init__(self, starts: Int64Array, ends: Int64Array) -> None:
        """Take first addresses and the addresses behind the last bytes, in any order."""
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], np.maximum.accumulate(ends[order])
        apart = starts[1:] > ends[:-1]
        self._starts = starts[np.concatenate([np.ones(len(starts[:1]), dtype=np.bool_), apart])]
        self._ends = ends[np.concatenate([apart, np.ones(len(ends[:1]), dtype=np.bool_)])]

    def outside(self, starts: Int64Array, lengths: Int64Array) -> npt.NDArray[np.bool_]:
        """Return which runs are not wholly in one stretch; one of negative length is in none."""
        if not len(self._starts):
            return np.ones(len(starts), dtype=np.bool_)
        place = np.searchsorted(self._starts, starts, side="right") - 1
        # Never the sum of a start and a length: a peer that names both can make it overflow.
        return (place < 0) | (lengths < 0) | (lengths > self._ends[np.maximum(place, 0)] - starts)
