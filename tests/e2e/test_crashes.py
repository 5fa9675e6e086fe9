"""One engine is killed in the middle of a transfer: the other one gives its blocks back, answers, and goes
on.
"""

import threading
import time

import pytest
from dfirst.connector.engine_spec import Mode

from .engines import EngineHouse, Pair, assert_equal, kv_cache_usage, prompts, wait_until
from .http_json import complete, post

TIMERS = {
    "lease_seconds": 4.0,
    "query_retry_seconds": 0.3,
    "query_timeout_seconds": 3.0,
    "hold_seconds": 6.0,
    "copy_timeout_seconds": 5.0,
    "quarantine_seconds": 1.0,
    "stall_allowance_seconds": 1.0,
    "farewell_seconds": 4.0,
}
PUSH_SECONDS = sum(
    TIMERS[name]
    for name in ("lease_seconds", "copy_timeout_seconds", "quarantine_seconds", "stall_allowance_seconds")
)
"""How long an owner of pushed blocks waits for a writer that has died (rules R3 and R4)."""
SLACK_SECONDS = 6.0
"""For two busy cores: process ends, steps, polling."""
LONG = 3000


def recomputing(engines: EngineHouse) -> Pair:
    return engines.pair("gqa", load_failure_policy="recompute", **TIMERS)


def in_background(pair: Pair, mode: Mode, tokens: int, title: str) -> tuple[threading.Thread, list]:
    """Send one request through the router and do not wait for it."""
    answers: list = []
    requests = prompts(mode, tokens, title=title)
    thread = threading.Thread(target=lambda: answers.extend(pair.ask(requests)))
    thread.start()
    return thread, answers


def wait_for_state(pair: Pair, machine: str, state: str, known: int) -> None:
    """Wait until a transfer that is not among the first ``known`` ones has reached a state."""

    def reached() -> bool:
        traces = pair.traces()
        new = set(traces.transfers()[known:])
        return any(
            step.machine == machine and step.target == state and step.transfer in new
            for step in traces.transitions
        )

    wait_until(reached, 60.0, f"{machine} in {state}")


@pytest.mark.parametrize(
    ("mode", "machine", "state"),
    [
        ("blockwise", "prefill_blockwise", "METADATA_QUERY"),
        ("layerwise", "prefill_layerwise", "PUSHES_PENDING"),
    ],
)
def test_decode_killed_frees_prefill(engines: EngineHouse, mode: Mode, machine: str, state: str) -> None:
    pair = recomputing(engines)
    known = len(pair.traces().transfers())
    thread, answers = in_background(pair, mode, LONG, f"decode is killed {mode}")
    wait_for_state(pair, machine, state, known)
    pair.decode.kill()
    killed = time.monotonic()
    thread.join(60.0)
    assert answers
    assert answers[0].error is not None
    limit = max(TIMERS["hold_seconds"], TIMERS["lease_seconds"]) + SLACK_SECONDS
    wait_until(lambda: kv_cache_usage(pair.prefill) == 0, limit, "P's blocks to be free")
    assert time.monotonic() - killed < limit
    assert complete(pair.prefill.url, "P goes on.", max_tokens=4)
    pair.revive(pair.decode)


def test_prefill_killed_before_the_read_is_recomputed(engines: EngineHouse) -> None:
    pair = recomputing(engines)
    request = prompts("blockwise", 200, title="prefill is killed")[0]
    offered = offer(pair, request.prompt)
    pair.prefill.kill()
    answer = complete(pair.decode.url, request.prompt, max_tokens=request.output_tokens, params=offered)
    after = prompts("blockwise", 90, title="after")[0]
    assert complete(pair.decode.url, after.prompt, max_tokens=4)
    assert kv_cache_usage(pair.decode) == 0
    pair.revive(pair.prefill)
    references = engines.references("gqa", [request])
    assert answer == references[0].text


def test_prefill_killed_while_it_pushes_is_recomputed(engines: EngineHouse) -> None:
    pair = recomputing(engines)
    request = prompts("layerwise", LONG, title="prefill is killed pushing")[0]
    known = len(pair.traces().transfers())
    answers: list = []
    thread = threading.Thread(target=lambda: answers.extend(pair.ask([request])))
    thread.start()
    wait_for_state(pair, "decode_layerwise", "PUSHES_PENDING", known)
    pair.prefill.kill()
    thread.join(PUSH_SECONDS + 60.0)
    assert answers
    after = prompts("blockwise", 90, title="after pushing")[0]
    assert complete(pair.decode.url, after.prompt, max_tokens=4)
    wait_until(lambda: kv_cache_usage(pair.decode) == 0, SLACK_SECONDS, "D's blocks to be free")
    pair.revive(pair.prefill)
    assert_equal([request], answers, engines.references("gqa", [request]))


def offer(pair: Pair, prompt: str) -> dict:
    """Let P prefill a prompt for a decode engine, as a router does."""
    asked = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": f"test-{time.time_ns()}"}
    body = {"model": "demo", "prompt": prompt, "max_tokens": 1, "temperature": 0, "kv_transfer_params": asked}
    offered = post(pair.prefill.url, "/v1/completions", body)["kv_transfer_params"]
    assert offered["do_remote_prefill"] is True
    return offered


def test_restarted_engines_hand_over(engines: EngineHouse) -> None:
    pair = recomputing(engines)
    requests = prompts("blockwise", 90, title="restarted") + prompts("layerwise", 90, title="restarted")
    answers = pair.ask(requests)
    assert_equal(requests, answers, engines.references("gqa", requests))
    for answer in answers:
        assert pair.trace_of(answer).bytes > 0
