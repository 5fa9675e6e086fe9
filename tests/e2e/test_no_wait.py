"""P's forward pass never waits for the network (rule L2): beside pushes to a peer that swallows every packet,
P's other requests are as quick as without them, in the same run.

Compared are the quickest of many: a pass that waits is never quick, and a busy machine slows others down.
"""

import os
import signal
from functools import partial

from .breaking import LONG, TIMERS, InBackground, breakable, wait_until_free
from .engines import EngineHouse, assert_equal
from .http_json import complete
from .probing import MOST_RATIO, probe_seconds, ratio_beside_stuck_pushes

STUCK_SECONDS = 0.8 * TIMERS["query_timeout_seconds"]


def test_pushes_to_a_peer_that_never_answers_slow_nobody_down(engines: EngineHouse) -> None:
    pair = breakable(engines)
    ask = partial(complete, pair.prefill.url)
    list(probe_seconds(ask, "warm"))
    ratio = ratio_beside_stuck_pushes(pair, ask, ask, STUCK_SECONDS)
    print(f"latency beside stuck pushes: {ratio:.2f} times that without")
    assert ratio < MOST_RATIO


def test_pushes_to_a_peer_that_stops_in_the_middle_slow_nobody_down(engines: EngineHouse) -> None:
    pair = breakable(engines)
    ask = partial(complete, pair.prefill.url)
    worker = pair.worker(pair.decode)
    os.kill(worker, signal.SIGSTOP)
    try:
        quiet = list(probe_seconds(ask, "D stands still, quiet"))
    finally:
        os.kill(worker, signal.SIGCONT)
    pushing = InBackground(pair, "layerwise", LONG, "D stops in the middle")
    pushing.wait_for("prefill_layerwise", "PUSHES_PENDING")
    os.kill(worker, signal.SIGSTOP)
    try:
        beside = list(probe_seconds(ask, "D stands still, beside"))
    finally:
        os.kill(worker, signal.SIGCONT)
    references = engines.references("gqa", [pushing.request])
    assert_equal([pushing.request], [pushing.answer()], references)
    ratio = min(beside) / min(quiet)
    print(f"latency beside a push that hangs: {ratio:.2f} times that without")
    assert ratio < MOST_RATIO
    wait_until_free(pair)
