"""`dfirst conform`: what it says and how it ends."""

import json
import os
from pathlib import Path

import pytest
from dfirst.connector.cli import app
from typer.testing import CliRunner, Result

from .recordings import pull


def conform(*words: str) -> Result:
    return CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}).invoke(app, ["conform", *words])


def test_it_teaches() -> None:
    shown = conform("--help").output
    for word in (
        "TRACE...",
        "not those of directories in them",
        "--running",
        "--json",
        "dfirst conform .demo/traces",
    ):
        assert word in shown


def test_a_trace_that_conforms_is_counted(tmp_path: Path) -> None:
    pull(tmp_path / "traces")
    result = conform(str(tmp_path / "traces"), "--json", str(tmp_path / "found.json"))
    assert result.exit_code == 0
    found = json.loads((tmp_path / "found.json").read_text())
    seen = f"3 files, {found['lines']} lines, 1 transfer, {found['messages']} messages"
    assert f"conforms to the spec: {seen}" in result.stdout
    assert found["lines"] > found["messages"] > 20
    assert (found["files"], found["transfers"], found["violation"]) == (3, 1, None)


def test_the_first_line_that_breaks_a_rule_is_named_with_the_rule(tmp_path: Path) -> None:
    pull(tmp_path / "traces")
    file = next((tmp_path / "traces").glob("P-*"))
    lines = file.read_text().splitlines()
    place = next(number for number, line in enumerate(lines) if '"report"' in line)
    file.write_text("\n".join([*lines[: place + 1], *lines[place:]]) + "\n")
    result = conform(str(tmp_path / "traces"), "--json", str(tmp_path / "found.json"))
    assert result.exit_code == 1
    assert (
        f"{file}, line {place + 2}: vLLM took the report 'sent': is released a second time" in result.stderr
    )
    assert (
        "(transfer t-1). Rule S3: on every rank, a transfer's blocks are released exactly once"
        in result.stderr
    )
    assert json.loads((tmp_path / "found.json").read_text())["violation"]["rule"] == "S3"


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    result = conform(str(tmp_path / "none"))
    assert result.exit_code == 2
    assert f"cannot read the traces: {tmp_path / 'none'}: No such file or directory" in result.stderr


def test_an_empty_directory_is_no_trace(tmp_path: Path) -> None:
    result = conform(str(tmp_path))
    assert result.exit_code == 2
    assert result.stderr == f"error: there is no trace: {tmp_path} holds no file *.jsonl\n"


def test_a_directory_of_directories_says_that_they_are_not_looked_into(tmp_path: Path) -> None:
    pull(tmp_path / "inner")
    result = conform(str(tmp_path))
    assert result.exit_code == 2
    assert f"directories in it are not looked into: name them, as in {tmp_path / 'inner'}" in result.stderr


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "is empty"),
        (b"\x7fELF\xff\x00", "is not text"),
        (b"{}", "has no whole line, which would end with a newline"),
        (b"\n \n", "has no whole line"),
    ],
)
def test_a_file_without_a_line_says_what_it_is_not(tmp_path: Path, content: bytes, what: str) -> None:
    file = tmp_path / "some.jsonl"
    file.write_bytes(content)
    result = conform(str(file))
    assert result.exit_code == 2
    assert f"there is no trace: {file} {what}" in result.stderr
    assert f"no file *.jsonl in {tmp_path} has a whole line" in conform(str(tmp_path)).stderr


def test_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    result = conform(str(tmp_path / "fifo"))
    assert result.exit_code == 2
    assert f"{tmp_path / 'fifo'}: it is no regular file" in result.stderr


def test_a_trace_without_a_transfer_is_warned_of(tmp_path: Path) -> None:
    pull(tmp_path)
    file = next(tmp_path.glob("P-*"))
    alone = tmp_path / "alone.jsonl"
    alone.write_text(file.read_text().splitlines()[0] + "\n")
    result = conform(str(alone))
    assert result.exit_code == 0
    assert result.stderr.startswith("warning: what was looked at holds no transfer")
    assert conform(str(file)).stderr == ""


def test_a_file_that_is_named_twice_is_looked_at_once(tmp_path: Path) -> None:
    pull(tmp_path)
    (tmp_path / "folder.jsonl").mkdir()
    file = next(tmp_path.glob("P-*"))
    result = conform(str(tmp_path), str(file), str(tmp_path))
    assert result.exit_code == 0
    assert "3 files, " in result.stdout


def test_a_json_file_is_written_with_its_directory(tmp_path: Path) -> None:
    pull(tmp_path)
    assert conform(str(tmp_path), "--json", str(tmp_path / "new" / "found.json")).exit_code == 0
    assert json.loads((tmp_path / "new" / "found.json").read_text())["violation"] is None


def test_a_json_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    pull(tmp_path)
    (tmp_path / "file").touch()
    result = conform(str(tmp_path), "--json", str(tmp_path / "file" / "found.json"))
    assert result.exit_code == 2
    assert f"--json: {tmp_path}/file/found.json cannot be written: Not a directory" in result.stderr


def test_engines_cannot_both_run_and_have_ended(tmp_path: Path) -> None:
    pull(tmp_path)
    result = conform(str(tmp_path), "--running", "--ended")
    assert result.exit_code == 2
    assert "--running" in result.stderr
    assert "--ended" in result.stderr
