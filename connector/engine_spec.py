"""What to start, and the command line and environment that vLLM wants for it.

An `EngineSpec` describes an engine in words of this project. On a CPU the settings that make two engines
bearable on one host are added; on any other device vLLM's own defaults stand.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from .host import CPU_ENVIRONMENT, device_environment, runs_on_cpu
from .processes import free_port

Role = Literal["prefill", "decode", "single"]
LoadFailurePolicy = Literal["recompute", "fail"]
Executor = Literal["uni", "mp"]
Mode = Literal["blockwise", "blockwise-d-first", "layerwise"]

CONNECTOR = "DFirstConnector"
KV_ROLES: dict[str, str] = {"prefill": "kv_producer", "decode": "kv_consumer"}

# CPU attention takes blocks of a multiple of 32 tokens; the float32 kernels for MLA take 16 and nothing else.
CPU_BLOCK_TOKENS = 32
CPU_MLA_BLOCK_TOKENS = 16
CPU_KV_CACHE_BYTES = 256 * 1024 * 1024

# On a CPU vLLM takes the word "uni" for "mp", because of OpenMP settings that are made here anyway.
UNI_EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One engine. `None` leaves a setting to vLLM, or on a CPU to the defaults above."""

    role: Role
    model: str
    log: Path
    # What requests call the model; P and D of one router must agree.
    served_model_name: str | None = None
    host: str = "127.0.0.1"
    # 0 takes a free one.
    port: int = 0
    tp: int = 1
    dp: int = 1
    # Whether the worker runs inside the engine core's process or in one of its own, as vLLM names it. For one
    # rank on a CPU the default is what vLLM chooses on accelerators: inside.
    executor: Executor | None = None
    # The connector's name for this engine; the role by default.
    engine_id: str | None = None
    block_size: int | None = None
    kv_cache_bytes: int | None = None
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    load_failure_policy: LoadFailurePolicy = "recompute"
    connector_config: dict[str, Any] = {}
    # Places of accelerators, not used on a CPU; empty leaves all visible.
    devices: tuple[int, ...] = ()
    vllm_args: tuple[str, ...] = ()
    environment: dict[str, str] = {}

    @property
    def name(self) -> str:
        return self.engine_id or self.role


class RouterSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The router in front of these engines; `mode` is for requests that name none."""

    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    log: Path
    mode: Mode = "blockwise"
    host: str = "127.0.0.1"
    port: int = 0
    curve_keys: str | None = None


def router_command(spec: RouterSpec, port: int) -> list[str]:
    command = [sys.executable, "-m", "dfirst.connector.cli", "router"]
    command += ["--host", spec.host, "--port", str(port), "--mode", spec.mode]
    for url in spec.prefill:
        command += ["--prefill", url]
    for url in spec.decode:
        command += ["--decode", url]
    if spec.curve_keys is not None:
        command += ["--curve-keys", spec.curve_keys]
    return command


def engine_command(spec: EngineSpec, port: int, *, on_cpu: bool | None = None) -> list[str]:
    """The whole command line of an engine. `vllm serve` is this same module."""
    on_cpu = runs_on_cpu() if on_cpu is None else on_cpu
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", spec.model]
    command += ["--host", spec.host, "--port", str(port), "--tensor-parallel-size", str(spec.tp)]
    if spec.served_model_name is not None:
        command += ["--served-model-name", spec.served_model_name]
    if spec.dp > 1:
        # Engines on one host would else all take vLLM's one default port for the talk between their replicas.
        command += [
            "--data-parallel-size",
            str(spec.dp),
            "--data-parallel-rpc-port",
            str(free_port(spec.host)),
        ]
    block_size, kv_cache_bytes = spec.block_size, spec.kv_cache_bytes
    if on_cpu:
        # Compiling costs half a minute of start-up, and a small model gains nothing by it.
        command += ["--dtype", "float32", "--enforce-eager"]
        kv_cache_bytes = kv_cache_bytes or CPU_KV_CACHE_BYTES
        mla = uses_mla(spec.model)
        block_size = block_size or (CPU_MLA_BLOCK_TOKENS if mla else CPU_BLOCK_TOKENS)
        if mla:
            # Where the processor has AMX, vLLM would choose kernels that refuse float32.
            command += ["--attention-backend", "CPU_MLA"]
            # The compiled rotary kernel goes wrong on MLA's strided queries: answers change with the batch.
            command += ["--compilation-config", '{"custom_ops": ["all", "-rotary_embedding"]}']
    for flag, value in (
        ("--distributed-executor-backend", _executor(spec, on_cpu)),
        ("--block-size", block_size),
        ("--kv-cache-memory-bytes", kv_cache_bytes),
        ("--max-num-batched-tokens", spec.max_num_batched_tokens),
        ("--max-model-len", spec.max_model_len),
    ):
        if value is not None:
            command += [flag, str(value)]
    if spec.role != "single":
        command += ["--kv-transfer-config", json.dumps(kv_transfer_config(spec))]
    return [*command, *spec.vllm_args]


def _executor(spec: EngineSpec, on_cpu: bool) -> str | None:
    """What vLLM is told of it, if anything."""
    one_rank = spec.tp * spec.dp == 1 and not any("parallel" in argument for argument in spec.vllm_args)
    if on_cpu and (spec.executor == "uni" or (spec.executor is None and one_rank)):
        return UNI_EXECUTOR
    return spec.executor


def kv_transfer_config(spec: EngineSpec) -> dict[str, Any]:
    """What a user would write after `--kv-transfer-config` for this engine."""
    return {
        "kv_connector": CONNECTOR,
        "kv_role": KV_ROLES[spec.role],
        "engine_id": spec.name,
        "kv_load_failure_policy": spec.load_failure_policy,
        "kv_connector_extra_config": spec.connector_config,
    }


def engine_environment(
    spec: EngineSpec, inherited: Mapping[str, str], *, on_cpu: bool | None = None
) -> dict[str, str]:
    on_cpu = runs_on_cpu() if on_cpu is None else on_cpu
    environment = dict(inherited)
    if on_cpu:
        environment |= CPU_ENVIRONMENT
    elif spec.devices:
        environment |= device_environment(spec.devices, inherited)
    return environment | spec.environment


def uses_mla(model: str) -> bool:
    """Whether a model directory describes multi-head latent attention; a model known by name alone: no."""
    config = Path(model) / "config.json"
    if not config.is_file():
        return False
    return json.loads(config.read_text()).get("kv_lora_rank") is not None


def block_tokens(model: str) -> int:
    """Tokens in one KV block of an engine started on a CPU with the defaults here."""
    return CPU_MLA_BLOCK_TOKENS if uses_mla(model) else CPU_BLOCK_TOKENS
