"""A short run of `dfirst chaos`; the long one is for whoever has eight minutes more."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT_SECONDS = 900.0
FEWEST_FAULTS = {1.5: 100, 8.0: 500}


@pytest.mark.parametrize("minutes", [1.5, pytest.param(8.0, marks=pytest.mark.full)])
def test_nothing_is_lost_when_everything_breaks(minutes: float, tmp_path: Path) -> None:
    account = tmp_path / "account.json"
    command = [
        sys.executable,
        "-m",
        "dfirst.connector.cli",
        "chaos",
        "--seed",
        "1",
        "--minutes",
        str(minutes),
    ]
    command += ["--work-dir", str(tmp_path / "chaos"), "--json", str(account)]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_SECONDS + minutes * 60, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = json.loads(account.read_text())
    assert report["faults"] >= FEWEST_FAULTS[minutes]
    assert set(report["modes"]) == {"blockwise", "blockwise-d-first", "layerwise"}
    assert not report["never_injected"]
