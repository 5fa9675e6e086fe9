"""How long a step that computes nothing waits for a report.

While requests wait for their caches and nothing runs, vLLM steps as fast as it can, and takes processors from
those that compute and copy. A request that comes meanwhile waits for such a step, so a step waits for little
where something has just happened, and for more, within a limit, where nothing has for long.
"""

import time
from collections.abc import Callable

from .step import StepMetadata

LEAST_SECONDS, MOST_SECONDS = 0.002, 0.010
SHARE = 0.1
"""Of the time in which nothing has happened."""


class IdleWait:
    """The steps of one rank."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()
        """When something happened for the last time."""

    def seconds(self, step: StepMetadata | None) -> float:
        """Return for how long this step may wait."""
        if step is None or not step.may_wait:
            self.happened()
            return 0.0
        if step.commands:
            self.happened()
        return min(max(SHARE * (self._clock() - self._last), LEAST_SECONDS), MOST_SECONDS)

    def happened(self) -> None:
        """Something has happened: a report was taken, a request has come, or a step computes."""
        self._last = self._clock()
