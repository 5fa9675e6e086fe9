"""Real engines for the tests: a prefill engine, a decode engine and the router, kept alive over many tests.

An engine takes half a minute to start, and two of them fill a small machine. So the `engines` fixture
hands out one `EngineHouse` for the whole session. It keeps one pair running, and one single engine for
reference answers, and starts others only when a test asks for something else:

    def test_hand_over(engines: EngineHouse) -> None:
        pair = engines.pair("gqa", prefill_tp=2)
        requests = prompts("blockwise", 40, 128)
        answers = pair.ask(requests)
        assert_equal(requests, answers, engines.references("gqa", requests))
        assert pair.trace_of(answers[0]).bytes > 0

Tests that ask for the same pair should follow one another: `conftest.ORDER`. A test that kills or stops an
engine says `pair.discard()` at its end, or starts the engine again; a pair with a dead engine is replaced by
itself. Every pair takes orders for faults: `pair.faults.order("decode", "copy fails", "read")`.
"""

import asyncio
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from dfirst.connector.chaos.metrics import USAGE, values
from dfirst.connector.chaos.orders import FaultDesk
from dfirst.connector.chaos.ports import free_port_range
from dfirst.connector.chaos.switch import VARIABLE
from dfirst.connector.demo_client import Answer, ask_all
from dfirst.connector.demo_model import Kind, make_model
from dfirst.connector.demo_prompts import DemoRequest, text
from dfirst.connector.engine_options import EngineLayout
from dfirst.connector.engine_spec import LoadFailurePolicy, Mode
from dfirst.connector.launch import Engine, EngineSpec
from dfirst.connector.local_set import LocalSet, LocalSetSpec
from dfirst.connector.trace_reader import Traces, TransferTrace, read_traces

from .http_json import post

MODEL_NAME = "demo"
MAX_MODEL_LEN = 4096
PREFILL_MAX_MODEL_LEN = 3500
"""P takes shorter prompts than D: a longer one is a prefill that ends in an error."""
PREFILL_CHUNK_TOKENS = 256


class Pair:
    """A running prefill engine, decode engine and router."""

    def __init__(self, running: LocalSet, traces: Path, faults: FaultDesk) -> None:
        self.running = running
        self.trace_directory = traces
        self.faults = faults
        self.discarded = False

    @property
    def prefill(self) -> Engine:
        return self.running.prefill[0]

    @property
    def decode(self) -> Engine:
        return self.running.decode[0]

    @property
    def url(self) -> str:
        """The router's."""
        return self.running.router.url

    @property
    def alive(self) -> bool:
        return not self.discarded and all(server.alive for server in self.running.servers)

    def revive(self, engine: Engine) -> None:
        """Start an engine again that was killed, under its id and port."""
        engine.start()
        engine.wait_ready()

    def discard(self) -> None:
        """The next test gets new engines."""
        self.discarded = True

    def ask(self, requests: Sequence[DemoRequest], *, at_once: bool = False) -> list[Answer]:
        """The answers through the router, each request in its own mode."""
        return ask_server(self.url, requests, at_once=at_once, through_router=True)

    def abort(self, engine: Engine, transfer: str, machine: str) -> None:
        """Have one engine drop the request of a transfer, by what its request machine calls it."""
        steps = self.traces().of(transfer).transitions
        name = next(step.peer for step in steps if step.machine == machine)
        # What vLLM calls a request outside has no random end.
        post(engine.url, "/inference/v1/abort_requests", {"request_ids": [name.rpartition("-")[0]]})

    def worker(self, engine: Engine) -> int:
        """The process number of an engine's one worker."""
        found = [
            int(path.stem.rpartition("-")[2])
            for path in self.trace_directory.glob(f"{engine.spec.name}-rank0-*.jsonl")
        ]
        alive = [number for number in found if Path(f"/proc/{number}").exists()]
        assert len(alive) == 1, f"{engine.name} has workers {alive}"
        return alive[0]

    def traces(self) -> Traces:
        return read_traces(self.trace_directory)

    def trace_of(self, answer: Answer, timeout_seconds: float = 20.0) -> TransferTrace:
        """What the transfer of an answer left, once both sides have let go of it; fails if they do not."""
        assert len(answer.transfers) == 1, f"the answer names no transfer, or several: {answer}"
        name = answer.transfers[0]
        wait_until(lambda: self.traces().of(name).is_over, timeout_seconds, f"the end of transfer {name}")
        return self.traces().of(name)


