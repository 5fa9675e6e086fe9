"""P's forward pass never waits for the network (rule L2): beside pushes to a peer that swallows every packet,
P's other requests are as quick as without them, in the same run.

Compared are the quickest of many: a pass that waits is never quick, and a busy machine slows others down.
"""

import os
import signal
import time
from collections.abc import Iterator

from dfirst.connector.chaos.deaf import DeafListener

from .breaking import LONG, TIMERS, InBackground, breakable, wait_until_free
from .engines import EngineHouse, Pair, assert_equal, prompts
from .http_json import complete

PROBES = 8
PROBE_TOKENS = 100
ROUNDS = 3
MOST_RATIO = 1.5
STUCK = 4
STUCK_SECONDS = 0.8 * TIMERS["query_timeout_seconds"]
"""So long are pushes stuck for certain that nobody answers: a probe that takes longer does not count."""


def probe_seconds(pair: Pair, title: str) -> Iterator[float]:
    """How long P takes for prompts that have nothing to do with any transfer."""
    for request in prompts("blockwise", *[PROBE_TOKENS + number for number in range(PROBES)], title=title):
        started = time.monotonic()
        complete(pair.prefill.url, request.prompt, max_tokens=8)
        yield time.monotonic() - started


def test_pushes_to_a_peer_that_never_answers_slow_nobody_down(engines: EngineHouse) -> None:
    """Alternately with and without pushes that no one lends blocks for."""
    pair = breakable(engines)
    list(probe_seconds(pair, "warm"))
    quiet: list[float] = []
    beside: list[float] = []
    with DeafListener() as deaf:
        for number in range(ROUNDS):
            quiet += probe_seconds(pair, f"quiet {number}")
            started = time.monotonic()
            for stuck in range(STUCK):
                name = f"stuck {number} {stuck}"
                prompt = prompts("layerwise", 60, title=name)[0].prompt
                complete(pair.prefill.url, prompt, max_tokens=1, params=deaf.params(name, decodes=False))
            for seconds in probe_seconds(pair, f"beside {number}"):
                if time.monotonic() - started < STUCK_SECONDS:
                    beside.append(seconds)
            wait_until_free(pair)
    assert beside, "the machine is too busy: no probe ended while the pushes were stuck"
    ratio = min(beside) / min(quiet)
    print(f"latency beside stuck pushes: {ratio:.2f} times that without ({len(beside)} probes)")
    assert ratio < MOST_RATIO


def test_pushes_to_a_peer_that_stops_in_the_middle_slow_nobody_down(engines: EngineHouse) -> None:
    pair = breakable(engines)
    worker = pair.worker(pair.decode)
    os.kill(worker, signal.SIGSTOP)
    try:
        quiet = list(probe_seconds(pair, "D stands still, quiet"))
    finally:
        os.kill(worker, signal.SIGCONT)
    pushing = InBackground(pair, "layerwise", LONG, "D stops in the middle")
    pushing.wait_for("prefill_layerwise", "PUSHES_PENDING")
    os.kill(worker, signal.SIGSTOP)
    try:
        beside = list(probe_seconds(pair, "D stands still, beside"))
    finally:
        os.kill(worker, signal.SIGCONT)
    references = engines.references("gqa", [pushing.request])
    assert_equal([pushing.request], [pushing.answer()], references)
    ratio = min(beside) / min(quiet)
    print(f"latency beside a push that hangs: {ratio:.2f} times that without")
    assert ratio < MOST_RATIO
    wait_until_free(pair)
