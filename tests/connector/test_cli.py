"""The command line: it teaches, it is quick, and it says what is wrong in one sentence."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from dfirst.connector.cli import app
from dfirst.connector.up import curl_line
from typer.testing import CliRunner, Result


def dfirst(*words: str) -> Result:
    return CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}).invoke(app, words)


def test_help_names_every_command_and_where_to_start() -> None:
    shown = dfirst("--help").output
    for command in ("demo", "up", "router", "diagrams"):
        assert command in shown
    assert "Start with: dfirst demo" in shown


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("demo", ["--json", "--keep", "--work-dir", "token for token"]),
        ("up", ["--prefill", "--demo-model", "tp=1,dp=2", "Ctrl-C"]),
        ("router", ["--advertised-host", "http://10.0.0.1:8100", "/v1/chat/completions"]),
        ("diagrams", ["--check", "Mermaid"]),
    ],
)
def test_each_command_teaches(command: str, words: list[str]) -> None:
    result = dfirst(command, "--help")
    assert result.exit_code == 0
    for word in words:
        assert word in result.output


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys; from dfirst.connector import cli\n"
        "heavy = {'torch', 'vllm', 'fastapi', 'httpx', 'zmq', 'transitions', 'mooncake', 'numpy'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    started = time.monotonic()
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
    # It takes a fifth of this on an idle machine.
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("command", [["demo"], ["up", "--demo-model", "gqa"]])
@pytest.mark.parametrize("option", ["--prefill", "--decode"])
def test_a_wrong_layout_is_named_with_its_option(command: list[str], option: str) -> None:
    result = dfirst(*command, option, "tp=x")
    assert result.exit_code == 2
    assert result.stderr == f"error: {option}: tp is 'x' in 'tp=x'; give a whole number of at least 1\n"


@pytest.mark.parametrize("words", [[], ["some/model", "--demo-model", "gqa"]])
def test_up_wants_exactly_one_model(words: list[str]) -> None:
    result = dfirst("up", *words)
    assert result.exit_code == 2
    assert result.stderr == "error: name a model, or make one with --demo-model gqa; one of the two\n"


def test_the_router_refuses_what_is_no_address() -> None:
    result = dfirst("router", "--prefill", "localhost:8100", "--decode", "http://d:8200")
    assert result.exit_code == 2
    assert "--prefill 'localhost:8100' is no address" in result.stderr


def test_the_router_wants_both_kinds_of_engines() -> None:
    result = dfirst("router", "--prefill", "http://p:8100")
    assert result.exit_code == 2
    assert "--decode" in result.stderr


def test_without_vllm_a_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dfirst.connector.host.find_spec", lambda name: None)
    result = dfirst("demo")
    assert result.exit_code == 1
    assert "vLLM is not installed here; install dfirst with the extra for this host" in result.stderr


def test_the_curl_line_is_one_that_a_shell_understands(tmp_path: Path) -> None:
    recorder = tmp_path / "curl"
    recorder.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    recorder.chmod(0o755)
    line = curl_line("http://127.0.0.1:8000", "it's a model", "layerwise")
    shown = subprocess.run(
        ["sh", "-c", line.replace("curl", str(recorder), 1)], capture_output=True, text=True, check=True
    )
    words = json.loads(shown.stdout)
    assert words[0] == "http://127.0.0.1:8000/v1/completions"
    assert "X-DFirst-Mode: layerwise" in words
    assert json.loads(words[-1])["model"] == "it's a model"
