"""Work that outlives the request that caused it: kept alive, logged when it fails, waited for at the end."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

logger = logging.getLogger(__name__)


class Background:
    def __init__(self) -> None:
        # The event loop itself holds tasks only weakly.
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None], what: str) -> asyncio.Task[None]:
        """``what`` names the work and its transfer in the log."""
        task = asyncio.get_running_loop().create_task(work, name=what)
        self._tasks.add(task)
        task.add_done_callback(self._settle)
        return task

    def _settle(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s failed: %r", task.get_name(), error, exc_info=error)

    async def drain(self, seconds: float) -> None:
        """Let what runs come to its end, then cancel what is left."""
        if not self._tasks:
            return
        _, late = await asyncio.wait(self._tasks, timeout=seconds)
        for task in late:
            logger.warning("%s did not end within %g seconds and is cancelled", task.get_name(), seconds)
            task.cancel()
        if late:
            await asyncio.wait(late, timeout=1.0)