class EngineHouse:
    """At most one pair and one single engine, started when they are asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._pair: Pair | None = None
        self._pair_spec: LocalSetSpec | None = None
        self._single: Engine | None = None
        self._single_kind: Kind | None = None
        self._references: dict[tuple[Kind, DemoRequest], Answer] = {}
        self._starts = 0

    def model(self, kind: Kind) -> Path:
        return make_model(self.root / f"model-{kind}", kind)

    def pair(
        self,
        kind: Kind = "gqa",
        *,
        prefill_tp: int = 1,
        decode_tp: int = 1,
        prefill_dp: int = 1,
        decode_dp: int = 1,
        load_failure_policy: LoadFailurePolicy = "recompute",
        vllm_args: tuple[str, ...] = (),
        **connector_config: Any,
    ) -> Pair:
        """The pair of this kind. The rest of the arguments are settings of the connector, on both engines."""
        spec = LocalSetSpec(
            model=str(self.model(kind)),
            served_model_name=MODEL_NAME,
            logs=Path(),
            prefill=(EngineLayout(tp=prefill_tp, dp=prefill_dp),),
            decode=(EngineLayout(tp=decode_tp, dp=decode_dp),),
            max_model_len=MAX_MODEL_LEN,
            prefill_chunk_tokens=PREFILL_CHUNK_TOKENS,
            load_failure_policy=load_failure_policy,
            connector_config=connector_config,
            # Requests can be aborted by their names then, on one engine alone.
            vllm_args=("--enable-scale-out", *vllm_args),
        )
        if self._pair is not None and self._pair.alive and spec == self._pair_spec:
            return self._pair
        self._stop_pair()
        self._starts += 1
        place = self.root / f"pair-{self._starts}"
        traces = place / "traces"
        traces.mkdir(parents=True)
        faults = FaultDesk(place / "faults")
        ranks = sum(layout.ranks for layout in (*spec.prefill, *spec.decode))
        running = LocalSet(
            msgspec.structs.replace(
                spec,
                logs=place / "logs",
                traces=traces,
                # An engine that is started again finds its old ports.
                connector_config={"port_range": free_port_range(ranks), **connector_config},
                environment={VARIABLE: str(faults.directory)},
            )
        )
        for engine in running.prefill:
            engine.spec = msgspec.structs.replace(engine.spec, max_model_len=PREFILL_MAX_MODEL_LEN)
        running.start()
        self._pair, self._pair_spec = Pair(running, traces, faults), spec
        return self._pair

    def references(self, kind: Kind, requests: Sequence[DemoRequest]) -> list[Answer]:
        """What one engine without a connector answers; asked once for each request in a session."""
        missing = [request for request in requests if (kind, request) not in self._references]
        if missing:
            answers = ask_server(self._reference_engine(kind).url, missing)
            self._references |= {(kind, one): answer for one, answer in zip(missing, answers, strict=True)}
        return [self._references[kind, request] for request in requests]

    def close(self) -> None:
        self._stop_pair()
        self._stop_single()

    def _reference_engine(self, kind: Kind) -> Engine:
        if self._single is None or not self._single.alive or kind != self._single_kind:
            self._stop_single()
            spec = EngineSpec(
                role="single",
                model=str(self.model(kind)),
                log=self.root / f"single-{kind}.log",
                served_model_name=MODEL_NAME,
                max_model_len=MAX_MODEL_LEN,
            )
            self._single, self._single_kind = Engine(spec).start(), kind
            self._single.wait_ready()
        return self._single

    def _stop_pair(self) -> None:
        if self._pair is not None:
            self._pair.running.stop()
            self._pair = None

    def _stop_single(self) -> None:
        if self._single is not None:
            self._single.stop()
            self._single = None


def ask_server(
    url: str, requests: Sequence[DemoRequest], *, at_once: bool = False, through_router: bool = False
) -> list[Answer]:
    """Asks an engine, or the router, from a test that is not asynchronous."""
    asking = ask_all(url, MODEL_NAME, tuple(requests), at_once=at_once, through_router=through_router)
    return asyncio.run(asking)


def prompts(mode: Mode, *tokens: int, title: str = "", output_tokens: int = 16) -> list[DemoRequest]:
    """One request for each number of prompt tokens. Another title gives prompts that no cache holds."""
    return [
        DemoRequest(mode=mode, name=name, prompt=text(name, number), output_tokens=output_tokens)
        for number, name in ((number, f"{number} {title} {mode}") for number in tokens)
    ]


def assert_equal(
    requests: Sequence[DemoRequest], answers: Sequence[Answer], references: Sequence[Answer]
) -> None:
    """Every answer is there and equal to its reference, token for token."""
    for request, answer, reference in zip(requests, answers, references, strict=True):
        assert reference.error is None, f"{request.name}: no reference: {reference.error}"
        assert answer.error is None, f"{request.name}: {answer.error}"
        assert answer.token_ids == reference.token_ids, (
            f"{request.name}: got {answer.text!r}, one engine alone says {reference.text!r}"
        )


def metric(engine: Engine, name: str) -> float:
    """The sum over all labels of a metric that an engine shows."""
    with urllib.request.urlopen(f"{engine.url}/metrics", timeout=10) as response:
        shown = response.read().decode()
    return sum(values(shown, name))


def kv_cache_usage(engine: Engine) -> float:
    """The part of an engine's KV blocks that requests hold, 0 to 1; what is only cached counts as free."""
    return metric(engine, USAGE)


def wait_until(condition: Callable[[], bool], timeout_seconds: float, what: str) -> float:
    """Polls a condition and returns the seconds it took; fails with `what` when the time is over."""
    started = time.monotonic()
    while not condition():
        waited = time.monotonic() - started
        assert waited < timeout_seconds, f"waited {waited:.0f} s in vain for {what}"
        time.sleep(0.1)
    return time.monotonic() - started
