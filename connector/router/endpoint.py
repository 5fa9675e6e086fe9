"""A client's request from its first byte to its answer's last: limits, hang-ups, errors.

Plain ASGI instead of a FastAPI handler: the status of an answer is known only once an engine has begun to
answer, and a client that hangs up must end the work in either case, streaming or not.
"""

import asyncio
import logging
import re
import time

import anyio
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from .body import Kind, Work, read_work
from .errors import BadRequest, RouterError
from .flows import Flows
from .metrics import RouterMetrics
from .relay import Relay
from .reply import Reply
from .settings import Mode, RouterSettings, parse_mode
from .transfers import Transfer, new_transfer_id

logger = logging.getLogger(__name__)

PASSED_HEADERS = ("authorization", "traceparent", "tracestate")
"""Of the client's headers, those that engines get too."""
LONGEST_CLIENT_ID = 128


class Gate:
    """How many requests are inside."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.inside = 0

    async def wait_empty(self, seconds: float) -> None:
        """For a server that stops: it has cancelled the requests it cut short, they still have to say so."""
        with anyio.move_on_after(seconds):
            while self.inside:
                await anyio.sleep(0.01)


class Exchange:
    """One client request: why its work would stop, if it stopped now."""

    def __init__(self, request: Request, settings: RouterSettings) -> None:
        self.request = request
        self.client_id = clean_client_id(request.headers.get("x-request-id"))
        self.own_id = new_transfer_id()
        """Of the transfer too, if the request is one transfer."""
        self.request_id = joined(self.client_id, self.own_id)
        self.mode = settings.mode
        self.hung_up = False
        self.started_at = time.monotonic()
        self._limit_seconds = settings.request_timeout_seconds

    def why_stopped(self) -> str:
        if self.hung_up:
            return "the client hung up"
        if time.monotonic() - self.started_at >= self._limit_seconds:
            return f"the request took longer than {self._limit_seconds:g} seconds"
        return "the router stops"


class GenerationEndpoint:
    """The ASGI application behind one of the two generating paths."""

    def __init__(
        self, kind: Kind, flows: Flows, settings: RouterSettings, gate: Gate, metrics: RouterMetrics
    ) -> None:
        self._kind = kind
        self._flows = flows
        self._settings = settings
        self._gate = gate
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(Request(scope, receive), self._settings)
        reply = Reply(send, exchange.request_id)
        if self._gate.inside >= self._gate.limit:
            limit = f"{self._gate.limit} requests are under way, the most this router takes: try again later"
            await reply.error(RouterError(503, "server_error", limit))
        else:
            self._gate.inside += 1
            try:
                await self._read_and_serve(exchange, reply)
            except asyncio.CancelledError:
                # Only a server that stops cancels this task, and with this answer the task ends.
                with anyio.CancelScope(shield=True):
                    await reply.error(RouterError(503, "server_error", "the router stops: try again later"))
            finally:
                self._gate.inside -= 1
        outcome = "hang_up" if exchange.hung_up else reply.outcome
        seconds = time.monotonic() - exchange.started_at
        if exchange.hung_up:
            logger.info("request %s: the client hung up after %.1f s", exchange.request_id, seconds)
        self._metrics.requests.labels(exchange.mode.value, outcome).inc()
        self._metrics.request_seconds.labels(exchange.mode.value).observe(seconds)

    async def _read_and_serve(self, exchange: Exchange, reply: Reply) -> None:
        try:
            exchange.mode = choose_mode(exchange.request, self._settings.mode)
            content = await read_body(exchange.request, self._settings)
            work = read_work(self._kind, content, self._settings.max_transfers_per_request)
        except ClientDisconnect:
            exchange.hung_up = True
            return
        except RouterError as error:
            await reply.error(error)
            return
        transfers = self._make_transfers(exchange, work)
        relay = Relay(self._flows, work, transfers, self._kind.id_prefix + exchange.request_id)
        async with anyio.create_task_group() as group:
            group.start_soon(watch_client, exchange, reply, group.cancel_scope)
            await self._serve(relay, exchange, reply)
            group.cancel_scope.cancel()

    async def _serve(self, relay: Relay, exchange: Exchange, reply: Reply) -> None:
        """Every way that the work can end becomes an answer, except that nobody listens any more."""
        seconds = self._settings.request_timeout_seconds
        try:
            with anyio.fail_after(seconds - (time.monotonic() - exchange.started_at)):
                await relay.write(reply, exchange.why_stopped)
        except RouterError as error:
            await reply.error(error)
        except TimeoutError:
            took = f"the request took longer than {seconds:g} seconds (transfer {exchange.request_id})"
            await reply.error(RouterError(504, "timeout_error", took))
        except Exception:
            logger.exception("request %s: the router failed", exchange.request_id)
            what = f"the router failed (transfer {exchange.request_id}): see its log"
            await reply.error(RouterError(500, "internal_error", what))

    def _make_transfers(self, exchange: Exchange, work: Work) -> list[Transfer]:
        passed = {
            name: value
            for name in PASSED_HEADERS
            if (value := exchange.request.headers.get(name)) is not None and value.isascii()
        }
        transfers = []
        for piece in work.pieces:
            transfer_id = new_transfer_id() if work.split else exchange.own_id
            request_id = joined(exchange.client_id, transfer_id)
            transfers.append(
                Transfer(
                    transfer_id=transfer_id,
                    path=self._kind.path,
                    body=piece.body,
                    headers=engine_headers(passed, request_id),
                    mode=None if work.decode_only else exchange.mode,
                )
            )
        return transfers


def engine_headers(passed: dict[str, str], request_id: str) -> dict[str, str]:
    return {
        **passed,
        "content-type": "application/json",
        # Events are passed on as they come: nothing may hold them back to compress them.
        "accept-encoding": "identity",
        "x-request-id": request_id,
    }


async def watch_client(exchange: Exchange, reply: Reply, scope: anyio.CancelScope) -> None:
    """Once the body is read, the next thing a client can say is that it has gone."""
    while (await exchange.request.receive())["type"] != "http.disconnect":
        pass
    # A server says the same after a complete answer: then the work ends by itself.
    if not reply.finished:
        exchange.hung_up = True
        scope.cancel()


def choose_mode(request: Request, default: Mode) -> Mode:
    name = request.headers.get("x-dfirst-mode")
    if name is None:
        return default
    try:
        return parse_mode(name)
    except ValueError as error:
        raise BadRequest(f"header X-DFirst-Mode: {error}", param="X-DFirst-Mode") from error


async def read_body(request: Request, settings: RouterSettings) -> bytes:
    """The body, never more of it in memory than the limit and one chunk."""
    limit = settings.max_body_bytes
    too_large = RouterError(
        413, "invalid_request_error", f"the request body is larger than the {limit} bytes this router takes"
    )
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        raise too_large
    content = bytearray()
    try:
        with anyio.fail_after(settings.body_timeout_seconds):
            async for chunk in request.stream():
                content += chunk
                if len(content) > limit:
                    raise too_large
    except TimeoutError as error:
        waited = f"the request body was not complete within {settings.body_timeout_seconds:g} seconds"
        raise RouterError(408, "timeout_error", waited) from error
    return bytes(content)


def clean_client_id(client_id: str | None) -> str:
    """The client's id as it may stand in headers and logs."""
    return re.sub(r"[^A-Za-z0-9._:-]", "_", client_id or "")[:LONGEST_CLIENT_ID]


def joined(client_id: str, transfer_id: str) -> str:
    return f"{client_id}-{transfer_id}" if client_id else transfer_id
