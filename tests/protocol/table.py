"""The pairs of layouts that must work: in use by those who run prefill and decode apart."""

import pytest

from .layouts import Engine

BLOCK_SIZE = 4

_ROWS = [
    # model, KV heads, prefill and decode as TP, PCP, DCP (of one data-parallel replica)
    ("MLA", 1, (8, 1, 1), (8, 1, 1)),
    ("MLA", 1, (8, 2, 8), (8, 1, 1)),
    ("MLA", 1, (8, 2, 8), (8, 1, 4)),
    ("MLA", 1, (8, 2, 4), (4, 1, 2)),
    ("MLA", 1, (8, 2, 2), (4, 1, 4)),
    ("MLA", 1, (8, 2, 1), (4, 1, 2)),
    ("GQA", 4, (8, 1, 1), (8, 1, 1)),
    ("GQA", 8, (8, 1, 1), (8, 1, 1)),
    ("GQA", 4, (8, 2, 2), (8, 1, 1)),
    ("GQA", 4, (8, 2, 2), (8, 1, 2)),
    ("GQA", 4, (8, 2, 2), (4, 1, 1)),
    ("GQA", 4, (16, 1, 2), (8, 1, 2)),
]


def _engine(heads: int, sizes: tuple[int, int, int]) -> Engine:
    tp, pcp, dcp = sizes
    return Engine(heads=heads, tp=tp, pcp=pcp, dcp=dcp, convention="a", block_size=BLOCK_SIZE)


def _words(sizes: tuple[int, int, int]) -> str:
    return "TP{} PCP{} DCP{}".format(*sizes)


PAIRS = [
    pytest.param(
        _engine(heads, prefill),
        _engine(heads, decode),
        id=f"{model} {heads}: {_words(prefill)} to {_words(decode)}",
    )
    for model, heads, prefill, decode in _ROWS
]
