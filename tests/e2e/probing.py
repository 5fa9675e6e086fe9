"""How quick an engine is beside pushes to a peer that never answers."""

import time
from collections.abc import Callable, Iterator
from typing import Any

from dfirst.connector.chaos.deaf import DeafListener

from .breaking import wait_until_free
from .engines import Pair, prompts

PROBES = 8
PROBE_TOKENS = 100
ROUNDS = 3
STUCK = 4
MOST_RATIO = 1.5

Ask = Callable[[str, int, dict[str, Any] | None], object]
"""Has the engine complete a prompt by so many tokens, with these ``kv_transfer_params``."""


def probe_seconds(ask: Ask, title: str) -> Iterator[float]:
    """How long each of some prompts takes that have nothing to do with any transfer."""
    for request in prompts("blockwise", *[PROBE_TOKENS + number for number in range(PROBES)], title=title):
        started = time.monotonic()
        ask(request.prompt, 8, None)
        yield time.monotonic() - started


def ratio_beside_stuck_pushes(pair: Pair, probe: Ask, push: Ask, stuck_seconds: float) -> float:
    """Ask alternately with and without pushes that no one lends blocks for; compare the quickest answers.

    A pass that waits is never quick, and a busy machine slows others down. ``stuck_seconds`` is for how long
    pushes wait for certain: a probe that ends later does not count.
    """
    quiet: list[float] = []
    beside: list[float] = []
    with DeafListener() as deaf:
        for number in range(ROUNDS):
            quiet += probe_seconds(probe, f"quiet {number}")
            started = time.monotonic()
            for stuck in range(STUCK):
                name = f"stuck {number} {stuck}"
                prompt = prompts("layerwise", 60, title=name)[0].prompt
                push(prompt, 1, deaf.params(name, decodes=False))
            for seconds in probe_seconds(probe, f"beside {number}"):
                if time.monotonic() - started < stuck_seconds:
                    beside.append(seconds)
            wait_until_free(pair)
    assert beside, "the machine is too busy: no probe ended while the pushes were stuck"
    return min(beside) / min(quiet)
