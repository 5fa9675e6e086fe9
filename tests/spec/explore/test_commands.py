"""``dfirst explore`` and ``dfirst simulate``: what they refuse, and in which words."""

from io import StringIO
from pathlib import Path

import pytest
from dfirst.connector.cli import app
from dfirst.spec.explore import run
from dfirst.spec.explore.search import Result
from dfirst.spec.explore.worlds import FULL, QUICK
from rich.console import Console
from typer.testing import CliRunner


def dfirst(*words: str):
    return CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}).invoke(app, words)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--only", "PB21"], ["--only", "give --mutants too"]),
        (["--mutants", "--config", "pull-1x1", "--quick"], ["--quick and --config", "--mutants"]),
        (["--mutants", "--replay", "some.txt"], ["--replay", "--mutants"]),
        (["--replay", "some.txt", "--json", "found.json"], ["--json", "--replay"]),
        (["--json", "/dev/null/found.json"], ["--json", "/dev/null/found.json"]),
        (["--json", "/"], ["--json", "cannot be written"]),
        (["--mutants", "--json", "/dev/null/found.json"], ["--json", "/dev/null/found.json"]),
        (["--config", "nonsense"], ["'nonsense'", "pull-1x1"]),
        (["--mutants", "--only", "nonsense"], ["'nonsense'"]),
        (["--replay", "/dev/null/some.txt"], ["--replay: /dev/null/some.txt", "Not a directory"]),
        (["--replay", "nofile"], ["--replay: nofile: No such file"]),
        (["--mutants", "--json", "/dev/null"], ["--json: /dev/null: it is no regular file"]),
        (["--replay", "/dev/null"], ["--replay: /dev/null: it is no regular file"]),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_explored(words: list[str], named: list[str]):
    result = dfirst("explore", *words)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    for word in named:
        assert word in result.stderr


@pytest.mark.parametrize("content", [b"\xa2\xff", b"nothing\n", b"configuration: pull-1x1\n\nnonsense\n"])
def test_a_file_that_is_no_scenario_is_refused(tmp_path: Path, content: bytes):
    file = tmp_path / "some.txt"
    file.write_bytes(content)
    result = dfirst("explore", "--replay", str(file))
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert str(file) in result.stderr


def test_a_path_that_breaks_nothing_says_so(tmp_path: Path):
    file = tmp_path / "some.txt"
    file.write_text("configuration: pull-1x1\n\n")
    result = dfirst("explore", "--replay", str(file))
    assert result.exit_code == 0
    assert result.stdout.endswith("every rule held\n")


def test_the_table_of_worlds_stands_on_a_terminal_of_80_columns():
    worlds = (*QUICK, *FULL)
    results = [
        Result(each, states=1_234_567, transitions=9_999_999, depth=123, seconds=999.9, steps=10)
        for each in worlds
    ]
    stream = StringIO()
    Console(file=stream, width=80, force_terminal=True, color_system=None).print(run._table(results))
    assert "…" not in stream.getvalue()
    assert len(stream.getvalue().splitlines()) == len(worlds) + 2


def test_a_run_without_a_terminal_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(run, "TELL_SECONDS", 0.0)
    stream = StringIO()
    assert run.explore(True, "pull-1x2-cached", None, tmp_path, Console(file=stream, width=80))
    assert "1/1 worlds, " in stream.getvalue()
