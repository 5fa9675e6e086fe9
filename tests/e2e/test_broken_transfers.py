"""Transfers that go wrong on the way, each as users of other connectors have reported it: the client gets the
right answer all the same, no block is kept, and nobody else's request is touched.
"""

import threading

import pytest
from dfirst.connector.chaos.deaf import DeafListener
from dfirst.connector.chaos.orders import CopyFault, Order
from dfirst.connector.engine_spec import Mode

from .breaking import (
    LONG,
    MODES,
    InBackground,
    assert_conforms,
    breakable,
    wait_for_state,
    wait_until_free,
)
from .engines import PREFILL_MAX_MODEL_LEN, EngineHouse, Pair, assert_equal, prompts, wait_until
from .http_json import Leaving, complete

STALL_SECONDS = 0.8
"""Of a push: within the allowance of the pair's timers (rule R3)."""
READ_STALL_SECONDS = 2.0
TRIES = 3


def assert_answers(engines: EngineHouse, pair: Pair, mode: Mode, title: str) -> None:
    """Others are answered, at once and right."""
    requests = prompts(mode, 20, 64, 100, 300, title=title)
    assert_equal(requests, pair.ask(requests, at_once=True), engines.references("gqa", requests))


@pytest.mark.parametrize("fault", ["copy fails", "copy in part"])
@pytest.mark.parametrize("mode", ["blockwise", "layerwise"])
def test_a_transfer_that_fails_is_recomputed(engines: EngineHouse, mode: Mode, fault: CopyFault) -> None:
    pair = breakable(engines)
    mover, way = ("decode", "read") if mode == "blockwise" else ("prefill", "write")
    requests = prompts(mode, 600, title=fault)
    references = engines.references("gqa", requests)
    order = pair.faults.order(mover, fault, way)
    assert_equal(requests, pair.ask(requests), references)
    assert order.number in {one.number for one in pair.faults.injected()}
    wait_until_free(pair)
    assert_conforms(pair)


@pytest.mark.parametrize("mode", ["blockwise-d-first", "layerwise"])
def test_p_drops_a_request_that_d_waits_for(engines: EngineHouse, mode: Mode) -> None:
    pair = breakable(engines)
    pair.ask(prompts("blockwise", 20, title="the router learns where P is"))
    waiting = InBackground(pair, mode, LONG, f"dropped by P {mode}")
    transfer = waiting.wait_for("prefill_request", "QUEUED" if mode == "blockwise-d-first" else "PUSHING")
    pair.abort(pair.prefill, transfer, "prefill_request")
    references = engines.references("gqa", [waiting.request])
    assert_equal([waiting.request], [waiting.answer()], references)
    wait_until_free(pair)
    assert_conforms(pair)


def test_d_drops_a_request_while_p_still_pushes(engines: EngineHouse) -> None:
    """D's blocks go to another request only when P's copy in flight has ended."""
    pair = breakable(engines)
    known = set(pair.traces().transfers())
    order = pair.faults.order("prefill", "copy stalls", "write", seconds=STALL_SECONDS)
    leaving = Leaving(pair.url, prompts("layerwise", LONG, title="leaves D")[0].prompt, mode="layerwise")
    transfer = wait_for_state(pair, "decode_layerwise", "PUSHES_PENDING", known)
    wait_until_injected(pair, order)
    leaving.hang_up()
    assert_answers(engines, pair, "blockwise", "after one that left D")
    wait_until_free(pair)
    assert_copies_end_first(pair, transfer, "decode_layerwise")
    assert_conforms(pair)


def test_a_read_ends_before_its_dropped_request_is_forgotten(engines: EngineHouse) -> None:
    pair = breakable(engines)
    known = set(pair.traces().transfers())
    order = pair.faults.order("decode", "copy stalls", "read", seconds=READ_STALL_SECONDS)
    leaving = Leaving(pair.url, prompts("blockwise", 600, title="leaves a read")[0].prompt, mode="blockwise")
    transfer = wait_for_state(pair, "decode_blockwise", "PULLS_PENDING", known)
    wait_until_injected(pair, order)
    leaving.hang_up()
    assert_answers(engines, pair, "layerwise", "after one that left a read")
    wait_until_free(pair)
    assert_copies_end_first(pair, transfer, "decode_blockwise")
    assert_conforms(pair)


def wait_until_injected(pair: Pair, order: Order) -> None:
    """Wait until a copy has met the fault that was ordered, and so is in flight."""
    wait_until(
        lambda: order.number in {one.number for one in pair.faults.injected()},
        60.0,
        f"a copy that meets order {order.number}",
    )


def assert_copies_end_first(pair: Pair, transfer: str, machine: str) -> None:
    """On this rank the transfer came to its end after the last copy of it had."""
    trace = pair.traces().of(transfer)
    freed = [step.time for step in trace.transitions if (step.machine, step.target) == (machine, "FREED")]
    assert trace.copies
    assert min(freed) >= max(copy.time for copy in trace.copies)


@pytest.mark.parametrize("mode", MODES)
def test_a_done_that_comes_again_frees_nothing_of_the_next_request(engines: EngineHouse, mode: Mode) -> None:
    pair = breakable(engines)
    mover = "prefill" if mode == "layerwise" else "decode"
    orders = {pair.faults.order(mover, "repeated", "DONE", seconds=0.5).number for _ in range(6)}
    for number in range(3):
        assert_answers(engines, pair, mode, f"DONE again {number}")
    assert orders <= {one.number for one in pair.faults.injected()}
    wait_until_free(pair)
    assert_conforms(pair)


def test_a_deaf_peer_delays_no_transfer_with_others(engines: EngineHouse) -> None:
    """Others are through before the query time-out gives the deaf one up; a busy machine gets a few tries."""
    pair = breakable(engines)
    with DeafListener() as deaf:
        overtaken = any(others_come_first(engines, pair, deaf, number) for number in range(TRIES))
    assert overtaken, "no transfer was through before the peer that says nothing was given up"
    wait_until_free(pair)


def others_come_first(engines: EngineHouse, pair: Pair, deaf: DeafListener, number: int) -> bool:
    """Ask D for a prompt of a deaf peer and for some of P, all at once; all answers must be right."""
    lost = prompts("blockwise", 50, title=f"sent to a deaf peer {number}")
    others = prompts("blockwise", 20, 40, title=f"beside a deaf peer {number}")
    references = [engines.references("gqa", requests) for requests in (lost, others)]
    answers: list[str] = []

    def ask() -> None:
        params = deaf.params(f"deaf-{number}", decodes=True)
        answers.append(complete(pair.decode.url, lost[0].prompt, max_tokens=16, params=params))

    asking = threading.Thread(target=ask)
    asking.start()
    assert_equal(others, pair.ask(others, at_once=True), references[1])
    first = answers == []
    asking.join(60.0)
    assert answers == [references[0][0].text]
    return first


def test_a_prompt_that_p_refuses_is_not_decoded_from_a_half_filled_cache(engines: EngineHouse) -> None:
    pair = breakable(engines)
    requests = prompts("layerwise", PREFILL_MAX_MODEL_LEN + 100, title="too long for P")
    assert_equal(requests, pair.ask(requests), engines.references("gqa", requests))
    refused = pair.ask(prompts("blockwise", PREFILL_MAX_MODEL_LEN + 100, title="too long for P"))[0]
    assert refused.error is not None
    assert refused.error.startswith('HTTP 400: {"error":')
    assert str(PREFILL_MAX_MODEL_LEN) in refused.error
    wait_until_free(pair)
    assert_conforms(pair)
