"""The command line: it teaches, it is quick, and it says what is wrong in one sentence."""

import json
import socket
import subprocess
import sys
import time
from importlib.metadata import version
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


P, D = ["--prefill", "http://127.0.0.1:8100"], ["--decode", "http://127.0.0.1:8200"]


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("localhost:8100", "is no address: write it like http://host:8100"),
        ("", "is no address"),
        ("http://:8100", "is no address"),
        ("http://a,b:8100", "is no address"),
        ("http://p:8100/v1", "has '/v1' behind the host and port"),
        ("http://p:8100?x", "has '?x' behind the host and port"),
        ("http://p:8100#x", "has '#x' behind the host and port"),
        (" http://p:8100", "holds a space"),
        ("http://p:0", "names a port that cannot be: give one from 1 to 65535"),
        ("http://p:x", "names a port that cannot be"),
        ("http://[::1", "an IPv6 address stands in brackets, as in http://[::1]:8100"),
        ("http://[::1]x:8100", "an IPv6 address stands in brackets"),
        ("http://::1:8100", "an IPv6 address stands in brackets"),
        ("http://127.0.0.1:8200/", "is named with --prefill and --decode"),
    ],
)
def test_the_router_refuses_what_is_no_address_of_an_engine(url: str, why: str) -> None:
    result = dfirst("router", "--prefill", url, *D)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    for word in ("--prefill", repr(url.rstrip("/")), why):
        assert word in result.stderr


def test_an_engine_is_named_once() -> None:
    result = dfirst("router", *P, *D, "--decode", "HTTP://127.0.0.1:8200/")
    assert result.exit_code == 2
    assert "--decode 'HTTP://127.0.0.1:8200/' is named twice" in result.stderr


@pytest.mark.parametrize(
    "url", ["http://user:secret@p:8100", "http://user:secret@[::1", "http://u:/secret@p"]
)
def test_a_password_is_refused_and_not_shown(url: str) -> None:
    result = dfirst("router", "--prefill", url, *D)
    assert result.exit_code == 2
    assert "--prefill 'http://***@" in result.stderr
    assert "secret" not in result.output


@pytest.mark.parametrize("host", ["", "[::]", "http://x:1", "x:1", "a b", "x/y"])
@pytest.mark.parametrize("option", ["--host", "--advertised-host"])
def test_a_host_is_a_bare_name_or_address(option: str, host: str) -> None:
    result = dfirst("router", *P, *D, option, host)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {option} is {host!r}; give a bare host name or address")


def test_a_host_that_is_not_of_this_machine_is_not_blamed_on_the_port() -> None:
    # 192.0.2.0/24 is for documents: no machine has it.
    for command in (["router", *P, *D], ["up", "some/model"]):
        result = dfirst(*command, "--host", "192.0.2.1")
        assert result.exit_code == 2
        assert "--host 192.0.2.1 cannot be listened on: " in result.stderr
        assert "--port" not in result.stderr


def test_a_port_that_is_taken_is_blamed_on_the_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = dfirst("router", *P, *D, "--host", "127.0.0.1", "--port", str(port))
    assert result.exit_code == 2
    assert f"port {port} of 127.0.0.1 cannot be used: " in result.stderr
    assert "--port" in result.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["router", *P, *D, "--port", "70000"],
            "--port is 70000; give a whole number of at least 1 and at most",
        ),
        (
            ["router", *P, *D, "--request-timeout-seconds", "nan"],
            "--request-timeout-seconds is 'nan'; give a",
        ),
        (["up", "--port", "-1"], "--port is -1; give a whole number of at least 0 and at most 65535"),
        (["chaos", "--minutes", "-1"], "--minutes is -1; give a number of at least 0.1 and at most 10080"),
        (
            ["chaos", "--minutes", "1e999"],
            "--minutes is '1e999'; give a number of at least 0.1 and at most 10080",
        ),
        (["chaos", "--seed", "1.5"], "--seed is '1.5'; give a whole number"),
        (["simulate", "--transfers", "0"], "--transfers is 0; give a whole number of at least 1 and at most"),
        (["simulate", "--transfers", "9" * 5000], "--transfers is '9999"),
        (["bench", "serve", "--tokens", "x"], "--tokens is 'x'; give a whole number of at least 1"),
    ],
)
def test_a_number_is_refused_with_its_value_and_its_range(words: list[str], sentence: str) -> None:
    result = dfirst(*words)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {sentence}")
    assert result.stderr.count("\n") == 1
    assert len(result.stderr) < 200


def test_the_help_shows_the_range_of_a_number() -> None:
    assert "1-65535" in dfirst("router", "--help").output


@pytest.mark.parametrize("command", ["demo", "up"])
@pytest.mark.parametrize("option", ["--prefill", "--decode"])
def test_accelerators_are_refused_where_vllm_runs_on_the_cpu(
    command: str, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dfirst.connector.host.runs_on_cpu", lambda: True)
    monkeypatch.setattr("dfirst.connector.host.vllm_is_installed", lambda: True)
    result = dfirst(command, option, "devices=0", *(["some/model"] if command == "up" else []))
    assert result.exit_code == 2
    assert result.stderr.startswith(
        f"error: {option}: devices=0 names accelerators, and vLLM runs on the CPU"
    )


def test_accelerators_that_cannot_be_seen_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dfirst.connector.host.runs_on_cpu", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "3")
    result = dfirst("up", "some/model", "--decode", "devices=1")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: --decode: device 1 is asked for")


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["keys", ""], "DIRECTORY"),
        (["diagrams", ""], "OUT"),
        (["diagrams", "", "--check"], "OUT"),
        (["conform", ""], "TRACE"),
        (["demo", "--work-dir", ""], "--work-dir"),
        (["explore", "--scenarios", ""], "--scenarios"),
    ],
)
def test_an_empty_path_is_not_the_current_directory(words: list[str], name: str) -> None:
    result = dfirst(*words)
    assert result.exit_code == 2
    assert result.stderr == f"error: {name} is '', an empty path; name one, and . for the current directory\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["bench", "copies", "--json", "/"], "--json: / cannot be written: Is a directory; name a file"),
        (
            ["bench", "core", "--plot", "x.png"],
            "--plot is x.png, but what is written is SVG; end its name in .svg",
        ),
        (
            ["bench", "serve", "--json", "/dev/null/x"],
            "--json: /dev/null/x cannot be written: Not a directory",
        ),
        (["chaos", "--json", "/dev/null/x"], "--json: /dev/null/x cannot be written: Not a directory"),
        (["demo", "--json", ""], "--json: . cannot be written: Is a directory"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    words: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dfirst.connector.host.vllm_is_installed", lambda: True)
    result = dfirst(*words)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {sentence}")


def test_a_row_that_no_benchmark_has_is_refused_with_those_there_are() -> None:
    result = dfirst("bench", "copies", "--quick", "--only", "nonsense")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: --only is 'nonsense', which no row's name holds")
    assert "\n  layerwise MLA, 16 tokens, 18 KiB, scattered\n" in result.stderr


def test_it_says_its_version() -> None:
    result = dfirst("--version")
    assert result.exit_code == 0
    assert result.stdout == f"dfirst {version('dfirst')}\n"


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
