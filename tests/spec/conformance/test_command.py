"""`dfirst conform`: what it says and how it ends."""

import json
from pathlib import Path

from dfirst.connector.cli import app
from typer.testing import CliRunner, Result

from .recordings import pull


def conform(*words: str) -> Result:
    return CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}).invoke(app, ["conform", *words])


def test_it_teaches() -> None:
    shown = conform("--help").output
    for word in ("TRACE...", "--running", "--json", "dfirst conform .demo/traces"):
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
    assert f"there is no trace in {tmp_path}" in result.stderr


def test_a_file_that_is_named_twice_is_looked_at_once(tmp_path: Path) -> None:
    pull(tmp_path)
    (tmp_path / "folder.jsonl").mkdir()
    file = next(tmp_path.glob("P-*"))
    result = conform(str(tmp_path), str(file), str(tmp_path))
    assert result.exit_code == 0
    assert "3 files, " in result.stdout


def test_a_json_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    pull(tmp_path)
    result = conform(str(tmp_path), "--json", str(tmp_path / "missing" / "found.json"))
    assert result.exit_code == 2
    assert "--json" in result.stderr
    assert "missing/found.json cannot be written: No such file or directory" in result.stderr


def test_engines_cannot_both_run_and_have_ended(tmp_path: Path) -> None:
    pull(tmp_path)
    result = conform(str(tmp_path), "--running", "--ended")
    assert result.exit_code == 2
    assert "--running" in result.stderr
    assert "--ended" in result.stderr
