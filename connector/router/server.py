"""The router as a FastAPI application, and the one process that serves it."""

import copy
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec
import uvicorn
from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Route

from .advertise import METASERVER_PATH, metaserver_url
from .body import Kind
from .cancel import TransferCanceller
from .endpoint import Gate, GenerationEndpoint, read_body
from .engines import EnginePool
from .errors import BadRequest, RouterError
from .flows import Flows
from .metrics import RouterMetrics
from .settings import RouterSettings
from .upstream import EngineCall, EngineLink, make_http_client
from .wire import MetaserverPost

logger = logging.getLogger(__name__)

MOST_PATH_SHOWN = 100


class EngineHealth(msgspec.Struct):
    url: str
    in_flight: int
    passed_over: bool


class Health(msgspec.Struct):
    status: str
    transfers: int
    prefill: list[EngineHealth]
    decode: list[EngineHealth]


def create_app(settings: RouterSettings, canceller: TransferCanceller) -> FastAPI:
    """The whole router; it closes ``canceller`` when it shuts down."""
    metrics = RouterMetrics()
    client = make_http_client(settings)
    link = EngineLink(client, settings, metrics)
    gate = Gate(settings.max_concurrent_requests)
    flows = Flows(settings, link, canceller, metrics, metaserver_url(settings))
    for pool in (flows.prefill, flows.decode):
        metrics.watch(pool)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        yield
        await gate.wait_empty(settings.cancel_timeout_seconds)
        await flows.background.drain(settings.cancel_timeout_seconds)
        canceller.close()
        await client.aclose()

    app = FastAPI(title="dfirst router", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    for kind in Kind:
        endpoint = GenerationEndpoint(kind, flows, settings, gate, metrics)
        app.router.routes.append(Route(kind.path, endpoint, methods=["POST"]))
    app.add_exception_handler(HTTPException, answer_unrouted)
    add_metaserver(app, flows, settings, metrics)
    add_models(app, flows, link, settings.models_timeout_seconds)
    add_status(app, flows, metrics)
    return app


def add_metaserver(app: FastAPI, flows: Flows, settings: RouterSettings, metrics: RouterMetrics) -> None:
    @app.post(METASERVER_PATH, response_model=None)
    async def metaserver(request: Request) -> Response:
        try:
            raw = await read_body(request, settings)
            post = read_post(raw)
        except RouterError as error:
            metrics.posts.labels(error.status).inc()
            return answer(error)
        except ClientDisconnect:
            logger.warning("a decode engine left before its post to the metaserver was complete")
            return Response(status_code=400)
        status = flows.take_post(post, raw)
        metrics.posts.labels(status).inc()
        if status == 404:
            what = f"transfer {post.transfer_id[:64]!r} attempt {post.attempt} is unknown here or has ended"
            return answer(RouterError(404, "not_found_error", what))
        return Response(status_code=status)


def read_post(raw: bytes) -> MetaserverPost:
    try:
        post = msgspec.json.decode(raw, type=MetaserverPost)
    except msgspec.DecodeError as error:
        raise BadRequest(f"a post to the metaserver does not decode: {error}") from error
    if post.do_remote_prefill or not post.do_remote_decode:
        raise BadRequest("a post to the metaserver must set do_remote_decode and not do_remote_prefill")
    return post


def add_models(app: FastAPI, flows: Flows, link: EngineLink, timeout_seconds: float) -> None:
    @app.get("/v1/models", response_model=None)
    async def models(request: Request) -> Response:
        headers = {"accept-encoding": "identity"}
        if (authorization := request.headers.get("authorization")) and authorization.isascii():
            headers["authorization"] = authorization
        call = EngineCall(method="GET", path="/v1/models", headers=headers)
        try:
            with anyio.fail_after(timeout_seconds):
                async with link.open(flows.decode, call) as response:
                    return Response(await response.aread(), media_type="application/json")
        except RouterError as error:
            return answer(error)
        except TimeoutError:
            what = f"the decode engine did not name its models within {timeout_seconds:g} seconds"
            return answer(RouterError(504, "timeout_error", what))


def add_status(app: FastAPI, flows: Flows, metrics: RouterMetrics) -> None:
    @app.get("/health", response_model=None)
    async def health() -> Response:
        """The router lives; what it last saw of its engines is for people."""
        report = Health("ok", len(flows.register), describe(flows.prefill), describe(flows.decode))
        return Response(msgspec.json.encode(report), media_type="application/json")

    @app.get("/metrics", response_model=None)
    async def show_metrics() -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)


def describe(pool: EnginePool) -> list[EngineHealth]:
    return [EngineHealth(each.url, each.in_flight, not pool.is_usable(each)) for each in pool.engines]


def answer(error: RouterError) -> Response:
    return Response(error.content(), error.status, media_type=error.content_type)


async def answer_unrouted(request: Request, error: Exception) -> Response:
    """A path or a method that nothing here serves, in the form in which OpenAI's clients read errors."""
    assert isinstance(error, HTTPException)
    path = request.url.path[:MOST_PATH_SHOWN]
    if error.status_code == 405:
        what = (
            f"{request.method} is not served at {path!r}: use {(error.headers or {}).get('Allow', 'another')}"
        )
    else:
        what = f"nothing is served at {path!r}: this router serves {', '.join(kind.path for kind in Kind)}"
    told = answer(RouterError(error.status_code, "invalid_request_error", what))
    told.headers.update(error.headers or {})
    return told


def logged_with_time() -> dict[str, Any]:
    """Uvicorn's own log settings, with the time in each line and this package's lines among them."""
    settings = copy.deepcopy(uvicorn.config.LOGGING_CONFIG)
    settings["formatters"]["default"]["fmt"] = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    settings["loggers"]["dfirst"] = {"handlers": ["default"], "level": "INFO", "propagate": False}
    return settings


def run_router(settings: RouterSettings) -> None:
    """Serve until told to stop; cancellations go over the engines' side channel."""
    # Here and not above: applications with another canceller need no side channel.
    from ..cancel import SideChannelCanceller
    from ..curve import read_router_keys

    keys = read_router_keys(settings.curve_keys) if settings.curve_keys else None
    # One line for each request to an engine says nothing that the metrics don't.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    uvicorn.run(
        create_app(settings, SideChannelCanceller(keys=keys)),
        host=settings.host,
        port=settings.port,
        access_log=False,
        log_config=logged_with_time(),
        timeout_graceful_shutdown=max(1, round(settings.shutdown_seconds)),
    )
