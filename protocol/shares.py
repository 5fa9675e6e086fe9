"""Which of two engines' shares of the tokens have a token in common, and how many.

A share is ``(token // interleave) % cp_size == cp_rank``. Taken together, the shares of two engines repeat
after ``period`` tokens: who meets whom in a long prompt follows from the layouts alone, in a short one from
its range.
"""

import math
from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .shards import Shard

MAX_WINDOWS = 256
"""How many ranges of short prompts are remembered; the oldest goes first."""


class Split(NamedTuple):
    """How the ranks of an engine share the tokens out between them."""

    cp_size: int
    interleave: int

    @property
    def period(self) -> int:
        """After so many tokens it is the first rank's turn again."""
        return self.cp_size * self.interleave


def split_of(shard: Shard) -> Split:
    """Return how the engine of a shard splits the tokens. Without a split the interleave means nothing."""
    return Split(shard.cp_size, shard.interleave if shard.cp_size > 1 else 1)


class Window:
    """Which pairs of shares have a token of one range of tokens in common."""

    def __init__(self, common: npt.NDArray[np.bool_]) -> None:
        self.name = common.tobytes()
        """Windows of one name are the same."""
        self._common = common

    def common(self, prefill_cp_rank: int, decode_cp_rank: int) -> bool:
        """Return whether these two have a token in common."""
        return bool(self._common[prefill_cp_rank, decode_cp_rank])


class Shares:
    """The shares of a prefill and a decode engine."""

    def __init__(self, prefill: Split, decode: Split) -> None:
        self._prefill = prefill
        self._decode = decode
        self._step = math.gcd(prefill.period, decode.period)
        self.period = math.lcm(prefill.period, decode.period)
        self._counts: dict[int, int] = {}
        self._windows: OrderedDict[tuple[int, int], Window] = OrderedDict()
        self.name = b""
        """A window that is the whole period has no name."""

    def common(self, prefill_cp_rank: int, decode_cp_rank: int) -> bool:
        """Return whether the two shares have a token in common anywhere: in one period, so in each."""
        return self.count(prefill_cp_rank, decode_cp_rank) > 0

    def count(self, prefill_cp_rank: int, decode_cp_rank: int) -> int:
        """Return how many tokens of a period the two shares have in common.

        The distances between a run of one and a run of the other are all the numbers that leave the same
        remainder as the first such distance by the greatest common divisor of the two periods, each once in
        a period of both; a distance decides how long the two runs overlap.
        """
        prefill, decode = self._prefill, self._decode
        apart = prefill_cp_rank * prefill.interleave - decode_cp_rank * decode.interleave
        apart %= self._step
        found = self._counts.get(apart)
        if found is None:
            first = 1 - prefill.interleave
            first += (apart - first) % self._step
            distances = np.arange(first, decode.interleave, self._step, dtype=np.int64)
            ends = np.minimum(distances + prefill.interleave, decode.interleave)
            found = self._counts[apart] = int((ends - np.maximum(distances, 0)).sum())
        return found

    def window(self, tokens: range) -> "Window | Shares":
        """Return who has tokens of a range in common: all shares that ever have, if it is a period long."""
        if len(tokens) >= self.period:
            return self
        key = (tokens.start % self.period, len(tokens))
        found = self._windows.get(key)
        if found is None:
            found = self._windows[key] = self._look(range(key[0], key[0] + key[1]))
            if len(self._windows) > MAX_WINDOWS:
                self._windows.popitem(last=False)
        return found

    def _look(self, tokens: range) -> Window:
        # Within a range the pair of shares changes only where a run of one of them ends.
        changes = [np.array([tokens.start], dtype=np.int64)]
        for split in (self._prefill, self._decode):
            if split.cp_size > 1:
                first = (tokens.start // split.interleave + 1) * split.interleave
                changes.append(np.arange(first, tokens.stop, split.interleave, dtype=np.int64))
        places = np.concatenate(changes)
        common = np.zeros((self._prefill.cp_size, self._decode.cp_size), dtype=np.bool_)
        common[
            places // self._prefill.interleave % self._prefill.cp_size,
            places // self._decode.interleave % self._decode.cp_size,
        ] = True
        return Window(common)
