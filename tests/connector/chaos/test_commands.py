"""`dfirst chaos` says what it found, and ends with 1 if not all is well."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from dfirst.connector import host
from dfirst.connector.chaos import run
from dfirst.connector.chaos.accounts import ChaosReport
from dfirst.connector.chaos.run import ChaosSettings
from dfirst.connector.cli import app
from dfirst.connector.launch import LaunchError
from typer.testing import CliRunner, Result

from .reports import CLEAN

Give = Callable[..., Result]


@pytest.fixture
def give(monkeypatch: pytest.MonkeyPatch) -> Give:
    """Run the command with this for what a run comes to."""
    monkeypatch.setattr(host, "vllm_is_installed", lambda: True)

    def given(outcome: ChaosReport | Exception, *arguments: str) -> Result:
        def fake_run(settings: ChaosSettings, console: object) -> ChaosReport:
            assert (settings.seed, settings.minutes, settings.work_dir) == (3, 2.0, Path("here"))
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        monkeypatch.setattr(run, "run_chaos", fake_run)
        options = ["chaos", "--seed", "3", "--minutes", "2", "--work-dir", "here"]
        return CliRunner().invoke(app, [*options, *arguments])

    return given


def test_all_is_well(give: Give) -> None:
    ended = give(CLEAN)
    assert ended.exit_code == 0, ended.output
    for line in (
        "requests: 40 (40 layerwise; 40 right)",
        "wrong answers: 0",
        "requests without an answer: 0",
        "blocks still held on prefill: 0 (0.2 s after the end)",
        "traces refused: 0 (4 files)",
        "never came to pass: copy stalls",
        "all is well",
    ):
        assert line in ended.output
    assert "message lost" in ended.output


def test_not_all_is_well(give: Give) -> None:
    held = ["decode holds 3 blocks 30 s after the end"]
    ended = give(msgspec.structs.replace(CLEAN, findings=held))
    assert ended.exit_code == 1
    assert "✗ decode holds 3 blocks 30 s after the end" in ended.output
    assert "not all is well" in ended.output


def test_an_engine_that_does_not_start_is_said_in_a_sentence(give: Give) -> None:
    ended = give(LaunchError("the prefill engine ended with exit code 1"))
    assert ended.exit_code == 1
    assert "error: the prefill engine ended with exit code 1" in ended.output
