"""One engine is killed in the middle of a transfer: the other one gives its blocks back, answers, and goes
on.
"""

import time

import pytest
from dfirst.connector.engine_spec import Mode

from .breaking import LONG, PUSH_SECONDS, SLACK_SECONDS, TIMERS, InBackground, breakable, offer
from .engines import EngineHouse, assert_equal, kv_cache_usage, prompts, wait_until
from .http_json import complete


@pytest.mark.parametrize(
    ("mode", "machine", "state"),
    [
        ("blockwise", "prefill_blockwise", "METADATA_QUERY"),
        pytest.param("layerwise", "prefill_layerwise", "PUSHES_PENDING", marks=pytest.mark.full),
    ],
)
def test_decode_killed_frees_prefill(engines: EngineHouse, mode: Mode, machine: str, state: str) -> None:
    pair = breakable(engines)
    asking = InBackground(pair, mode, LONG, f"decode is killed {mode}")
    asking.wait_for(machine, state)
    pair.decode.kill()
    killed = time.monotonic()
    error = asking.answer().error
    assert error is not None
    # 503 when the router had not yet connected to D, 502 when its connection broke.
    assert error.startswith(('HTTP 502: {"error":{"message":', 'HTTP 503: {"error":{"message":'))
    limit = max(TIMERS["hold_seconds"], TIMERS["lease_seconds"]) + SLACK_SECONDS
    wait_until(lambda: kv_cache_usage(pair.prefill) == 0, limit, "P's blocks to be free")
    assert time.monotonic() - killed < limit
    assert complete(pair.prefill.url, "P goes on.", max_tokens=4)
    pair.revive(pair.decode)


@pytest.mark.full
def test_prefill_killed_before_the_read_is_recomputed(engines: EngineHouse) -> None:
    pair = breakable(engines)
    request = prompts("blockwise", 200, title="prefill is killed")[0]
    references = engines.references("gqa", [request])
    offered = offer(pair, request.prompt)
    pair.prefill.kill()
    answer = complete(pair.decode.url, request.prompt, max_tokens=request.output_tokens, params=offered)
    after = prompts("blockwise", 90, title="after")[0]
    assert complete(pair.decode.url, after.prompt, max_tokens=4)
    assert kv_cache_usage(pair.decode) == 0
    pair.revive(pair.prefill)
    assert answer == references[0].text


def test_prefill_killed_while_it_pushes_is_recomputed_and_not_taken_for_the_new_one(
    engines: EngineHouse,
) -> None:
    """What P offered before its end is asked for at the P that came back under its name and port."""
    pair = breakable(engines)
    request = prompts("blockwise", 200, title="offered before the end")[0]
    offered = offer(pair, request.prompt)
    pushed = InBackground(pair, "layerwise", LONG, "prefill is killed pushing")
    pushed.wait_for("decode_layerwise", "PUSHES_PENDING")
    pair.prefill.kill()
    answer = pushed.answer(PUSH_SECONDS + 60.0)
    after = prompts("blockwise", 90, title="after pushing")[0]
    assert complete(pair.decode.url, after.prompt, max_tokens=4)
    wait_until(lambda: kv_cache_usage(pair.decode) == 0, SLACK_SECONDS, "D's blocks to be free")
    pair.revive(pair.prefill)
    assert_equal([pushed.request], [answer], engines.references("gqa", [pushed.request]))
    known = set(pair.traces().transfers())
    again = offer(pair, "The new one's own prompt.")
    old, new = offered["remote_ranks"], again["remote_ranks"]
    assert [(one["host"], one["port"]) for one in old] == [(one["host"], one["port"]) for one in new]
    assert old != new
    text = complete(pair.decode.url, request.prompt, max_tokens=request.output_tokens, params=offered)
    assert text == engines.references("gqa", [request])[0].text
    assert complete(pair.decode.url, "The new one's own prompt.", max_tokens=4, params=again)
    (own,) = set(pair.traces().transfers()) - known
    wait_until(lambda: pair.traces().of(own).is_over, SLACK_SECONDS, "the end of the new one's transfer")
    assert pair.traces().of(own).bytes > 0


def test_restarted_engines_hand_over(engines: EngineHouse) -> None:
    pair = breakable(engines)
    requests = prompts("blockwise", 90, title="restarted") + prompts("layerwise", 90, title="restarted")
    answers = pair.ask(requests)
    assert_equal(requests, answers, engines.references("gqa", requests))
    for answer in answers:
        assert pair.trace_of(answer).bytes > 0
