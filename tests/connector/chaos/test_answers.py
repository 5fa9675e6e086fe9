"""Answers are judged token by token, and nothing that is amiss is taken for an answer."""

import asyncio
import json
from collections.abc import Awaitable, Callable

import httpx
import pytest
from dfirst.connector.chaos import answers
from dfirst.connector.chaos.answers import Exchange, Verdict
from dfirst.connector.chaos.load import Question
from dfirst.connector.demo_client import Answer
from dfirst.connector.demo_prompts import DemoRequest

PROMPT = DemoRequest(mode="blockwise", name="one", prompt="x", output_tokens=3)
REFERENCE = Answer(sent=0, answered=0, token_ids=(1, 2, 3))
OPENAI = {"error": {"message": "it broke (transfer t)", "type": "engine_error", "code": 502}}

Handler = Callable[[httpx.Request], Awaitable[httpx.Response]]


def asked(stream: bool) -> Exchange:
    return Exchange(Question(7, "layerwise", 0, stream, "salt"), PROMPT, REFERENCE)


def judged(response: httpx.Response, stream: bool = False) -> Verdict:
    async def answer(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        assert body["cache_salt"] == "salt"
        assert body["stream"] is True if stream else "stream" not in body
        assert request.headers["X-Request-Id"] == "chaos-7"
        assert request.headers["X-DFirst-Mode"] == "layerwise"
        return response

    return run(asked(stream), answer)


def run(exchange: Exchange, handler: Handler) -> Verdict:
    async def ask() -> Verdict:
        async with httpx.AsyncClient(transport=httpx.MockTransport(handler)) as client:
            return (await exchange.run(client, "http://router", "m"))[0]

    return asyncio.run(ask())


def whole(*tokens: int, reason: str = "length") -> httpx.Response:
    choice = {"text": "", "token_ids": tokens, "finish_reason": reason}
    return httpx.Response(200, json={"choices": [choice]})


def stream(*events: object, done: bool = True) -> httpx.Response:
    lines = [f"data: {json.dumps(event)}\n\n" for event in events]
    return httpx.Response(200, text="".join(lines) + ("data: [DONE]\n\n" if done else ""))


def chunk(*tokens: int) -> dict[str, object]:
    return {"choices": [{"text": "", "token_ids": tokens}]}


@pytest.mark.parametrize(
    ("response", "verdict"),
    [
        (whole(1, 2, 3), "right"),
        (whole(1, 2, 4), "wrong"),
        (whole(1, 2), "wrong"),
        (whole(1, 2, 3, 4), "wrong"),
        (whole(), "wrong"),
        (whole(1, 2, reason="abort"), "aborted"),
        (whole(1, 4, reason="abort"), "wrong"),
        (httpx.Response(502, json=OPENAI), "error"),
        (httpx.Response(502, json={"detail": "x"}), "formless"),
        (httpx.Response(500, text="Internal Server Error"), "formless"),
        (httpx.Response(200, text="what"), "formless"),
    ],
)
def test_a_whole_answer(response: httpx.Response, verdict: Verdict) -> None:
    assert judged(response) == verdict


@pytest.mark.parametrize(
    ("response", "verdict"),
    [
        (stream(chunk(1), chunk(2, 3)), "right"),
        (stream(chunk(1), chunk(2, 4)), "wrong"),
        (stream(chunk(1)), "wrong"),
        (stream(chunk(1), done=False), "cut"),
        (stream(chunk(4), done=False), "wrong"),
        (stream(chunk(1), OPENAI), "error"),
        (stream(chunk(4), OPENAI), "wrong"),
        (stream(chunk(1), "what"), "formless"),
        (httpx.Response(503, json=OPENAI), "error"),
    ],
)
def test_a_stream(response: httpx.Response, verdict: Verdict) -> None:
    assert judged(response, stream=True) == verdict


@pytest.mark.parametrize(("tokens", "verdict"), [((), "aborted"), ((1,), "aborted"), ((4,), "wrong")])
def test_a_stream_that_an_abort_ends_without_a_word(tokens: tuple[int, ...], verdict: Verdict) -> None:
    async def answer(request: httpx.Request) -> httpx.Response:
        return stream(*(chunk(token) for token in tokens))

    exchange = asked(True)
    exchange.abort_ordered = True
    assert run(exchange, answer) == verdict


def test_a_connection_that_breaks() -> None:
    async def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    assert run(asked(False), refuse) == "cut"


def test_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "ANSWER_SECONDS", 0.05)

    async def say_nothing(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(30)
        return whole(1, 2, 3)

    assert run(asked(False), say_nothing) == "silent"


@pytest.mark.parametrize(("tokens", "verdict"), [((1, 2), "left"), ((1, 4), "wrong")])
def test_what_a_client_had_when_it_left_must_be_right(tokens: tuple[int, ...], verdict: Verdict) -> None:
    exchange = asked(True)
    exchange._status = 200
    exchange._received += stream(*(chunk(token) for token in tokens), done=False).content + b'data: {"cho'
    assert exchange.broken_off()[0] == verdict
