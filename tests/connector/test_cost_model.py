"""What copies cost is measured at the start, and decides which way is taken."""

import time

import pytest
from dfirst.connector.cost_model import CostModel, measure
from dfirst.connector.kv_memory import Runs

MIB = 1 << 20
LOOPBACK = CostModel(descriptor=14e-6, byte=0.37e-9, copied_byte=0.13e-9)
FAST = CostModel(descriptor=0.3e-6, byte=0.02e-9, copied_byte=0.001e-9, part=20e-6)


class FakeMemory:
    """Gathers nothing, and takes its time for it."""

    def __init__(self, byte_seconds: float) -> None:
        self._byte_seconds = byte_seconds

    def gather(self, runs: Runs, _address: int) -> None:
        time.sleep(self._byte_seconds * runs.bytes)

    def scatter(self, runs: Runs, address: int) -> None:
        self.gather(runs, address)


@pytest.mark.parametrize(
    ("costs", "runs", "size", "staged"),
    [
        (LOOPBACK, 1, 64 * MIB, False),
        (LOOPBACK, 64, 64 * MIB, False),
        (LOOPBACK, 16_384, 64 * MIB, True),
        (LOOPBACK, 131_072, 64 * MIB, True),
        (LOOPBACK, 3_641, 64 * MIB, True),
        (LOOPBACK, 1_024, 64 * MIB, False),
        (LOOPBACK, 3, 4_096, False),
        (LOOPBACK, 64, 64 * 512, True),
        (FAST, 1_024, 64 * MIB, False),
        (FAST, 131_072, 64 * MIB, True),
    ],
)
def test_many_short_runs_are_staged_and_few_long_ones_are_not(costs, runs, size, staged):
    assert costs.staging_pays(runs, size, 4 * MIB) is staged


def test_the_costs_are_those_that_were_seen():
    def read(_local: list[int], _remote: list[int], lengths: list[int]) -> bool:
        time.sleep(len(lengths) * 100e-6 + sum(lengths) * 2e-9)
        return True

    made = measure(read, FakeMemory(20e-9), 0, 8 * MIB)
    assert made is not None
    assert made.descriptor == pytest.approx(100e-6, rel=0.5)
    assert made.byte == pytest.approx(2e-9, rel=1.0)
    assert made.copied_byte == pytest.approx(20e-9, rel=1.0)


def test_a_long_run_that_was_held_up_does_not_hide_what_a_descriptor_costs():
    def read(_local: list[int], _remote: list[int], lengths: list[int]) -> bool:
        time.sleep(0.2 if len(lengths) == 1 else len(lengths) * 100e-6)
        return True

    made = measure(read, FakeMemory(0.0), 0, 8 * MIB)
    assert made is not None
    assert made.descriptor >= 50e-6


def test_where_a_copy_fails_nothing_is_known():
    assert measure(lambda *_columns: False, FakeMemory(0.0), 0, 8 * MIB) is None
