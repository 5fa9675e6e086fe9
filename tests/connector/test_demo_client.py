"""How the demo asks, and what it makes of answers, good and bad."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from dfirst.connector.demo_client import Answer, ask
from dfirst.connector.demo_prompts import (
    SHARED_FIRST,
    SHARED_SECOND,
    DemoRequest,
    demo_rounds,
)
from dfirst.connector.engine_spec import Mode

USAGE = {"prompt_tokens": 5, "completion_tokens": 2}
PLAIN = DemoRequest(mode="blockwise", name="plain", prompt="hello")
STREAM = DemoRequest(mode="layerwise", name="stream", prompt="hello", stream=True)
CHAT = DemoRequest(mode="layerwise", name="chat", prompt="hello", chat=True)


def answer_to(request: DemoRequest, handler: Callable[[httpx.Request], httpx.Response]) -> Answer:
    async def go() -> Answer:
        async with httpx.AsyncClient(transport=httpx.MockTransport(handler), base_url="http://r") as client:
            return await ask(client, "demo", request, True)

    return asyncio.run(go())


def completion(**choice: Any) -> httpx.Response:
    return httpx.Response(
        200, json={"choices": [choice], "usage": USAGE}, headers={"X-DFirst-Transfer": "t1, t2"}
    )


def events(*payloads: Any, end: str = "data: [DONE]\n\n") -> httpx.Response:
    return httpx.Response(200, text="".join(f"data: {json.dumps(one)}\n\n" for one in payloads) + end)


def test_a_request_names_its_mode_and_asks_for_token_ids() -> None:
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return completion(text="hi", token_ids=[1, 2])

    answer = answer_to(PLAIN, handler)
    body = json.loads(seen[0].content)
    assert seen[0].headers["X-DFirst-Mode"] == "blockwise"
    assert (body["temperature"], body["return_token_ids"], body["prompt"]) == (0, True, "hello")
    assert (answer.token_ids, answer.text, answer.prompt_tokens) == ((1, 2), "hi", 5)
    assert answer.transfers == ("t1", "t2")


def test_a_chat_goes_to_its_own_path() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/v1/chat/completions"
        assert json.loads(request.content)["messages"] == [{"role": "user", "content": "hello"}]
        return completion(message={"content": "hi"}, token_ids=[7])

    assert answer_to(CHAT, handler).text == "hi"


def test_a_stream_is_put_together() -> None:
    parts = [{"choices": [{"text": text, "token_ids": ids}]} for text, ids in (("h", [1]), ("i", [2, 3]))]
    answer = answer_to(STREAM, lambda _: events(*parts, {"choices": [], "usage": USAGE}))
    assert (answer.text, answer.token_ids, answer.error) == ("hi", (1, 2, 3), None)


@pytest.mark.parametrize(
    ("response", "error"),
    [
        (httpx.Response(502, text="no engine"), "HTTP 502: no engine"),
        (httpx.Response(200, text="<html>"), "JSON is malformed"),
        (httpx.Response(200, json={"choices": [{"token_ids": "x"}]}), "Expected `array | null`"),
        (httpx.Response(200, json={"choices": [{"text": "hi"}]}), "no usage"),
    ],
)
def test_a_bad_answer_is_an_error_in_words(response: httpx.Response, error: str) -> None:
    answer = answer_to(PLAIN, lambda _: response)
    assert answer.error is not None
    assert error in answer.error
    assert not answer.equals(answer)


@pytest.mark.parametrize(
    ("response", "error"),
    [
        (events({"choices": [{"text": "h"}]}, end=""), "the stream ended without [DONE]"),
        (events({"error": {"message": "engine died"}}), "an error: {'message': 'engine died'}"),
    ],
)
def test_a_stream_that_breaks_off_is_an_error(response: httpx.Response, error: str) -> None:
    assert error in (answer_to(STREAM, lambda _: response).error or "")


def test_a_server_that_is_not_there_is_an_error_too() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("connection refused")

    assert answer_to(PLAIN, refuse).error == "no answer from http://r: ConnectError connection refused"


def test_answers_are_compared_by_token_and_by_text_where_there_are_none() -> None:
    def answer(text: str, ids: tuple[int, ...] | None) -> Answer:
        return Answer(sent=0, answered=1, text=text, token_ids=ids)

    assert answer("a", (1,)).equals(answer("b", (1,)))
    assert not answer("a", (1,)).equals(answer("a", (2,)))
    assert answer("a", None).equals(answer("a", (1,)))
    assert not answer("a", None).equals(answer("b", None))


@pytest.mark.parametrize("block", [16, 32])
def test_no_two_prompts_share_a_block_but_those_that_are_meant_to(block: int) -> None:
    modes: tuple[Mode, ...] = ("blockwise", "layerwise")
    requests = [one for mode in modes for round_ in demo_rounds(mode, block, 256) for one in round_]
    shared = [one for one in requests if one.name in (SHARED_FIRST, SHARED_SECOND)]
    first_blocks = [one.prompt[:block] for one in requests if len(one.prompt) >= block]
    assert len(first_blocks) - len(set(first_blocks)) == 2
    for first, second in zip(shared[::2], shared[1::2], strict=True):
        assert first.prompt[: 10 * block] == second.prompt[: 10 * block]
        assert first.prompt[10 * block :][:block] != second.prompt[10 * block :][:block]


@pytest.mark.parametrize("block", [16, 32])
def test_a_mode_has_all_the_lengths_that_matter(block: int) -> None:
    rounds = demo_rounds("blockwise", block, 256)
    lengths = [len(one.prompt) for round_ in rounds for one in round_]
    assert len(lengths) >= 12
    assert min(lengths) < block
    assert any(length % block == 0 for length in lengths)
    assert any(length > 2 * 256 for length in lengths)
    assert max(len(round_) for round_ in rounds) == 8
    assert any(one.stream for round_ in rounds for one in round_)
    assert any(one.chat for round_ in rounds for one in round_)
