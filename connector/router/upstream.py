"""One HTTP request to one of several engines: picking it, moving on to the next, and naming what went wrong.

A request moves to another engine only while the first cannot have begun to work on it: the connection was
refused, or it was a kept one that the engine had closed while it lay idle.
"""

import logging
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec

from .engines import Engine, EnginePool
from .errors import EngineError, EngineRejected, engine_message, named
from .metrics import RouterMetrics
from .settings import RouterSettings

logger = logging.getLogger(__name__)


class EngineCall(msgspec.Struct, kw_only=True):
    """What to send, whichever engine gets it."""

    method: str
    path: str
    headers: dict[str, str]
    transfer_id: str = ""
    """For messages only; empty where the call belongs to no transfer."""
    content: Callable[[int], bytes] | None = None
    """The body for the n-th try, counted from 0: each try may be a new attempt of the transfer."""
    engine_url: str = ""
    """The engine that was asked last; filled in on the way."""


class _CannotConnect(Exception):
    """Nothing was sent."""


class _Stale(Exception):
    """A kept connection had been closed by the engine before the request reached it."""


def make_http_client(settings: RouterSettings) -> httpx.AsyncClient:
    """A client whose pool never throttles: how much may run at once is decided at the router's door."""
    limits = httpx.Limits(
        max_connections=None,
        max_keepalive_connections=None,
        keepalive_expiry=settings.engine_keep_alive_seconds,
    )
    # A host that lost its power closes nothing; keep-alive probes notice within about a minute.
    options: list[Any] = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
    return httpx.AsyncClient(
        transport=httpx.AsyncHTTPTransport(limits=limits, socket_options=options, trust_env=False),
        timeout=httpx.Timeout(None, connect=settings.connect_timeout_seconds),
        trust_env=False,
    )


class EngineLink:
    def __init__(self, client: httpx.AsyncClient, settings: RouterSettings, metrics: RouterMetrics) -> None:
        self._client = client
        self._settings = settings
        self._metrics = metrics

    @asynccontextmanager
    async def open(self, pool: EnginePool, call: EngineCall) -> AsyncIterator[httpx.Response]:
        """An engine's answer with a good status, its body still to be read. Leaving closes the request."""
        tried: set[str] = set()
        resent = False
        tries = 0
        while (engine := pool.pick(tried)) is not None:
            engine.in_flight += 1
            call.engine_url = engine.url
            try:
                response = await self._send(pool, engine, call, tries)
                try:
                    await self._check(pool, engine, call, response)
                    yield response
                    return
                finally:
                    await response.aclose()
            except _CannotConnect:
                tried.add(engine.url)
            except _Stale as stale:
                # Once only: an engine that keeps closing is not idle but ill.
                if resent:
                    raise self._broken(pool, engine, call) from stale
                resent = True
            except httpx.RequestError as error:
                # Not the error's text: the library's messages may hold what was read.
                logger.warning(
                    "%s engine %s broke off%s: %s",
                    pool.role,
                    engine.url,
                    named(call.transfer_id),
                    type(error).__name__,
                )
                raise self._broken(pool, engine, call) from error
            finally:
                engine.in_flight -= 1
            tries += 1
        what = f"no {pool.role} engine accepts connections ({len(pool.engines)} tried): start one"
        raise EngineError(503, what, call.transfer_id)

    async def _send(self, pool: EnginePool, engine: Engine, call: EngineCall, tries: int) -> httpx.Response:
        connected = False

        async def note(event: str, _details: object) -> None:
            nonlocal connected
            connected = connected or event == "connection.connect_tcp.complete"

        request = self._client.build_request(
            call.method,
            engine.url + call.path,
            headers=call.headers,
            content=None if call.content is None else call.content(tries),
            extensions={"trace": note},
        )
        sent_at = time.monotonic()
        try:
            return await self._client.send(request, stream=True)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            self._metrics.engine_failures.labels(pool.role, engine.url, "connect").inc()
            logger.warning(
                "%s engine %s accepts no connection%s: %s; passed over for %g seconds",
                pool.role,
                engine.url,
                named(call.transfer_id),
                error or type(error).__name__,
                self._settings.retry_engine_after_seconds,
            )
            pool.pass_over(engine)
            raise _CannotConnect from error
        except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError) as error:
            soon = time.monotonic() - sent_at < self._settings.stale_connection_seconds
            if connected or not soon:
                raise
            self._metrics.engine_failures.labels(pool.role, engine.url, "stale").inc()
            raise _Stale from error

    async def _check(
        self, pool: EnginePool, engine: Engine, call: EngineCall, response: httpx.Response
    ) -> None:
        status = response.status_code
        if 200 <= status < 300:
            return
        content = await response.aread()
        if 400 <= status < 500:
            content_type = response.headers.get("content-type", "application/json")
            raise EngineRejected(pool.role, status, content, content_type)
        self._metrics.engine_failures.labels(pool.role, engine.url, "status").inc()
        logger.warning("%s engine %s answered %d%s", pool.role, engine.url, status, named(call.transfer_id))
        what = f"the {pool.role} engine answered with status {status}"
        detail = engine_message(content)
        raise EngineError(status if status in (503, 504) else 502, what, call.transfer_id, detail=detail)

    def _broken(self, pool: EnginePool, engine: Engine, call: EngineCall) -> EngineError:
        self._metrics.engine_failures.labels(pool.role, engine.url, "broken").inc()
        what = f"the {pool.role} engine closed the connection before its answer was complete"
        return EngineError(502, what, call.transfer_id)
