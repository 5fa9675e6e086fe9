"""The quick exploration finds nothing, and covers both modes with one and two ranks on each side."""

import json

from dfirst.spec.explore.run import explore
from rich.console import Console


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
    sizes = ((1, 1), (2, 1), (1, 2), (2, 2))
    assert shapes == {(mode, *size) for mode in ("blockwise", "layerwise") for size in sizes}
