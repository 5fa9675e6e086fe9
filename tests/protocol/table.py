"""The pairs of layouts that must work, as engines of this directory."""

import pytest

from tests.plan.table import BLOCK_SIZE
from tests.plan.table import PAIRS as ASKED_FOR

from .layouts import Engine


def _engine(heads: int, sizes: tuple[int, int, int]) -> Engine:
    tp, pcp, dcp = sizes
    return Engine(heads=heads, tp=tp, pcp=pcp, dcp=dcp, convention="a", block_size=BLOCK_SIZE)


PAIRS = [
    pytest.param(_engine(pair.heads, pair.prefill), _engine(pair.heads, pair.decode), id=str(pair))
    for pair in ASKED_FOR
]
