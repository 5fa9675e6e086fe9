"""Cancels transfers for a router, over the ranks' side channels."""

import asyncio
import logging
import secrets
from collections.abc import Sequence

import msgspec
import zmq
import zmq.asyncio

from ..protocol.messages import Cancel, Sender, TransferKey
from ..protocol.modes import OWNER
from ..protocol.timing import Timing
from .router.cancel import RankAddress
from .side_channel import HEADER

logger = logging.getLogger(__name__)

ATTEMPTS = 5
"""How often CANCEL is sent to a rank that does not acknowledge it; then its leases and its hold time free
it.
"""


class SideChannelCanceller:
    """Says CANCEL to ranks until they acknowledge it, or for a few seconds."""

    def __init__(self, timing: Timing | None = None) -> None:
        self._timing = timing or Timing()
        self._sender = Sender("router", -1, secrets.token_hex(8))
        self._context: zmq.asyncio.Context | None = None

    async def cancel(
        self, ranks: Sequence[RankAddress], transfer_id: str, attempt: int, mode: str, reason: str
    ) -> None:
        """Tell the ranks, owners of the transfer's blocks, that nobody wants it any more."""
        key = TransferKey(transfer_id, attempt)
        await asyncio.gather(*(self._cancel_at(rank, key, mode, reason) for rank in ranks))

    def close(self) -> None:
        """Close the sockets."""
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None

    async def _cancel_at(self, rank: RankAddress, key: TransferKey, mode: str, reason: str) -> None:
        message = Cancel(
            sender=self._sender,
            key=key,
            target_incarnation=rank.incarnation,
            target=OWNER,
            mode=mode,
            reason=reason,
        )
        self._context = self._context or zmq.asyncio.Context()
        socket = self._context.socket(zmq.DEALER)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.IPV6, 1)
            socket.connect(f"tcp://{rank.host}:{rank.port}")
            for _ in range(ATTEMPTS):
                await socket.send_multipart([HEADER, msgspec.msgpack.encode(message)])
                if await socket.poll(int(self._timing.done_retry_seconds * 1000)):
                    return
            logger.warning("%s: %s:%d did not hear of its end", key.transfer_id, rank.host, rank.port)
        except zmq.ZMQError as error:
            logger.warning("%s: %s:%d cannot be told: %s", key.transfer_id, rank.host, rank.port, error)
        finally:
            socket.close()
