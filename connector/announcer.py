"""Announces allocated blocks to routers' metaservers, in the background: the scheduler never waits for a
router.
"""

import logging
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import httpx
import msgspec

from .transfer_params import AnnouncedBlocks

logger = logging.getLogger(__name__)

MAX_THREADS = 16
FIRST_PAUSE_SECONDS = 0.05


class Announcer:
    """Posts announcements and keeps what failed until it is asked."""

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._pool = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="dfirst-announce")
        self._client = httpx.Client(timeout=timeout_seconds, trust_env=False)
        self._failures: deque[tuple[str, str]] = deque()

    def announce(self, url: str, blocks: AnnouncedBlocks, request_id: str) -> None:
        """Post to ``url``; a failure is told under ``request_id``."""
        self._pool.submit(self._try, url, blocks, request_id)

    def take_failures(self) -> list[tuple[str, str]]:
        """Return (request id, reason) of each announcement that failed since the last call."""
        failures = []
        while self._failures:
            failures.append(self._failures.popleft())
        return failures

    def close(self) -> None:
        """Give up what is under way."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    def _try(self, url: str, blocks: AnnouncedBlocks, request_id: str) -> None:
        reason = self._post(url, msgspec.json.encode(blocks))
        if reason:
            text = f"the metaserver {url} could not be told: {reason}"
            logger.warning("%s: %s", blocks.transfer_id, text)
            self._failures.append((request_id, text))

    def _post(self, url: str, body: bytes) -> str:
        """Return why the announcement failed, or an empty text. A router that refuses is not asked twice."""
        deadline = time.monotonic() + self._timeout_seconds
        pause = FIRST_PAUSE_SECONDS
        while True:
            try:
                answer = self._client.post(url, content=body, headers={"Content-Type": "application/json"})
            except httpx.HTTPError as error:
                reason = f"{type(error).__name__} {error}".strip()
            except (httpx.InvalidURL, RuntimeError) as error:
                return str(error)
            else:
                if answer.is_success:
                    return ""
                reason = f"it answered {answer.status_code}"
                if answer.status_code < 500:
                    return reason
            if time.monotonic() + pause >= deadline:
                return reason
            time.sleep(pause)
            pause *= 2
