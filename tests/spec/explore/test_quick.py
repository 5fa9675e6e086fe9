"""The quick exploration finds nothing, and covers both modes with one and two ranks on each side."""

import json

import pytest
from dfirst.spec.explore.configuration import Configuration
from dfirst.spec.explore.run import explore, explored
from dfirst.spec.explore.worlds import QUICK
from rich.console import Console

SMALL = [one for one in QUICK if one.faults == 1 and one.orderly]
"""The worlds with the fewest orders of things."""
SHAPES = {(mode, *sizes) for mode in ("blockwise", "layerwise") for sizes in ((1, 1), (2, 1), (1, 2), (2, 2))}


@pytest.mark.parametrize("configuration", SMALL, ids=lambda one: one.name)
def test_every_interleaving_of_a_small_world_keeps_every_rule(configuration: Configuration) -> None:
    result = explored(configuration)
    assert result.found is None, str(result.found)
    assert result.complete
    assert result.states > 500


def test_the_small_worlds_have_every_shape() -> None:
    assert {(one.mode, one.prefill_ranks, one.decode_ranks) for one in SMALL} == SHAPES


@pytest.mark.slow
def test_every_interleaving_of_few_faults_keeps_every_rule(tmp_path):
    json_file = tmp_path / "explored.json"
    clean = explore(
        quick=True, name=None, json_file=json_file, scenarios=tmp_path, console=Console(quiet=True)
    )
    found = json.loads(json_file.read_text())
    broken = [row for row in found["configurations"] if row["violation"] or not row["complete"]]
    assert clean, broken
    assert found["violations"] == 0
    assert found["states"] > 50_000
    shapes = {(row["mode"], row["prefill_ranks"], row["decode_ranks"]) for row in found["configurations"]}
    assert shapes == SHAPES
