"""How the router tells engines that a transfer is over before its end.

The router only names the ranks; how a cancellation travels to them is the side channel's affair.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec


class RankAddress(msgspec.Struct, frozen=True):
    """One worker process of an engine, as its side channel is reached."""

    host: str
    port: int
    incarnation: str


class TransferCanceller(Protocol):
    async def cancel(
        self, ranks: Sequence[RankAddress], transfer_id: str, attempt: int, mode: str, reason: str
    ) -> None:
        """``mode`` is a ``Mode``'s value; the ranks are those that own the transfer's blocks in it."""

    def close(self) -> None:
        """Called once, in the event loop, when the router stops."""


class NullCanceller:
    """Tells nobody: engines then learn of an end from their closed HTTP requests and their leases."""

    async def cancel(
        self, ranks: Sequence[RankAddress], transfer_id: str, attempt: int, mode: str, reason: str
    ) -> None:
        return None

    def close(self) -> None:
        return None
