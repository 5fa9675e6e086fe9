"""Sends the demo's requests to an OpenAI-compatible server and brings back token ids."""

import asyncio
import time
from typing import Any

import httpx
import msgspec

from .demo_prompts import DemoRequest

MODE_HEADER = "X-DFirst-Mode"
TRANSFER_HEADER = "X-DFirst-Transfer"
ANSWER_SECONDS = 120.0
EXCERPT_CHARACTERS = 300


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What came back. `error` is None for a whole answer; `sent` and `answered` are seconds since 1970."""

    sent: float
    answered: float
    text: str = ""
    token_ids: tuple[int, ...] | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    transfers: tuple[str, ...] = ()
    error: str | None = None

    def equals(self, reference: "Answer") -> bool:
        """Token for token; by the text where a server does not tell its token ids."""
        if self.error is not None or reference.error is not None:
            return False
        if self.token_ids is None or reference.token_ids is None:
            return self.text == reference.text
        return self.token_ids == reference.token_ids


class Message(msgspec.Struct):
    content: str | None = None


class Choice(msgspec.Struct):
    """Of a completion (`text`), a chat (`message`) or a chat's stream (`delta`)."""

    text: str | None = None
    message: Message | None = None
    delta: Message | None = None
    token_ids: list[int] | None = None

    @property
    def content(self) -> str:
        message = self.message or self.delta
        return self.text or (message.content if message else None) or ""


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int = 0


class Completion(msgspec.Struct):
    """A whole answer, or one event of a stream."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


async def ask_all(
    url: str, model: str, requests: tuple[DemoRequest, ...], *, at_once: bool, through_router: bool
) -> list[Answer]:
    """The answers in the order of the requests, which are sent together or one after the other."""
    # The engines are on this host: a proxy that the environment names is not for them.
    async with httpx.AsyncClient(base_url=url, timeout=ANSWER_SECONDS, trust_env=False) as client:
        if at_once:
            return await asyncio.gather(*(ask(client, model, one, through_router) for one in requests))
        return [await ask(client, model, one, through_router) for one in requests]


async def ask(client: httpx.AsyncClient, model: str, request: DemoRequest, through_router: bool) -> Answer:
    """One request and its whole answer. What goes wrong on the way is an answer too, with its `error`."""
    path = "/v1/chat/completions" if request.chat else "/v1/completions"
    headers = {MODE_HEADER: request.mode} if through_router else {}
    sent = time.time()
    try:
        response = await client.post(path, json=request_body(model, request), headers=headers)
    except httpx.HTTPError as error:
        what = f"{type(error).__name__} {error}".strip()
        return Answer(sent=sent, answered=time.time(), error=f"no answer from {client.base_url}: {what}")
    named = (name.strip() for name in response.headers.get(TRANSFER_HEADER, "").split(","))
    answer = Answer(sent=sent, answered=time.time(), transfers=tuple(name for name in named if name))
    excerpt = response.text[:EXCERPT_CHARACTERS]
    if response.status_code != 200:
        return msgspec.structs.replace(answer, error=f"HTTP {response.status_code}: {excerpt}")
    try:
        events = read_events(response.text) if request.stream else [_completion.decode(response.content)]
        return fill(answer, events)
    except ValueError as error:
        return msgspec.structs.replace(answer, error=f"{error}, in the answer {excerpt}")


def request_body(model: str, request: DemoRequest) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": request.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    if request.chat:
        body["messages"] = [{"role": "user", "content": request.prompt}]
    else:
        body["prompt"] = request.prompt
    if request.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body


def read_events(body: str) -> list[Completion]:
    """The events of a stream. A ValueError if it breaks off."""
    events: list[Completion] = []
    for line in body.splitlines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return events
        events.append(_completion.decode(data))
    raise ValueError("the stream ended without [DONE]")


def fill(answer: Answer, events: list[Completion]) -> Answer:
    """Adds the text, the tokens and their numbers. A ValueError if an event is an error or none counts."""
    for event in events:
        if event.error is not None:
            raise ValueError(f"an error: {event.error}")
    usage = next((event.usage for event in reversed(events) if event.usage is not None), None)
    if usage is None:
        raise ValueError("no usage")
    choices = [choice for event in events for choice in event.choices]
    token_ids = tuple(token for choice in choices for token in choice.token_ids or ())
    return msgspec.structs.replace(
        answer,
        text="".join(choice.content for choice in choices),
        token_ids=token_ids or None,
        prompt_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
    )


_completion = msgspec.json.Decoder(Completion)
