"""No data port is used again while copies for its last owner may still be under way."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from dfirst.connector import mooncake_engine
from dfirst.connector.fresh_ports import all_fresh, listening_ports

HOLDER = """
import sys
from pathlib import Path
from dfirst.connector import mooncake_engine
from dfirst.connector.fresh_ports import all_fresh, listening_ports
assert all_fresh([7001, 7002], 60.0, keep=True, directory=Path(sys.argv[1]))
print("kept", flush=True)
sys.stdin.read()
"""


def start(directory: Path) -> subprocess.Popen:
    """Start a process that keeps two ports until its input ends."""
    command = [sys.executable, "-c", HOLDER, str(directory)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "kept\n"
    return holder


def fresh(directory: Path, *ports: int, seconds: float = 60.0) -> bool:
    return all_fresh(ports, seconds, keep=False, directory=directory)


def age(directory: Path, seconds: float) -> None:
    """Let all files be older."""
    for path in directory.iterdir():
        os.utime(path, times=(time.time() - seconds, time.time() - seconds))


def test_a_port_is_not_fresh_before_its_last_owner_is_long_gone(tmp_path: Path) -> None:
    holder = start(tmp_path)
    assert not fresh(tmp_path, 7002, 7003)
    assert fresh(tmp_path, 7003)
    age(tmp_path, 3600)
    assert not fresh(tmp_path, 7001), "it lives, however long ago it was started"
    holder.kill()
    holder.wait(10)
    assert not fresh(tmp_path, 7001), "it may have ended a moment ago"
    age(tmp_path, 59)
    assert not fresh(tmp_path, 7001)
    age(tmp_path, 61)
    assert fresh(tmp_path, 7001, 7002)


def test_what_is_only_looked_at_is_not_kept(tmp_path: Path) -> None:
    assert fresh(tmp_path, 7001)
    assert fresh(tmp_path, 7001)


def test_where_nothing_can_be_noted_every_port_is_taken_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    assert fresh(tmp_path / "file", 7001)
    assert "cannot be noted" in caplog.text


def test_a_port_at_which_this_process_listens_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert port in listening_ports()
    assert port not in listening_ports()


def test_an_engine_draws_again_until_its_ports_are_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([False, False, True])
    asked: list[set[int]] = []

    def judge(ports: set[int], seconds: float, keep: bool) -> bool:
        asked.append(ports)
        assert (seconds, keep) == (20 + 5 + 10, True)
        return next(answers)

    monkeypatch.setattr(mooncake_engine, "all_fresh", judge)
    monkeypatch.delenv("MC_TRANSFER_TIMEOUT", raising=False)  # an engine of an earlier test may have set it
    engine = mooncake_engine.MooncakeEngine("127.0.0.1", "tcp", 5, 10, lent_seconds=20)
    assert int(engine.data_address.rpartition(":")[2]) in asked[-1]
    assert len(asked) == 3
    engine.close()
