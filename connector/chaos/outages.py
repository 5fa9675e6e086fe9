"""When which server was away because the plan killed it: the only excuse for an error."""

import time
from dataclasses import dataclass, field

from ..engine_spec import Mode
from .answers import Asked
from .plan import ServerName

NEEDED: dict[Mode, tuple[ServerName, ...]] = {
    "blockwise": ("prefill", "decode", "router"),
    # Until the router knows where P's ranks are, it asks P first.
    "blockwise-d-first": ("prefill", "decode", "router"),
    # Without P, D computes the prompt.
    "layerwise": ("decode", "router"),
}
GRACE_SECONDS = 2.0
"""After a server answers its first health check again."""


@dataclass
class Outage:
    """From the kill to the moment at which the server answered again."""

    server: ServerName
    since: float
    until: float | None = None


@dataclass
class Outages:
    """All of a run, in seconds since 1970."""

    all: list[Outage] = field(default_factory=list)

    def begin(self, server: ServerName) -> Outage:
        outage = Outage(server, time.time())
        self.all.append(outage)
        return outage

    def away(self, *servers: ServerName) -> bool:
        """Return whether one of these is away now."""
        return any(outage.until is None for outage in self.all if outage.server in servers)

    def excuses(self, asked: Asked) -> bool:
        """Return whether an error, or a broken connection, is what the plan did.

        A server that is killed can say nothing: its end alone excuses that a connection to it breaks.
        """
        needed = (asked.server,) if asked.verdict == "cut" else NEEDED[asked.question.mode]
        return any(
            outage.server in needed and self._overlaps(outage, asked.sent, asked.ended) for outage in self.all
        )

    def _overlaps(self, outage: Outage, sent: float, ended: float) -> bool:
        until = outage.until
        return ended >= outage.since and (until is None or sent <= until + GRACE_SECONDS)
