"""What the tests share that break a pair: its timers, and ways to catch a transfer in a state."""

import threading
import time
from typing import Any

from dfirst.connector.demo_client import Answer
from dfirst.connector.engine_spec import LoadFailurePolicy, Mode
from dfirst.spec.conform import conform

from .engines import EngineHouse, Pair, kv_cache_usage, prompts, wait_until
from .http_json import post

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
FREE_SECONDS = PUSH_SECONDS + SLACK_SECONDS
LONG = 3000
MODES: tuple[Mode, ...] = ("blockwise", "blockwise-d-first", "layerwise")


def breakable(engines: EngineHouse, policy: LoadFailurePolicy = "recompute") -> Pair:
    """The pair with short timers."""
    return engines.pair("gqa", load_failure_policy=policy, **TIMERS)


class InBackground:
    """One request through the router that is not waited for, and the transfer that it becomes."""

    def __init__(self, pair: Pair, mode: Mode, tokens: int, title: str) -> None:
        self._known = set(pair.traces().transfers())
        self._pair = pair
        self._answers: list[Answer] = []
        self.request = prompts(mode, tokens, title=title)[0]
        self._thread = threading.Thread(target=self._ask)
        self._thread.start()

    def _ask(self) -> None:
        self._answers += self._pair.ask([self.request])

    def wait_for(self, machine: str, state: str, seconds: float = 60.0) -> str:
        """Wait until its transfer is in a state; return the transfer's id."""
        return wait_for_state(self._pair, machine, state, self._known, seconds)

    def answer(self, seconds: float = 120.0) -> Answer:
        """Return what it was answered."""
        self._thread.join(seconds)
        assert self._answers, f"no answer within {seconds:g} s"
        return self._answers[0]


def wait_for_state(pair: Pair, machine: str, state: str, known: set[str], seconds: float = 60.0) -> str:
    """Wait until a transfer that is not among the known ones has reached a state; return its id."""
    found: list[str] = []

    def reached() -> bool:
        found[:] = [
            step.transfer
            for step in pair.traces().transitions
            if step.machine == machine and step.target == state and step.transfer not in known
        ]
        return bool(found)

    wait_until(reached, seconds, f"{machine} in {state}")
    return found[0]


def offer(pair: Pair, prompt: str) -> dict[str, Any]:
    """Let P prefill a prompt for a decode engine, as a router does."""
    asked = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": f"test-{time.time_ns()}"}
    body = {"model": "demo", "prompt": prompt, "max_tokens": 1, "temperature": 0, "kv_transfer_params": asked}
    offered = post(pair.prefill.url, "/v1/completions", body)["kv_transfer_params"]
    assert offered["do_remote_prefill"] is True
    return offered


def wait_until_free(pair: Pair, seconds: float = FREE_SECONDS) -> None:
    """Wait until no request holds a block on either engine."""
    for engine in (pair.prefill, pair.decode):
        wait_until(
            lambda engine=engine: kv_cache_usage(engine) == 0, seconds, f"free blocks of {engine.name}"
        )


def assert_conforms(pair: Pair) -> None:
    """What the engines have written so far breaks no rule."""
    violation = conform([pair.trace_directory], running=True).violation
    assert violation is None, violation.sentence
