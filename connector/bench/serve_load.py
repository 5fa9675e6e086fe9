"""Sends a benchmark's prompts as streams and takes the time of every first token."""

import asyncio
import time
from collections.abc import Iterator, Sequence

import httpx
import msgspec

from ..demo_client import Completion
from ..demo_prompts import text

ANSWER_SECONDS = 180.0
PATH = "/v1/completions"


class LoadError(RuntimeError):
    """A request of a benchmark was not answered as it should be: there is nothing to measure then."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One answered request."""

    first_token_seconds: float
    """From sending the request to the first token of its answer."""
    seconds: float
    """To the end of its answer."""
    tokens: int
    """Tokens of the answer."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """So many requests of so many tokens, some of them at once."""

    prompt_tokens: int
    output_tokens: int
    requests: int
    at_once: int
    in_bursts: bool = False
    """Whether the next ones are only sent when all of the last ones are answered. Else each answer is
    followed by another request at once, and a faster answer makes that one wait longer for its turn.
    """


def prompts(load: Load, title: str) -> list[str]:
    """Prompts that share no block: a cache of prefixes answers none of them. In the model a character is a
    token.
    """
    return [text(f"{number} {title}", load.prompt_tokens) for number in range(load.requests)]


def open_client(url: str, headers: dict[str, str]) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    # The servers are on this host: a proxy that the environment names is not for them.
    return httpx.AsyncClient(
        base_url=url, headers=headers, timeout=ANSWER_SECONDS, limits=limits, trust_env=False
    )


async def run_load(
    client: httpx.AsyncClient, model: str, asked: Sequence[str], load: Load
) -> tuple[list[Sample], float]:
    """Send the prompts as the load says; return what each took, and the seconds of all.

    Raises ``LoadError`` for the first answer that is not what was asked for.
    """
    started = time.perf_counter()
    size = load.at_once if load.in_bursts else len(asked)
    samples: list[Sample] = []
    for first in range(0, len(asked), max(size, 1)):
        waiting = iter(asked[first : first + size])
        lanes = [_lane(client, model, waiting, load) for _ in range(min(load.at_once, size))]
        samples += [sample for lane in await asyncio.gather(*lanes) for sample in lane]
    return samples, time.perf_counter() - started


async def _lane(client: httpx.AsyncClient, model: str, waiting: Iterator[str], load: Load) -> list[Sample]:
    return [await _ask(client, model, prompt, load) for prompt in waiting]


async def _ask(client: httpx.AsyncClient, model: str, prompt: str, load: Load) -> Sample:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": load.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started = time.perf_counter()
    first: float | None = None
    tokens = 0
    try:
        async with client.stream("POST", PATH, json=body) as response:
            if response.status_code != 200:
                raise LoadError(f"HTTP {response.status_code}: {(await response.aread())[:300]!r}")
            async for line in response.aiter_lines():
                if not line.startswith("data:"):
                    continue
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    break
                event = _completion.decode(data)
                if event.error is not None:
                    raise LoadError(f"an error in the stream: {event.error}")
                if first is None and event.choices:
                    first = time.perf_counter()
                if event.usage is not None:
                    tokens = event.usage.completion_tokens
    except httpx.HTTPError as error:
        raise LoadError(f"no answer from {client.base_url}: {type(error).__name__} {error}") from error
    if first is None or tokens != load.output_tokens:
        raise LoadError(f"{tokens} tokens came instead of {load.output_tokens}")
    return Sample(first_token_seconds=first - started, seconds=time.perf_counter() - started, tokens=tokens)


_completion = msgspec.json.Decoder(Completion)
