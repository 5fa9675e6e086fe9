"""A warning that could come with every request, kept to one in a while."""

import time


class Throttle:
    def __init__(self, every_seconds: float) -> None:
        self._every_seconds = every_seconds
        self._next = 0.0
        self._held_back = 0

    def count(self) -> int | None:
        """How many were held back since the last one shown if this one may be shown, else None."""
        now = time.monotonic()
        if now < self._next:
            self._held_back += 1
            return None
        held_back, self._held_back = self._held_back, 0
        self._next = now + self._every_seconds
        return held_back
