"""Every row of the spec can happen: each is in the table of tests, and its test takes it (rule F2)."""

import pytest
from dfirst.protocol.specification import load_machine, machine_names

from . import (
    test_blockwise_decode,
    test_blockwise_prefill,
    test_layerwise_decode,
    test_layerwise_prefill,
    test_mover_leg,
    test_owner_leg,
    test_scheduler,
    test_staging,
)
from .rows import ROWS

TABLES = (
    test_blockwise_decode,
    test_blockwise_prefill,
    test_layerwise_decode,
    test_layerwise_prefill,
    test_mover_leg,
    test_owner_leg,
    test_scheduler,
    test_staging,
)
"""Importing them fills the table."""


def rows_of(machine: str) -> list[str]:
    return [row.id for row in load_machine(machine).transitions]


@pytest.mark.parametrize("machine", machine_names())
def test_every_row_is_taken_by_a_test(machine):
    untested = [row for row in rows_of(machine) if row not in ROWS]
    assert not untested, f"no test takes {', '.join(untested)}"


def test_every_test_in_the_table_takes_its_rows():
    for scenario in dict.fromkeys(ROWS.values()):
        scenario()


def test_the_table_names_no_row_that_is_gone():
    known = {row for machine in machine_names() for row in rows_of(machine)}
    assert set(ROWS) <= known


def test_no_two_machines_share_the_name_of_a_row():
    names = [row for machine in machine_names() for row in rows_of(machine)]
    assert len(names) == len(set(names))
