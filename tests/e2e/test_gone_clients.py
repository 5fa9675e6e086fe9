"""A client that hangs up, at whatever moment, leaves no block behind on either engine and disturbs nobody."""

import os
import signal
import threading
import time

import httpx
import pytest
from dfirst.connector.demo_client import MODE_HEADER
from dfirst.connector.engine_spec import Mode

from .breaking import LONG, MODES, TIMERS, assert_conforms, breakable, wait_for_state, wait_until_free
from .engines import EngineHouse, Pair, assert_equal, kv_cache_usage, prompts, wait_until
from .http_json import Leaving

PATIENCE_SECONDS = (0.05, 0.4, 1.0, 2.0)
"""After how long clients leave: in the queue, while the prompt is computed or moves, while tokens come."""


def leave_early(pair: Pair, mode: Mode, prompt: str, patience_seconds: float) -> None:
    """Send a request and close the connection before the answer."""
    body = {"model": "demo", "prompt": prompt, "max_tokens": 200, "temperature": 0}
    timeout = httpx.Timeout(60.0, read=patience_seconds)
    with httpx.Client(timeout=timeout, trust_env=False) as client, pytest.raises(httpx.ReadTimeout):
        client.post(f"{pair.url}/v1/completions", json=body, headers={MODE_HEADER: mode})


@pytest.mark.parametrize("mode", MODES)
def test_hanging_up_frees_both_engines_and_disturbs_nobody(engines: EngineHouse, mode: Mode) -> None:
    pair = breakable(engines)
    quiet = prompts(mode, 90, 300, title="beside those who leave")
    references = engines.references("gqa", quiet)
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
    assert_equal(quiet, answers, references)
    wait_until_free(pair)
    assert_conforms(pair)


def test_hanging_up_before_d_has_seen_the_request_frees_p_at_once(engines: EngineHouse) -> None:
    """And not after the hold time, in which nobody comes."""
    pair = breakable(engines)
    pair.ask(prompts("blockwise", 20, title="the router learns where P is, before all leave"))
    known = set(pair.traces().transfers())
    os.kill(pair.decode.pid or 0, signal.SIGSTOP)
    try:
        leaving = Leaving(
            pair.url, prompts("blockwise", 300, title="unseen by D")[0].prompt, mode="blockwise"
        )
        transfer = wait_for_state(pair, "prefill_blockwise", "METADATA_QUERY", known)
        held = time.monotonic()
        leaving.hang_up()
        wait_until(lambda: kv_cache_usage(pair.prefill) == 0, TIMERS["hold_seconds"], "P's blocks to be free")
        assert time.monotonic() - held < TIMERS["hold_seconds"]
        events = {step.event for step in pair.traces().of(transfer).transitions}
        assert "hold_end" not in events
        assert "cancel" in events
    finally:
        os.kill(pair.decode.pid or 0, signal.SIGCONT)
    after = prompts("blockwise", 90, title="D is there again")
    assert_equal(after, pair.ask(after), engines.references("gqa", after))
    wait_until_free(pair)
