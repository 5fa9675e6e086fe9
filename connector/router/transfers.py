"""The transfers under way: what the router knows of each, and the register in which the metaserver looks."""

import asyncio
import secrets
from typing import Any

import msgspec

from .cancel import RankAddress
from .settings import Mode


class Transfer(msgspec.Struct, kw_only=True, eq=False):
    """One prompt with one answer, on its way through one prefill and one decode engine."""

    transfer_id: str
    path: str
    body: dict[str, Any]
    """The client's body for this piece; never changed, copied for each engine."""
    headers: dict[str, str]
    mode: Mode | None
    """None: the decode engine does it all, nothing is transferred."""
    attempt: int = 0
    posted_attempt: int | None = None
    """The attempt for which a decode engine has posted; a repeat changes nothing."""
    prefill_ranks: tuple[RankAddress, ...] = ()
    decode_ranks: tuple[RankAddress, ...] = ()
    prefill_task: asyncio.Task[None] | None = None
    """Layer-wise: the prefill that runs beside the decode engine's request."""
    failure: str | None = None
    """Set where a failure shows only inside an answer that goes on to the client."""
    answered: bool = False
    """The decode engine has begun its answer: the client may know the id now, so no post is taken."""
    ended: bool = False


def new_transfer_id() -> str:
    """128 bits that nobody guesses: who knows the id may post for the transfer and cancel it."""
    return secrets.token_hex(16)


class TransferRegister:
    """Transfers by id, from their start to their end."""

    def __init__(self) -> None:
        self._transfers: dict[str, Transfer] = {}

    def __len__(self) -> int:
        return len(self._transfers)

    def add(self, transfer: Transfer) -> None:
        self._transfers[transfer.transfer_id] = transfer

    def find(self, transfer_id: str, attempt: int) -> Transfer | None:
        """None as well for an attempt that a newer one has replaced."""
        transfer = self._transfers.get(transfer_id)
        return transfer if transfer is not None and transfer.attempt == attempt else None

    def end(self, transfer: Transfer) -> None:
        transfer.ended = True
        self._transfers.pop(transfer.transfer_id, None)
