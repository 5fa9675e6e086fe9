"""Reads what vLLM itself says of its blocks."""

import re

import httpx

USAGE = "vllm:kv_cache_usage_perc"
PREEMPTIONS = "vllm:num_preemptions_total"
TIMEOUT_SECONDS = 10.0


async def blocks_in_use(client: httpx.AsyncClient, url: str) -> int:
    """Return how many KV blocks of an engine requests hold; what is only cached counts as free."""
    shown = await _metrics(client, url)
    blocks = re.findall(r'^vllm:cache_config_info\{[^}]*num_gpu_blocks="(\d+)"', shown, flags=re.MULTILINE)
    return sum(round(usage * int(count)) for usage, count in zip(values(shown, USAGE), blocks, strict=True))


async def preemptions(client: httpx.AsyncClient, url: str) -> int:
    """Return how often an engine took a running request's blocks away since it was started."""
    return round(sum(values(await _metrics(client, url), PREEMPTIONS)))


async def _metrics(client: httpx.AsyncClient, url: str) -> str:
    response = await client.get(f"{url}/metrics", timeout=TIMEOUT_SECONDS)
    response.raise_for_status()
    return response.text


def values(shown: str, name: str) -> list[float]:
    """Return a metric's value for each of its labels; raise ``ValueError`` if there is none."""
    found = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? ([0-9.eE+-]+)$", shown, flags=re.MULTILINE)
    if not found:
        raise ValueError(f"the engine's metrics show no {name}")
    return [float(value) for value in found]
