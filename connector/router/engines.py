"""Which engine gets the next request: the one with the least under way, of those that accept connections.

An engine that refused a connection is passed over for a while. If all have, they are tried all the same: a
refused connection costs little, and an engine that is back is found at once.
"""

import time
from collections.abc import Callable, Collection

import msgspec


class Engine(msgspec.Struct, eq=False):
    url: str
    in_flight: int = 0
    usable_from: float = 0.0
    """On the pool's clock."""
    picked: int = 0
    """The pool's count when this engine was last picked, so that equals take turns."""


class EnginePool:
    def __init__(
        self,
        role: str,
        urls: Collection[str],
        retry_after_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.role = role
        self.engines = tuple(Engine(url) for url in urls)
        self._retry_after_seconds = retry_after_seconds
        self._clock = clock
        self._picks = 0

    def pick(self, tried: Collection[str]) -> Engine | None:
        """None once every engine has been tried."""
        left = [engine for engine in self.engines if engine.url not in tried]
        if not left:
            return None
        usable = [engine for engine in left if self.is_usable(engine)]
        engine = min(usable or left, key=lambda each: (each.in_flight, each.picked))
        self._picks += 1
        engine.picked = self._picks
        return engine

    def only(self, engine: Engine) -> "EnginePool":
        """Return a pool of this one engine, which counts with the others what it has under way."""
        alone = EnginePool(self.role, (), self._retry_after_seconds, self._clock)
        alone.engines = (engine,)
        return alone

    def is_usable(self, engine: Engine) -> bool:
        return engine.usable_from <= self._clock()

    def pass_over(self, engine: Engine) -> None:
        engine.usable_from = self._clock() + self._retry_after_seconds
