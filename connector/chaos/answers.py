"""Asks, and judges what comes back: token by token against what one engine alone answers."""

from typing import Any, Literal

import anyio
import httpx
import msgspec

from ..demo_client import MODE_HEADER, Answer, request_body
from ..demo_client import Choice as DemoChoice
from ..demo_prompts import DemoRequest
from .load import Question
from .plan import ServerName

ANSWER_SECONDS = 120.0
"""Longer than any lease, time-out and recomputation on a busy machine; after it, a request has no answer."""
EXCERPT_CHARACTERS = 300

Verdict = Literal["right", "wrong", "error", "formless", "cut", "silent", "left", "aborted"]
"""`error`: in OpenAI's form; `formless`: another one; `cut`: the connection broke; `silent`: nothing came in
time; `left`: the client hung up, and what it had was right; `aborted`: an engine dropped it, and said so.
"""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A request and what became of it. Times are seconds since 1970."""

    question: Question
    server: ServerName = "router"
    """Who was asked."""
    sent: float
    ended: float
    verdict: Verdict
    detail: str = ""


class Choice(DemoChoice):
    """With the reason for its end."""

    finish_reason: str | None = None


class ErrorDetail(msgspec.Struct):
    """OpenAI's form."""

    message: str
    type: str
    code: int | str | None = None


class Event(msgspec.Struct):
    """A whole answer, or one event of a stream."""

    choices: list[Choice] = []
    error: ErrorDetail | None = None


class ErrorBody(msgspec.Struct):
    error: ErrorDetail


class Exchange:
    """One request to a server. What was received stays here, also if it is broken off."""

    def __init__(self, question: Question, prompt: DemoRequest, reference: Answer) -> None:
        self.question = question
        self._prompt = prompt
        self._reference = reference
        self.abort_ordered = False
        """The decode engine has been told to drop it: its answer may end early."""
        self._received = bytearray()
        self._status = 0

    async def run(self, client: httpx.AsyncClient, url: str, model: str, **more: Any) -> tuple[Verdict, str]:
        """Ask and wait for the end. ``more`` goes into the body."""
        request = msgspec.structs.replace(self._prompt, stream=self.question.stream)
        body = request_body(model, request) | {"cache_salt": self.question.salt} | more
        headers = {MODE_HEADER: self.question.mode, "X-Request-Id": self.question.client_id}
        try:
            with anyio.fail_after(ANSWER_SECONDS):
                async with client.stream(
                    "POST", f"{url}/v1/completions", json=body, headers=headers
                ) as response:
                    self._status = response.status_code
                    async for chunk in response.aiter_bytes():
                        self._received += chunk
        except TimeoutError:
            return "silent", f"no answer within {ANSWER_SECONDS:g} s, {len(self._received)} bytes of one"
        except httpx.HTTPError as error:
            verdict, detail = self.broken_off()
            why = f"{type(error).__name__} {error}".strip()
            return ("wrong", detail) if verdict == "wrong" else ("cut", why)
        return self._judge()

    def broken_off(self) -> tuple[Verdict, str]:
        """Judge what had come by the time at which the client left: not a token of it may be wrong."""
        if self._status != 200 or not self.question.stream:
            return "left", ""
        tokens, _, problem = self._read_stream()
        if problem and problem[0] != "cut":
            return problem
        return self._compare(tokens, whole=False) or ("left", "")

    def _judge(self) -> tuple[Verdict, str]:
        body = bytes(self._received)
        if self._status != 200:
            try:
                error = msgspec.json.decode(body, type=ErrorBody).error
            except msgspec.DecodeError:
                return "formless", f"HTTP {self._status}: {excerpt(body)}"
            return "error", f"HTTP {self._status}: {error.message[:EXCERPT_CHARACTERS]}"
        if self.question.stream:
            tokens, reason, problem = self._read_stream()
            if problem:
                return self._compare(tokens, whole=False) or problem
        else:
            try:
                event = _events.decode(body)
            except msgspec.DecodeError as error:
                return "formless", f"{error}: {excerpt(body)}"
            tokens, reason = tokens_of(event), reason_of(event)
        # vLLM names no reason for the end of a stream that it aborts before the first token.
        if reason == "abort" or (self.abort_ordered and not reason):
            return self._compare(tokens, whole=False) or ("aborted", "")
        return self._compare(tokens, whole=True) or ("right", "")

    def _read_stream(self) -> tuple[list[int], str, tuple[Verdict, str] | None]:
        """Return the tokens, the reason for the end, and what is amiss."""
        tokens: list[int] = []
        reason = ""
        # What follows the last line's end has not arrived whole.
        for line in bytes(self._received).split(b"\n")[:-1]:
            if not line.startswith(b"data:"):
                continue
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return tokens, reason, None
            try:
                event = _events.decode(data)
            except msgspec.DecodeError as error:
                return tokens, reason, ("formless", f"{error}: {excerpt(data)}")
            if event.error is not None:
                return tokens, reason, ("error", f"in the stream: {event.error.message[:EXCERPT_CHARACTERS]}")
            tokens += tokens_of(event)
            reason = reason_of(event) or reason
        return tokens, reason, ("cut", "the stream ended without [DONE]")

    def _compare(self, tokens: list[int], *, whole: bool) -> tuple[Verdict, str] | None:
        expected = list(self._reference.token_ids or ())
        if tokens == (expected if whole else expected[: len(tokens)]):
            return None
        return "wrong", f"{self._prompt.name}: got {tokens}, one engine alone says {expected}"


def tokens_of(event: Event) -> list[int]:
    return [token for choice in event.choices for token in choice.token_ids or ()]


def reason_of(event: Event) -> str:
    return next((choice.finish_reason for choice in event.choices if choice.finish_reason), "")


def excerpt(body: bytes) -> str:
    return body[:EXCERPT_CHARACTERS].decode(errors="replace")


_events = msgspec.json.Decoder(Event)
