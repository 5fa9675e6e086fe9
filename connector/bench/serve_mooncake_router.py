"""A router as vLLM's ``MooncakeConnector`` wants it: both engines are asked at once, under one transfer id.

What the connector's protocol asks of a router and no more: which engine id the prefill engine's bootstrap
server knows, ``transfer_id`` to both, the address of the bootstrap server to the decode engine. The prompt
goes to the prefill engine with one output token, beside the decode engine's stream, which goes to the client
as it comes. For one prefill and one decode engine, and for benchmarks only: no retries, no limits.

    python -m dfirst.connector.bench.serve_mooncake_router PORT PREFILL_URL DECODE_URL BOOTSTRAP_URL
"""

import asyncio
import json
import logging
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, StreamingResponse

logger = logging.getLogger(__name__)

PATH = "/v1/completions"
# A benchmark's request is given up after this; the client says so.
ANSWER_SECONDS = 300.0


class MooncakeRouter:
    def __init__(self, prefill: httpx.AsyncClient, decode: httpx.AsyncClient, bootstrap: str) -> None:
        self._prefill = prefill
        self._decode = decode
        self._bootstrap = bootstrap
        self._engine_id: str | None = None
        self._prefills: set[asyncio.Task[None]] = set()

    async def complete(self, request: Request) -> StreamingResponse:
        body = json.loads(await request.body())
        transfer = uuid.uuid4().hex
        task = asyncio.create_task(self._ask_prefill(body, transfer))
        self._prefills.add(task)
        task.add_done_callback(self._prefills.discard)
        return StreamingResponse(self._answer(body, transfer), media_type="text/event-stream")

    async def close(self) -> None:
        await self._prefill.aclose()
        await self._decode.aclose()

    async def _ask_prefill(self, body: dict[str, Any], transfer: str) -> None:
        asked = {key: value for key, value in body.items() if key not in ("stream", "stream_options")}
        asked["max_tokens"] = 1
        asked["kv_transfer_params"] = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": transfer,
        }
        try:
            response = await self._prefill.post(PATH, json=asked)
            response.raise_for_status()
        except httpx.HTTPError as error:
            logger.error("transfer %s: the prefill engine failed: %s", transfer, error)

    async def _answer(self, body: dict[str, Any], transfer: str) -> AsyncIterator[bytes]:
        params = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "transfer_id": transfer,
            "remote_bootstrap_addr": self._bootstrap,
            "remote_engine_id": await self._known_engine_id(),
        }
        asked = {**body, "kv_transfer_params": params}
        async with self._decode.stream("POST", PATH, json=asked) as response:
            response.raise_for_status()
            async for chunk in response.aiter_bytes():
                yield chunk

    async def _known_engine_id(self) -> str:
        """Asked once: the answer stays the same as long as the engine runs."""
        if self._engine_id is None:
            response = await self._prefill.get(f"{self._bootstrap}/query")
            response.raise_for_status()
            (engine,) = response.json().values()
            self._engine_id = str(engine["engine_id"])
        return self._engine_id


def make_app(router: MooncakeRouter) -> FastAPI:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await router.close()

    app = FastAPI(lifespan=lifespan)
    app.add_api_route(PATH, router.complete, methods=["POST"], response_model=None)
    app.add_api_route("/health", lambda: PlainTextResponse("ok"), methods=["GET"], response_model=None)
    return app


def open_engine(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(base_url=url, timeout=ANSWER_SECONDS, limits=limits, trust_env=False)


def main(port: str, prefill: str, decode: str, bootstrap: str) -> None:
    app = make_app(MooncakeRouter(open_engine(prefill), open_engine(decode), bootstrap))
    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning")


if __name__ == "__main__":
    main(*sys.argv[1:])
