"""With two data-parallel ranks on P, one whose peer is dead does not hold up the other (rule L2)."""

import time
from collections.abc import Iterator
from typing import Any

from dfirst.connector.chaos.deaf import DeafListener
from dfirst.protocol.timing import Timing

from .breaking import wait_until_free
from .engines import EngineHouse, Pair, assert_equal, prompts
from .http_json import complete
from .test_no_wait import MOST_RATIO, PROBE_TOKENS, PROBES, ROUNDS, STUCK

RANK_HEADER = "X-data-parallel-rank"
STUCK_SECONDS = 0.8 * Timing().query_timeout_seconds
"""So long are pushes stuck for certain that nobody answers: a probe that takes longer does not count."""


def seconds_on(pair: Pair, rank: int, title: str) -> Iterator[float]:
    """How long one rank of P takes for prompts that have nothing to do with any transfer."""
    for request in prompts("blockwise", *[PROBE_TOKENS + number for number in range(PROBES)], title=title):
        started = time.monotonic()
        on_rank(pair, rank, request.prompt, 8)
        yield time.monotonic() - started


def on_rank(pair: Pair, rank: int, prompt: str, tokens: int, params: dict[str, Any] | None = None) -> str:
    return complete(pair.prefill.url, prompt, tokens, params, headers={RANK_HEADER: str(rank)})


def test_a_dead_peer_of_one_rank_does_not_slow_the_other_down(engines: EngineHouse) -> None:
    pair = engines.pair("gqa", prefill_dp=2, decode_tp=2)
    for rank in (0, 1):
        list(seconds_on(pair, rank, f"warm {rank}"))
    quiet: list[float] = []
    beside: list[float] = []
    with DeafListener() as deaf:
        for number in range(ROUNDS):
            quiet += seconds_on(pair, 1, f"quiet {number}")
            started = time.monotonic()
            for stuck in range(STUCK):
                name = f"stuck {number} {stuck}"
                prompt = prompts("layerwise", 60, title=name)[0].prompt
                on_rank(pair, 0, prompt, 1, deaf.params(name, decodes=False))
            for seconds in seconds_on(pair, 1, f"beside {number}"):
                if time.monotonic() - started < STUCK_SECONDS:
                    beside.append(seconds)
            wait_until_free(pair)
    assert beside, "the machine is too busy: no probe ended while the pushes were stuck"
    ratio = min(beside) / min(quiet)
    print(f"latency on the rank beside: {ratio:.2f} times that without")
    assert ratio < MOST_RATIO
    requests = prompts("layerwise", 90, 300, title="after a dead peer of one rank")
    assert_equal(requests, pair.ask(requests), engines.references("gqa", requests))
