"""What the router's process writes: the time and the level in each line, and nothing that a client said."""

import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
from fake_engines import FakeDecodeEngine, FakePrefillEngine, free_port, wait_until

LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (DEBUG|INFO|WARNING|ERROR) [\w.]+: .+")
SECRET = "the client's own words"


def test_a_line_has_its_time_and_level_and_no_prompt(
    tmp_path: Path, p: FakePrefillEngine, d: FakeDecodeEngine
) -> None:
    port = free_port()
    command = [sys.executable, "-m", "dfirst.connector.cli", "router", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--prefill", p.url, "--decode", d.url]
    url = f"http://127.0.0.1:{port}"
    log = tmp_path / "log"
    with log.open("w") as output, subprocess.Popen(command, stderr=output, env=os.environ) as router:
        wait_until(lambda: answers(url), "the router is up", seconds=60)
        d.fail_with = (500, {"error": {"message": f"bad: {SECRET}"}})
        # D is asked first: there is nobody yet at whom it would have to be cancelled, and no end to wait for.
        headers = {"X-DFirst-Mode": "layerwise"}
        asked = httpx.post(f"{url}/v1/completions", json={"prompt": SECRET}, headers=headers)
        assert asked.status_code == 502
        router.terminate()
        assert router.wait(30) in (0, -15)
    lines = log.read_text().splitlines()
    assert [line for line in lines if not LINE.fullmatch(line)] == []
    assert any("given up: the decode engine answered with status 500" in line for line in lines)
    assert SECRET not in log.read_text()


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False
