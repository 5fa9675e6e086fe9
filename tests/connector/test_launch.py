"""Children that start, fail and stop, and the command lines of engines; no engine is started here."""

import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from dfirst.connector.demo_model import make_model
from dfirst.connector.engine_spec import (
    UNI_EXECUTOR,
    EngineSpec,
    RouterSpec,
    engine_command,
    engine_environment,
    router_command,
)
from dfirst.connector.host import device_variable
from dfirst.connector.launch import Engine, is_healthy
from dfirst.connector.processes import Child, LaunchError, free_port, log_excerpt


def spec(**settings: object) -> EngineSpec:
    return EngineSpec(**{"role": "prefill", "model": "some/model", "log": Path("p.log"), **settings})  # type: ignore[arg-type]


def option(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def is_running(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + 10
    while is_running(pid):
        assert time.monotonic() < deadline, f"process {pid} still runs"
        time.sleep(0.02)


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Child]:
    child = Child("the test's child", tmp_path / "logs" / "child.log")
    yield child
    child.kill()


def start(child: Child, program: str) -> None:
    child.start([sys.executable, "-u", "-c", program], os.environ)


def log_shows(child: Child, text: str) -> bool:
    return text in child.log.read_text()


def test_a_child_that_ends_too_early_tells_why(child: Child) -> None:
    start(child, "raise SystemExit('no room for the KV cache')")
    with pytest.raises(LaunchError) as caught:
        child.wait_until(lambda: False, 10)
    message = str(caught.value)
    assert message.startswith(f"the test's child ended with exit code 1; its log is {child.log}")
    assert "no room for the KV cache" in message


def test_a_child_that_was_killed_names_the_signal(child: Child) -> None:
    start(child, "import os; os.kill(os.getpid(), 9)")
    with pytest.raises(LaunchError, match="ended by SIGKILL"):
        child.wait_until(lambda: False, 10)


def test_a_child_that_takes_too_long_is_an_error_with_its_log(child: Child) -> None:
    start(child, "import time; print('loading'); time.sleep(60)")
    child.wait_until(lambda: log_shows(child, "loading"), 10)
    with pytest.raises(LaunchError, match=r"was not ready after 0 s; raise the time-out, (.|\n)*loading"):
        child.wait_until(lambda: False, 0)


def test_a_child_that_was_never_started_says_so(child: Child) -> None:
    with pytest.raises(LaunchError, match="was never started"):
        child.check()
    child.kill()
    child.stop()


def test_a_running_child_is_not_started_again(child: Child) -> None:
    start(child, "import time; time.sleep(60)")
    with pytest.raises(LaunchError, match="runs already"):
        start(child, "pass")


GRANDCHILD = (
    "import subprocess, sys, time, signal\n"
    "{first}\n"
    "grandchild = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
    "print('grandchild', grandchild.pid, 'end')\n"
    "time.sleep(60)\n"
)


def start_with_grandchild(child: Child, first: str = "") -> tuple[int, int]:
    start(child, GRANDCHILD.format(first=first))
    child.wait_until(lambda: log_shows(child, " end\n"), 10)
    assert child.pid is not None
    return child.pid, int(child.log.read_text().split()[1])


def test_kill_reaches_the_whole_tree(child: Child) -> None:
    pids = start_with_grandchild(child)
    child.kill()
    for pid in pids:
        wait_for_end(pid)
    assert not child.alive


def test_stop_ends_also_what_does_not_listen(child: Child) -> None:
    pids = start_with_grandchild(child, "signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    child.stop(timeout_seconds=0.2)
    for pid in pids:
        wait_for_end(pid)


def test_a_second_start_goes_on_in_the_same_log(child: Child) -> None:
    for word in ("first", "second"):
        start(child, f"print('{word}')")
        with pytest.raises(LaunchError):
            child.wait_until(lambda: False, 10)
        child.kill()
    assert child.log.read_text() == "first\nsecond\n"


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux")
def test_a_child_dies_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    parent_program = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from dfirst.connector.processes import Child\n"
        f"child = Child('child', Path({str(tmp_path / 'child.log')!r}))\n"
        "child.start([sys.executable, '-c', 'import time; time.sleep(60)'], os.environ)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", parent_program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_running(pid)
        parent.send_signal(signal.SIGKILL)
    wait_for_end(pid)


def test_sigterm_runs_what_ctrl_c_would_run() -> None:
    program = (
        "import time\n"
        "from dfirst.connector.processes import end_on_sigterm_as_on_ctrl_c\n"
        "end_on_sigterm_as_on_ctrl_c()\n"
        "try:\n"
        "    print('ready', flush=True); time.sleep(60)\n"
        "except KeyboardInterrupt:\n"
        "    print('stopped in order')\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.stdout.readline() == "stopped in order\n"


def test_the_cause_is_shown_even_when_the_end_of_a_log_is_about_something_else(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text("ValueError: head size 7 is not supported\n" + "shutting down\n" * 40)
    excerpt = log_excerpt(log)
    assert excerpt.startswith("  ValueError: head size 7 is not supported\n  ...\n")
    assert len(excerpt.splitlines()) < 20


def test_ports_are_given_out_once() -> None:
    ports = [free_port() for _ in range(50)]
    assert len(set(ports)) == len(ports)


def test_health_is_no_until_somebody_answers_200() -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        status = 503

        def do_GET(self) -> None:
            self.send_response(self.status)
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    url = f"http://127.0.0.1:{free_port()}"
    assert not is_healthy(url)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert not is_healthy(url)
        Handler.status = 200
        assert is_healthy(url)
        server.shutdown()


def test_an_engine_is_told_its_role_and_the_connector_by_name() -> None:
    config = json.loads(
        option(engine_command(spec(connector_config={"trace_path": "/t"}), 8100), "--kv-transfer-config")
    )
    assert config == {
        "kv_connector": "DFirstConnector",
        "kv_role": "kv_producer",
        "engine_id": "prefill",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"trace_path": "/t"},
    }
    decode = engine_command(spec(role="decode", engine_id="D2", load_failure_policy="fail"), 8200)
    config = json.loads(option(decode, "--kv-transfer-config"))
    assert (config["kv_role"], config["engine_id"], config["kv_load_failure_policy"]) == (
        "kv_consumer",
        "D2",
        "fail",
    )


def test_a_single_engine_knows_no_connector() -> None:
    assert "--kv-transfer-config" not in engine_command(spec(role="single"), 8000)


def test_cpu_settings_stay_on_cpus(tmp_path: Path) -> None:
    gqa = str(make_model(tmp_path / "gqa", "gqa"))
    on_cpu = engine_command(spec(model=gqa), 8100, on_cpu=True)
    assert option(on_cpu, "--dtype") == "float32"
    assert option(on_cpu, "--block-size") == "32"
    assert "--enforce-eager" in on_cpu
    elsewhere = engine_command(spec(model=gqa), 8100, on_cpu=False)
    assert not {"--dtype", "--block-size", "--enforce-eager", "--kv-cache-memory-bytes"} & set(elsewhere)
    assert engine_environment(spec(), {}, on_cpu=True)["OMP_NUM_THREADS"] == "1"
    assert engine_environment(spec(), {"PATH": "/bin"}, on_cpu=False) == {"PATH": "/bin"}


def test_one_rank_on_a_cpu_runs_as_it_would_on_an_accelerator() -> None:
    named = "--distributed-executor-backend"
    assert option(engine_command(spec(), 8100, on_cpu=True), named) == UNI_EXECUTOR
    assert option(engine_command(spec(executor="mp"), 8100, on_cpu=True), named) == "mp"
    for ranks in ({"tp": 2}, {"dp": 2}, {"vllm_args": ("--pipeline-parallel-size=2",)}):
        assert named not in engine_command(spec(**ranks), 8100, on_cpu=True)
    assert named not in engine_command(spec(), 8100, on_cpu=False)
    assert option(engine_command(spec(executor="uni"), 8100, on_cpu=False), named) == "uni"


def test_mla_gets_the_kernels_that_know_float32(tmp_path: Path) -> None:
    command = engine_command(spec(model=str(make_model(tmp_path, "mla"))), 8100, on_cpu=True)
    assert option(command, "--block-size") == "16"
    assert option(command, "--attention-backend") == "CPU_MLA"
    assert "-rotary_embedding" in json.loads(option(command, "--compilation-config"))["custom_ops"]


def test_what_the_user_says_wins(tmp_path: Path) -> None:
    said = spec(
        block_size=64, kv_cache_bytes=1 << 20, vllm_args=("--dtype", "bfloat16"), environment={"A": "b"}
    )
    command = engine_command(said, 8100, on_cpu=True)
    assert option(command, "--block-size") == "64"
    assert option(command, "--kv-cache-memory-bytes") == str(1 << 20)
    # The last of two wins in argparse.
    assert command[-2:] == ["--dtype", "bfloat16"]
    assert engine_environment(said, {"A": "a"}, on_cpu=True)["A"] == "b"


def test_engines_with_replicas_do_not_share_vllms_default_port() -> None:
    ports = {option(engine_command(spec(dp=2), 8100), "--data-parallel-rpc-port") for _ in range(2)}
    assert len(ports) == 2


def test_devices_are_chosen_among_the_visible_ones() -> None:
    variable = device_variable()
    chosen = engine_environment(spec(devices=(0, 2)), {variable: "4,5,6"}, on_cpu=False)
    assert chosen[variable] == "4,6"
    assert engine_environment(spec(devices=(1,)), {}, on_cpu=False)[variable] == "1"
    with pytest.raises(ValueError, match=r"device 3 is asked for, but \w+=4,5 leaves only 2 visible"):
        engine_environment(spec(devices=(3,)), {variable: "4,5"}, on_cpu=False)


def test_an_engine_without_a_port_takes_a_free_one() -> None:
    engine = Engine(spec())
    assert engine.url == f"http://127.0.0.1:{engine.port}"
    assert engine.port > 0
    assert not engine.alive


def test_the_router_is_started_by_its_own_command() -> None:
    router = RouterSpec(
        prefill=("http://p1", "http://p2"), decode=("http://d",), log=Path("r.log"), mode="layerwise"
    )
    words = router_command(router, 8000)[3:]
    assert words[0] == "router"
    assert words.count("--prefill") == 2
    assert option(words, "--mode") == "layerwise"
