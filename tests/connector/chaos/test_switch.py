"""The switch for faults: off unless asked for, loud when on, and no accident."""

import logging
from pathlib import Path

import pytest
from dfirst.connector.chaos.orders import FaultDesk
from dfirst.connector.chaos.switch import VARIABLE, ordered_faults


def test_it_is_off_in_ordinary_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert ordered_faults("P", 0) is None


def test_a_variable_that_was_left_behind_stops_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "gone"))
    with pytest.raises(ValueError, match=r"no bench has prepared faults in .*gone.*: unset the variable"):
        ordered_faults("P", 0)


def test_it_is_loud_when_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    FaultDesk(tmp_path).close()
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert ordered_faults("P", 0) is not None
    assert "THIS ENGINE GOES WRONG ON PURPOSE: rank 0 of P" in caplog.text
