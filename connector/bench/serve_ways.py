"""The ways of serving that `bench serve` compares, each with the servers that it needs.

All engines are this host's, of one model, with the same settings but for the connector.
"""

import json
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from ..demo_client import MODE_HEADER
from ..engine_spec import EngineSpec, Executor, Role, RouterSpec
from ..launch import Engine, RouterProcess, Server
from ..processes import free_port

MODEL_NAME = "bench"
HOST = "127.0.0.1"
ALONE, MOONCAKE, NIXL = "alone", "mooncake", "nixl"
BLOCKWISE, BLOCKWISE_D_FIRST, LAYERWISE = "blockwise", "blockwise-d-first", "layerwise"
TITLES = {
    ALONE: "one engine alone",
    BLOCKWISE: "dfirst block-wise",
    BLOCKWISE_D_FIRST: "dfirst block-wise, D-first",
    LAYERWISE: "dfirst layer-wise",
    MOONCAKE: "vLLM's MooncakeConnector",
    NIXL: "vLLM's NixlConnector",
}
DFIRST_WAYS = (BLOCKWISE, BLOCKWISE_D_FIRST, LAYERWISE)


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """One way: where requests go, with which headers, and the processes whose CPU time counts."""

    name: str
    """A key of ``TITLES``."""
    url: str
    headers: dict[str, str] = {}
    servers: tuple[Server, ...]


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What all engines have in common."""

    model: Path
    logs: Path
    max_model_len: int
    kv_cache_bytes: int
    prefill_chunk_tokens: int
    executor: Executor


class MooncakeRouterProcess(Server):
    """The router of `serve_mooncake_router`, in a process of its own like dfirst's."""

    def __init__(self, prefill: str, decode: str, bootstrap: str, log: Path) -> None:
        super().__init__("the router for MooncakeConnector", HOST, 0, log)
        self._peers = (prefill, decode, bootstrap)

    def _command(self) -> list[str]:
        module = "dfirst.connector.bench.serve_mooncake_router"
        return [sys.executable, "-m", module, str(self.port), *self._peers]


def missing_for(way: str) -> str | None:
    """Return why a way cannot be measured on this host, in a sentence; None if it can."""
    if way == NIXL and find_spec("nixl") is None:
        return "the package nixl is not installed"
    if way == MOONCAKE and find_spec("mooncake") is None:
        return "the package mooncake-transfer-engine is not installed"
    return None


def make_ways(names: Sequence[str], settings: EngineSettings) -> list[Way]:
    """Return the named ways, not started yet. All of dfirst's modes share one pair of engines."""
    ways: list[Way] = []
    if ALONE in names:
        ways.append(_alone(settings))
    chosen = [name for name in DFIRST_WAYS if name in names]
    if chosen:
        ways += _dfirst(chosen, settings)
    if MOONCAKE in names:
        ways.append(_mooncake(settings))
    if NIXL in names:
        ways.append(_nixl(settings))
    return ways


def _alone(settings: EngineSettings) -> Way:
    engine = _engine(settings, "single", "one-engine", None)
    return Way(name=ALONE, url=engine.url, servers=(engine,))


def _dfirst(names: Sequence[str], settings: EngineSettings) -> list[Way]:
    prefill = _engine(settings, "prefill", "dfirst-prefill", None)
    decode = _engine(settings, "decode", "dfirst-decode", None)
    router = _dfirst_router("dfirst-router", prefill, decode, settings)
    return [
        Way(
            name=name,
            url=router.url,
            headers={MODE_HEADER: name},
            servers=(prefill, decode, router),
        )
        for name in names
    ]


def _mooncake(settings: EngineSettings) -> Way:
    bootstrap_port = free_port(HOST)
    config = {
        "kv_connector": "MooncakeConnectorOnCpu",
        "kv_connector_module_path": "dfirst.connector.bench.serve_mooncake",
        "kv_connector_extra_config": {"mooncake_protocol": "tcp"},
    }
    environment = {"VLLM_MOONCAKE_BOOTSTRAP_PORT": str(bootstrap_port)}
    prefill, decode = _pair_of_the_field("mooncake", config, settings, environment)
    router = MooncakeRouterProcess(
        prefill.url, decode.url, f"http://{HOST}:{bootstrap_port}", settings.logs / "mooncake-router.log"
    )
    return Way(name=MOONCAKE, url=router.url, servers=(prefill, decode, router))


def _nixl(settings: EngineSettings) -> Way:
    config = {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu"}
    prefill, decode = _pair_of_the_field("nixl", config, settings, {})
    # Its protocol towards a router is the one that dfirst's block-wise mode has taken over.
    router = _dfirst_router("nixl-router", prefill, decode, settings)
    return Way(
        name=NIXL, url=router.url, headers={MODE_HEADER: "blockwise"}, servers=(prefill, decode, router)
    )


def _pair_of_the_field(
    name: str, config: dict[str, Any], settings: EngineSettings, environment: dict[str, str]
) -> tuple[Engine, Engine]:
    engines = []
    for side, role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
        own = {
            **config,
            "kv_role": role,
            "engine_id": f"{name}-{side}",
        }
        ports = {"VLLM_NIXL_SIDE_CHANNEL_HOST": HOST, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port(HOST))}
        engines.append(_engine(settings, "single", f"{name}-{side}", own, ports | environment))
    prefill, decode = engines
    return prefill, decode


def _engine(
    settings: EngineSettings,
    role: Role,
    name: str,
    transfer_config: dict[str, Any] | None,
    environment: dict[str, str] | None = None,
) -> Engine:
    """An engine with dfirst's connector (role prefill or decode), with another one's, or with none."""
    arguments = () if transfer_config is None else ("--kv-transfer-config", json.dumps(transfer_config))
    return Engine(
        EngineSpec(
            role=role,
            model=str(settings.model),
            log=settings.logs / f"{name}.log",
            served_model_name=MODEL_NAME,
            engine_id=name,
            max_model_len=settings.max_model_len,
            kv_cache_bytes=settings.kv_cache_bytes,
            max_num_batched_tokens=settings.prefill_chunk_tokens,
            executor=settings.executor,
            vllm_args=arguments,
            environment=environment or {},
        )
    )


def _dfirst_router(name: str, prefill: Engine, decode: Engine, settings: EngineSettings) -> RouterProcess:
    return RouterProcess(
        RouterSpec(prefill=(prefill.url,), decode=(decode.url,), log=settings.logs / f"{name}.log")
    )
