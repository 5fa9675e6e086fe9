"""Engines in miniature: real HTTP servers that speak vLLM's side of the conversation and remember it.

What an engine does is set by its attributes, between requests. The text that the decode engine "generates"
names the prompt and the seed, so that a test sees which piece of a request an answer belongs to.
"""

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence

import httpx
import uvicorn
from dfirst.connector.router import RankAddress
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

P_RANKS = [{"host": "10.0.0.1", "port": 7000 + rank, "incarnation": f"p{rank}"} for rank in range(2)]
D_RANKS = [{"host": "10.0.0.2", "port": 7100 + rank, "incarnation": f"d{rank}"} for rank in range(2)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until(condition: Callable[[], object], what: str, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} seconds in vain: {what}"
        time.sleep(0.005)


class Served:
    """An ASGI application served by a thread."""

    def __init__(self, app: FastAPI, port: int, **options: object) -> None:
        self.url = f"http://127.0.0.1:{port}"
        config = uvicorn.Config(app, port=port, log_level="warning", timeout_graceful_shutdown=1, **options)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        wait_until(lambda: self._server.started, f"server on port {port}")

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(5)


class RecordingCanceller:
    def __init__(self) -> None:
        self.calls: list[tuple[list[dict], str, int, str, str]] = []
        self.closed = 0
        self.error: Exception | None = None

    async def cancel(
        self, ranks: Sequence[RankAddress], transfer_id: str, attempt: int, mode: str, reason: str
    ) -> None:
        assert not self.closed
        as_dicts = [{"host": r.host, "port": r.port, "incarnation": r.incarnation} for r in ranks]
        self.calls.append((as_dicts, transfer_id, attempt, mode, reason))
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        self.closed += 1


class FakeEngine:
    """What both kinds share: a port, what was asked, and failing on demand."""

    def __init__(self, port: int | None = None, **options: object) -> None:
        self.reset()
        app = FastAPI()
        for path in ("/v1/completions", "/v1/chat/completions"):
            app.post(path, response_model=None)(self._take)
        app.get("/v1/models", response_model=None)(self._models)
        self._served = Served(app, port or free_port(), **options)
        self.url = self._served.url

    def reset(self) -> None:
        self.bodies: list[dict] = []
        self.headers: list[dict[str, str]] = []
        self.aborted = 0
        self.finished = 0
        self.delay_seconds = 0.0
        self.hang = False
        self.fail_with: tuple[int, dict] | None = None

    def stop(self) -> None:
        self._served.stop()

    @property
    def params(self) -> list[dict]:
        return [body.get("kv_transfer_params") for body in self.bodies]

    async def _models(self) -> dict:
        while self.hang:
            await asyncio.sleep(0.01)
        return {"object": "list", "data": [{"id": "tiny", "object": "model"}]}

    async def _take(self, request: Request) -> Response:
        body = await request.json()
        self.headers.append(dict(request.headers))
        self.bodies.append(body)
        work = asyncio.ensure_future(self._answer(request, body))
        # As vLLM does: a client that leaves aborts the request.
        while not work.done():
            await asyncio.wait({work}, timeout=0.01)
            if not work.done() and await request.is_disconnected():
                work.cancel()
                self.aborted += 1
                return Response(status_code=499)
        return work.result()

    async def _answer(self, request: Request, body: dict) -> Response:
        while self.hang:
            await asyncio.sleep(0.01)
        await asyncio.sleep(self.delay_seconds)
        if self.fail_with is not None:
            status, content = self.fail_with
            return JSONResponse(content, status)
        return await self._work(request, body)

    async def _work(self, request: Request, body: dict) -> Response:
        raise NotImplementedError


class FakePrefillEngine(FakeEngine):
    def reset(self) -> None:
        super().reset()
        self.grants = True
        self.breaks = False
        self.grant_changes: dict = {}
        self.pushed: set[str] = set()

    async def _work(self, request: Request, body: dict) -> Response:
        if self.breaks:
            return StreamingResponse(break_off(), media_type="application/json")
        asked = body["kv_transfer_params"]
        answer: dict = {"id": "cmpl-p", "choices": [{"index": 0, "text": "x"}], "kv_transfer_params": None}
        if asked.get("remote_ranks"):
            self.pushed.add(asked["transfer_id"])
        elif self.grants:
            answer["kv_transfer_params"] = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "transfer_id": asked["transfer_id"],
                "attempt": asked["attempt"],
                "remote_engine_id": "p_dp0",
                "remote_request_id": "cmpl-p-0",
                "remote_host": "10.0.0.1",
                "remote_port": 7000,
                "remote_block_ids": [3, 4, 5],
                "remote_ranks": P_RANKS,
                **self.grant_changes,
            }
        self.finished += 1
        return JSONResponse(answer)


