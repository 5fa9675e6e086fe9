"""Announces allocated blocks to routers' metaservers, in the background: the scheduler never waits for a
router.
"""

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Coroutine

import httpx
import msgspec

from .transfer_params import AnnouncedBlocks

logger = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.05
CLOSE_SECONDS = 1.0
"""What the end waits for a router's connections to be closed."""


class Announcer:
    """Posts announcements and keeps what failed until it is asked.

    One thread runs them all side by side, so that routers that are slow hold up no other one. It starts with
    the first announcement.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._failures: deque[tuple[str, str]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._client: httpx.AsyncClient | None = None
        self._closed = False

    def announce(self, url: str, blocks: AnnouncedBlocks, request_id: str) -> None:
        """Post to ``url``; a failure is told under ``request_id``. Returns at once."""
        if self._closed:
            return
        self._submit(self._try(url, blocks, request_id))

    def take_failures(self) -> list[tuple[str, str]]:
        """Return (request id, reason) of each announcement that failed since the last call."""
        failures = []
        while self._failures:
            failures.append(self._failures.popleft())
        return failures

    def close(self) -> None:
        """Give up what is under way, and end the thread."""
        self._closed = True
        if self._loop is None or self._thread is None:
            return
        with contextlib.suppress(RuntimeError):  # it has ended already
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_SECONDS)

    def _submit(self, announcing: Coroutine[None, None, None]) -> None:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=self._run, args=(self._loop,), name="dfirst-announce", daemon=True
            )
            self._thread.start()
        asyncio.run_coroutine_threadsafe(announcing, self._loop)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            loop.run_forever()
        finally:
            loop.run_until_complete(self._end())
            loop.close()

    async def _end(self) -> None:
        under_way = asyncio.all_tasks() - {asyncio.current_task()}
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        if self._client is not None:
            await self._client.aclose()

    async def _try(self, url: str, blocks: AnnouncedBlocks, request_id: str) -> None:
        attempts = _Attempts(url, msgspec.json.encode(blocks))
        try:
            await asyncio.wait_for(attempts.run(self._http()), self._timeout_seconds)
            return
        except asyncio.TimeoutError:
            reason = attempts.reason or f"no answer within {self._timeout_seconds:g} s"
        except Exception as error:
            logger.debug("%s: announcing failed", blocks.transfer_id, exc_info=True)
            reason = _told(error)
        text = f"the metaserver {url} could not be told: {reason}"
        logger.warning("%s: %s", blocks.transfer_id, text)
        self._failures.append((request_id, text))

    def _http(self) -> httpx.AsyncClient:
        # The time-out around all attempts bounds each part of one, too.
        if self._client is None:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
            self._client = httpx.AsyncClient(timeout=None, limits=limits, trust_env=False)
        return self._client


class RefusedError(Exception):
    """The router will not take the announcement, however often it is asked."""


class _Attempts:
    """One announcement, made again until a router takes or refuses it."""

    def __init__(self, url: str, body: bytes) -> None:
        self._url = url
        self._body = body
        self.reason = ""
        """Why the last attempt failed."""

    async def run(self, client: httpx.AsyncClient) -> None:
        pause = FIRST_PAUSE_SECONDS
        while not await self._attempt(client):
            await asyncio.sleep(pause)
            pause *= 2

    async def _attempt(self, client: httpx.AsyncClient) -> bool:
        headers = {"Content-Type": "application/json"}
        try:
            # The status says all: what else the router answers is not waited for.
            async with client.stream("POST", self._url, content=self._body, headers=headers) as answer:
                status = answer.status_code
        except httpx.TransportError as error:
            if isinstance(error, httpx.UnsupportedProtocol):
                raise
            self.reason = _told(error)
            return False
        if 200 <= status < 300:
            return True
        self.reason = f"it answered {status}"
        if status < 500:
            raise RefusedError(self.reason)
        return False


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, RefusedError) else f"{type(error).__name__} {error}".strip()
