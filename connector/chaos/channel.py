"""A side channel that loses, delays, repeats, reorders and garbles what it is told to send."""

import heapq
import logging
import random
import time
from functools import partial
from typing import Any

import zmq

from ...protocol.messages import Message
from ..side_channel import HEADER, SideChannel
from .orders import MESSAGE_FAULTS, Order, OrderBook, garble

logger = logging.getLogger(__name__)

LONGEST_SECONDS = 1.0
"""So long does a message that is to be overtaken wait for another one."""


class FaultyChannel(SideChannel):
    """Faults strike after the connector has let go of a message, and before the socket has it."""

    def __init__(self, book: OrderBook, *arguments: Any) -> None:
        self._book = book
        self._late: list[tuple[float, int, partial[None]]] = []
        self._overtaken: list[partial[None]] = []
        self._serial = 0
        super().__init__(*arguments)
        poller = _Poller(self)
        for socket, flags in self.poller.sockets:
            poller.register(socket, flags)
        self.poller = poller

    def next_late_seconds(self) -> float | None:
        """Return in how long the next message that was held back is to leave."""
        return max(0.0, self._late[0][0] - time.monotonic()) if self._late else None

    def send_late(self) -> None:
        """Send what was held back for long enough."""
        while self._late and self._late[0][0] <= time.monotonic():
            heapq.heappop(self._late)[2]()

    def _send(self, socket: "zmq.Socket[bytes]", route: list[bytes], message: Message) -> None:
        order = self._book.take(MESSAGE_FAULTS, tag(message))
        send = partial(super()._send, socket, route, message)
        if order is None:
            send()
            overtaken, self._overtaken = self._overtaken, []
            for held in overtaken:
                held()
        elif order.fault == "garbled":
            self._garbled(socket, route, message, order)
        elif order.fault == "delayed":
            self._hold(send, order.seconds)
        elif order.fault == "repeated":
            send()
            send()
            self._hold(send, order.seconds)
        elif order.fault == "reordered":
            once = _Once(send)
            self._overtaken.append(partial(once))
            self._hold(partial(once), LONGEST_SECONDS)

    def _hold(self, send: "partial[None]", seconds: float) -> None:
        self._serial += 1
        heapq.heappush(self._late, (time.monotonic() + seconds, self._serial, send))

    def _garbled(
        self, socket: "zmq.Socket[bytes]", route: list[bytes], message: Message, order: Order
    ) -> None:
        frames = garble((HEADER, self._encoder.encode(message)), random.Random(order.number))
        try:
            socket.send_multipart([*route, *frames], zmq.DONTWAIT)
        except zmq.ZMQError as error:
            logger.warning("a garbled %s was not sent: %s", tag(message), error)


class _Once:
    """A message that is sent by whoever comes first."""

    def __init__(self, send: "partial[None]") -> None:
        self._send: partial[None] | None = send

    def __call__(self) -> None:
        send, self._send = self._send, None
        if send is not None:
            send()


class _Poller(zmq.Poller):
    """Wakes up in time for what was held back."""

    def __init__(self, channel: FaultyChannel) -> None:
        super().__init__()
        self._channel = channel

    def poll(self, timeout: float | None = None) -> list[tuple[Any, int]]:
        seconds = self._channel.next_late_seconds()
        if seconds is not None:
            late = seconds * 1000 + 1
            timeout = late if timeout is None or timeout < 0 else min(timeout, late)
        found = super().poll(timeout)
        self._channel.send_late()
        return found


def tag(message: Message) -> str:
    """Return a message's name on the wire."""
    return str(type(message).__struct_config__.tag)
