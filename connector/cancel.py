"""Cancels transfers for a router, over the ranks' side channels."""

import asyncio
import logging
import secrets
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import zmq
import zmq.asyncio

from ..protocol.messages import MAX_MESSAGE_BYTES, Ack, Cancel, Error, Message, Sender, TransferKey
from ..protocol.modes import OWNER
from ..protocol.timing import Timing
from .curve import CurveKeys
from .hosts import bracketed
from .router.cancel import RankAddress
from .side_channel import HEADER

logger = logging.getLogger(__name__)

ATTEMPTS = 5
"""How often CANCEL is sent to a rank that does not acknowledge it; then its leases and its hold time free
it.
"""
MAX_SOCKETS = 256
"""Ranks that are told at the same time; further ones wait for their turn."""


class SideChannelCanceller:
    """Says CANCEL to ranks until they acknowledge it, or for a few seconds."""

    def __init__(self, timing: Timing | None = None, keys: CurveKeys | None = None) -> None:
        """With ``keys`` only ranks of their deployment are told anything."""
        self._timing = timing or Timing()
        self._keys = keys
        self._sender = Sender("router", -1, secrets.token_hex(8))
        self._context: zmq.asyncio.Context | None = None
        self._turns = asyncio.Semaphore(MAX_SOCKETS)
        self._decoder = msgspec.msgpack.Decoder(cast(Any, Message))

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
        async with self._turns:
            try:
                acknowledged = await self._repeat(rank, message)
            except zmq.ZMQError as error:
                logger.warning("%s: %s:%d cannot be told: %s", key.transfer_id, rank.host, rank.port, error)
                return
        if not acknowledged:
            logger.warning(
                "%s: %s:%d did not hear of its end: its leases will end by themselves%s",
                key.transfer_id,
                rank.host,
                rank.port,
                "" if self._keys else " (if its engine has curve_keys, this router needs --curve-keys)",
            )

    async def _repeat(self, rank: RankAddress, message: Cancel) -> bool:
        """Say it until it is acknowledged; return whether it was."""
        self._context = self._context or zmq.asyncio.Context()
        socket = self._context.socket(zmq.DEALER)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.IPV6, 1)
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
            if self._keys is not None:
                self._keys.secure_asker(socket)
            socket.connect(f"tcp://{bracketed(rank.host)}:{rank.port}")
            for _ in range(ATTEMPTS):
                try:
                    return await asyncio.wait_for(self._ask(socket, message), self._timing.done_retry_seconds)
                except asyncio.TimeoutError:
                    continue
            return False
        finally:
            socket.close()

    async def _ask(self, socket: zmq.asyncio.Socket, message: Cancel) -> bool:
        """Say it once and wait for the rank's word on it; return whether it is an acknowledgement.

        Even saying it may have to wait: for a rank whose keys are others there is no connection.
        """
        key = message.key
        await socket.send_multipart([HEADER, msgspec.msgpack.encode(message)])
        while True:
            frames = await socket.recv_multipart()
            try:
                answer = self._decoder.decode(frames[-1])
            except (msgspec.MsgspecError, ValueError, RecursionError):
                return False  # whoever listens there speaks another language
            if isinstance(answer, Ack) and answer.key == key:
                return True
            if isinstance(answer, Error):
                logger.warning("%s: CANCEL was not understood: %s", key.transfer_id, answer.reason)
                return False
