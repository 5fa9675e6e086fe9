"""P engines, D engines and the router in front of them, started and stopped together on this host."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from .engine_options import EngineLayout, place
from .engine_spec import EngineSpec, LoadFailurePolicy, Mode, Role, RouterSpec
from .launch import START_SECONDS, Engine, RouterProcess, Server

Around = Callable[[str], AbstractContextManager[None]]


class LocalSetSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What to start. Logs go to `logs`, traces (if wanted) to `traces`."""

    model: str
    served_model_name: str
    logs: Path
    traces: Path | None = None
    prefill: tuple[EngineLayout, ...] = (EngineLayout(),)
    decode: tuple[EngineLayout, ...] = (EngineLayout(),)
    mode: Mode = "blockwise"
    host: str = "127.0.0.1"
    router_port: int = 0
    max_model_len: int | None = None
    # Chunks of P's prefill; D keeps vLLM's own.
    prefill_chunk_tokens: int | None = None
    kv_cache_bytes: int | None = None
    load_failure_policy: LoadFailurePolicy = "recompute"
    # The directory with the keys of the side channel, for the engines and the router.
    curve_keys: str | None = None
    connector_config: dict[str, Any] = {}
    vllm_args: tuple[str, ...] = ()
    # Of the engines, beside what they inherit.
    environment: dict[str, str] = {}


def silently(what: str) -> AbstractContextManager[None]:
    """An `Around` that shows nothing."""
    return nullcontext()


class LocalSet:
    """The running set. `with LocalSet(spec) as running:` starts all and stops all."""

    def __init__(self, spec: LocalSetSpec) -> None:
        self.spec = spec
        layouts = [*spec.prefill, *spec.decode]
        devices = place(layouts)
        count = len(spec.prefill)
        self.prefill = [
            self._engine("prefill", number, layout, where)
            for number, (layout, where) in enumerate(zip(spec.prefill, devices[:count], strict=True), start=1)
        ]
        self.decode = [
            self._engine("decode", number, layout, where)
            for number, (layout, where) in enumerate(zip(spec.decode, devices[count:], strict=True), start=1)
        ]
        self.router = RouterProcess(
            RouterSpec(
                prefill=tuple(engine.url for engine in self.prefill),
                decode=tuple(engine.url for engine in self.decode),
                log=spec.logs / "router.log",
                mode=spec.mode,
                host=spec.host,
                port=spec.router_port,
                curve_keys=spec.curve_keys,
            )
        )

    @property
    def engines(self) -> list[Engine]:
        return [*self.prefill, *self.decode]

    @property
    def servers(self) -> Sequence[Server]:
        return [self.router, *self.engines]

    def start(self, around: Around = silently, timeout_seconds: float = START_SECONDS) -> None:
        """Starts the engines side by side, then the router; `around` shows what is waited for."""
        try:
            for engine in self.engines:
                engine.start()
            for engine in self.engines:
                with around(f"starting {engine.name}"):
                    engine.wait_ready(timeout_seconds)
            with around("starting the router"):
                self.router.start().wait_ready(timeout_seconds)
        except BaseException:
            self.stop()
            raise

    def check(self) -> None:
        """Raises `LaunchError` if one of them has ended."""
        for server in self.servers:
            server.check()

    def stop(self) -> None:
        for server in self.servers:
            server.ask_to_stop()
        for server in self.servers:
            server.stop()

    def __enter__(self) -> "LocalSet":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _engine(self, role: Role, number: int, layout: EngineLayout, devices: tuple[int, ...]) -> Engine:
        spec = self.spec
        alone = len(spec.prefill if role == "prefill" else spec.decode) == 1
        name = role if alone else f"{role}-{number}"
        config = dict(spec.connector_config)
        if spec.traces is not None:
            config["trace_path"] = str(spec.traces)
        if spec.curve_keys is not None:
            config["curve_keys"] = spec.curve_keys
        return Engine(
            EngineSpec(
                role=role,
                model=spec.model,
                log=spec.logs / f"{name}.log",
                served_model_name=spec.served_model_name,
                host=spec.host,
                tp=layout.tp,
                dp=layout.dp,
                engine_id=name,
                kv_cache_bytes=spec.kv_cache_bytes,
                max_num_batched_tokens=spec.prefill_chunk_tokens if role == "prefill" else None,
                max_model_len=spec.max_model_len,
                load_failure_policy=spec.load_failure_policy,
                connector_config=config,
                devices=devices,
                vllm_args=spec.vllm_args,
                environment=spec.environment,
            )
        )
