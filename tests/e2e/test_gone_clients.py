"""A client that hangs up, at whatever moment, leaves no block behind on either engine and disturbs nobody."""

import threading

import httpx
import pytest
from dfirst.connector.demo_client import MODE_HEADER
from dfirst.connector.engine_spec import Mode

from .engines import EngineHouse, Pair, assert_equal, kv_cache_usage, prompts, wait_until
from .test_crashes import TIMERS

LONG = 3000
MODES: tuple[Mode, ...] = ("blockwise", "blockwise-d-first", "layerwise")
PATIENCE_SECONDS = (0.05, 0.4, 1.0, 2.0)
"""After how long clients leave: in the queue, while the prompt is computed or moves, while tokens come."""
FREE_SECONDS = 25.0
"""More than any lease and hold time of ``TIMERS``, on a busy machine."""


def leave_early(pair: Pair, mode: Mode, prompt: str, patience_seconds: float) -> None:
    """Send a request and close the connection before the answer."""
    body = {"model": "demo", "prompt": prompt, "max_tokens": 200, "temperature": 0}
    timeout = httpx.Timeout(60.0, read=patience_seconds)
    with httpx.Client(timeout=timeout, trust_env=False) as client, pytest.raises(httpx.ReadTimeout):
        client.post(f"{pair.url}/v1/completions", json=body, headers={MODE_HEADER: mode})


@pytest.mark.parametrize("mode", MODES)
def test_hanging_up_frees_both_engines_and_disturbs_nobody(engines: EngineHouse, mode: Mode) -> None:
    pair = engines.pair("gqa", load_failure_policy="fail", **TIMERS)
    quiet = prompts(mode, 90, 300, title="beside those who leave")
    leaving = prompts(mode, *[LONG + number for number in range(len(PATIENCE_SECONDS))], title="leaves")
    threads = [
        threading.Thread(target=leave_early, args=(pair, mode, request.prompt, patience))
        for request, patience in zip(leaving, PATIENCE_SECONDS, strict=True)
    ]
    for thread in threads:
        thread.start()
    answers = pair.ask(quiet)
    for thread in threads:
        thread.join()
    for engine in (pair.prefill, pair.decode):
        wait_until(lambda engine=engine: kv_cache_usage(engine) == 0, FREE_SECONDS, "free blocks")
    assert_equal(quiet, answers, engines.references("gqa", quiet))