class FakeDecodeEngine(FakeEngine):
    """Layer-wise it posts to the metaserver and waits for ``has_arrived`` to see the transfer."""

    def reset(self) -> None:
        super().reset()
        self.words = 3
        self.word_seconds = 0.0
        self.hang_after: int | None = None
        self.break_after: int | None = None
        self.error_after: int | None = None
        self.posts = True
        self.post_statuses: list[int] = []
        self.last_post: tuple[str, dict] | None = None
        self.has_arrived: Callable[[str], object] = lambda transfer_id: True

    async def _work(self, request: Request, body: dict) -> Response:
        params = body.get("kv_transfer_params") or {}
        if "metaserver" in params and self.posts:
            await self._post(params)
            if not body.get("stream"):
                await self._wait_for_kv(params)
        if body.get("stream"):
            waits = params if "metaserver" in params and self.posts else None
            return StreamingResponse(self._stream(request, body, waits), media_type="text/event-stream")
        self.finished += 1
        return JSONResponse(
            {
                "id": "cmpl-d",
                "object": "x",
                "created": len(self.bodies),
                "model": "tiny",
                "choices": [self._choice(request, "".join(self._texts(body)), "length", whole=True)],
                "usage": self._usage(body),
            }
        )

    async def _post(self, params: dict) -> None:
        post = {
            "transfer_id": params["transfer_id"],
            "attempt": params["attempt"],
            "request_id": "cmpl-d-0",
            "do_remote_prefill": False,
            "do_remote_decode": True,
            "remote_engine_id": "d_dp0",
            "remote_host": "10.0.0.2",
            "remote_port": 7100,
            "remote_ranks": D_RANKS,
            "remote_block_ids": [9, 8],
            "remote_cached_tokens": 0,
            "layout_digest": "abc",
        }
        self.last_post = (params["metaserver"], post)
        async with httpx.AsyncClient() as client:
            self.post_statuses.append((await client.post(params["metaserver"], json=post)).status_code)

    async def _wait_for_kv(self, params: dict) -> None:
        while not self.has_arrived(params["transfer_id"]):
            await asyncio.sleep(0.005)

    def _texts(self, body: dict) -> list[str]:
        prompt = body.get("prompt", "chat")
        return [f"{prompt}/{body.get('seed')}:{word} " for word in range(self.words)]

    def _usage(self, body: dict) -> dict:
        prompt = len(body.get("prompt", "chat"))
        details = {"cached_tokens": 1}
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.words,
            "total_tokens": prompt + self.words,
            "prompt_tokens_details": details,
        }

    def _choice(self, request: Request, text: str, finish: str | None, *, whole: bool) -> dict:
        choice: dict = {"index": 0, "finish_reason": finish}
        if "chat" in request.url.path:
            choice["message" if whole else "delta"] = {"content": text}
        else:
            choice["text"] = text
        return choice

    async def _stream(self, request: Request, body: dict, waits: dict | None) -> AsyncIterator[bytes]:
        complete = False
        try:
            if waits is not None:
                await self._wait_for_kv(waits)
            for number, text in enumerate(self._texts(body)):
                await asyncio.sleep(self.word_seconds)
                while self.hang_after == number:
                    await asyncio.sleep(0.01)
                if self.break_after == number:
                    yield b'data: {"id": "half'
                    raise ConnectionError("the fake engine breaks off")
                if self.error_after == number:
                    yield event(
                        {"error": {"message": "kv load failed", "type": "x", "param": None, "code": 500}}
                    )
                    break
                finish = "length" if number == self.words - 1 else None
                yield self._chunk([self._choice(request, text, finish, whole=False)])
            else:
                if (body.get("stream_options") or {}).get("include_usage"):
                    yield self._chunk([], usage=self._usage(body))
            yield b"data: [DONE]\n\n"
            complete = True
        finally:
            if complete:
                self.finished += 1
            else:
                self.aborted += 1

    def _chunk(self, choices: list[dict], **more: object) -> bytes:
        return event(
            {"id": "cmpl-d", "created": len(self.bodies), "model": "tiny", "choices": choices, **more}
        )


async def break_off() -> AsyncIterator[bytes]:
    yield b'{"id": "ha'
    raise ConnectionError("the fake engine breaks off")


def event(value: dict) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"
