"""The side channel: one ROUTER socket that a rank listens on, and a DEALER for each peer that it speaks to.

Nothing here blocks and nothing is retried: what cannot be sent now is dropped and counted, since the
protocol repeats what matters. What does not decode is counted, logged once in a while and, where it came in
at the ROUTER, answered with ERROR. A frame with the protocol's name and version goes before each message.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, cast

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from ..protocol.limits import Sentence
from ..protocol.messages import MAX_MESSAGE_BYTES, PROTOCOL, VERSION, Error, Message
from .curve import CurveKeys
from .hosts import bracketed

logger = logging.getLogger(__name__)

HEADER = f"{PROTOCOL}/{VERSION}".encode()
MAX_PEERS = 4096
"""Connections to other ranks that are kept open; the one that was idle longest goes first."""
_OWN_SOCKETS = 16
"""The listener's, its monitor's and the gate's; more than there are."""
RECEIVE_BATCH = 256
"""Messages that one call takes from a socket, so that a flood cannot hold the caller."""
LOG_EVERY_SECONDS = 30.0
QUEUE_MESSAGES = 10_000
"""Messages that wait for a peer that does not take them; further ones are dropped."""
RECONNECT_SECONDS = 1.0
"""A connection at least this old that takes nothing is made anew."""
LONGEST_REASON: int = Sentence.__metadata__[0].max_length
LAST_WORDS_MS = 200
"""For messages that are on their way when the channel is closed."""

_REFUSALS = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_INCOMING = b"R"
_OUTGOING = b"D"


class SideChannel:
    """Messages in and out. Used by one thread."""

    def __init__(self, host: str, ports: range, keys: CurveKeys | None = None) -> None:
        """Listen at ``host``, on the first free of ``ports`` (any free one if empty). With ``keys`` only
        parties of this deployment are heard, and nothing is told to others.
        """
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_PEERS + _OWN_SOCKETS)
        self._keys = keys
        self._gate = keys.gate(self._context) if keys else None
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(cast(Any, Message))
        self._peers: dict[bytes, zmq.Socket[bytes]] = {}
        self._connected_at: dict[bytes, float] = {}
        self._last_log = -math.inf
        self.counters: Counter[str] = Counter()
        self.poller = zmq.Poller()
        self._router = self._socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if keys:
            keys.secure_listener(self._router)
        self._refusals = self._router.get_monitor_socket(_REFUSALS)
        self.host = host
        try:
            self.port = self._bind(host, ports)
        except BaseException:
            self.close()
            raise
        self.poller.register(self._router, zmq.POLLIN)
        self.poller.register(self._refusals, zmq.POLLIN)

    def send(self, host: str, port: int, message: Message) -> None:
        """Send a message to the rank that listens there."""
        self._send_to_peer(f"{bracketed(host)}:{port}".encode(), message)

    def reply(self, route: bytes, message: Message) -> None:
        """Send a message back by the route by which one came."""
        kind, name = route[:1], route[1:]
        if kind == _INCOMING:
            self._send(self._router, [name], message)
        else:
            self._send_to_peer(name, message)

    def receive(self) -> Iterator[tuple[bytes, Message]]:
        """Return the messages that have arrived, each with the route back."""
        # Asked all at once: an empty socket costs an exception.
        ready = {found for found, _ in self.poller.poll(0)}
        if self._refusals in ready:
            self._note_refusals()
        if self._router in ready:
            yield from self._drain(self._router, None)
        for name, socket in list(self._peers.items()):
            if socket in ready:
                yield from self._drain(socket, name)

    def close(self) -> None:
        """Close every socket; what is not sent within ``LAST_WORDS_MS`` is given up."""
        self._router.disable_monitor()
        self._refusals.close(linger=0)
        for socket in (*self._peers.values(), self._router):
            socket.close(linger=LAST_WORDS_MS)
        if self._gate is not None:
            self._gate.stop()
        self._context.term()

    def _bind(self, host: str, ports: range) -> int:
        for port in ports or [0]:
            try:
                self._router.bind(f"tcp://{bracketed(host)}:{port or '*'}")
            except zmq.ZMQError as error:
                if error.errno != zmq.EADDRINUSE:
                    where = f"port {port} of {host}" if port else f"any port of {host}"
                    raise ValueError(f"the side channel cannot bind to {where}: {error}") from error
            else:
                endpoint = cast(bytes, self._router.getsockopt(zmq.LAST_ENDPOINT))
                return int(endpoint.rstrip(b"\0").rpartition(b":")[2])
        if not ports:
            raise ValueError(f"no port is free on {host}")
        raise ValueError(
            f"all ports from {ports[0]} to {ports[-1]} are in use on {host}: widen port_range or leave it out"
        )

    def _socket(self, kind: int) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES)
        socket.setsockopt(zmq.RCVHWM, QUEUE_MESSAGES)
        return socket

    def _peer(self, name: bytes) -> "zmq.Socket[bytes]":
        socket = self._peers.pop(name, None)
        if socket is None:
            socket = self._socket(zmq.DEALER)
            try:
                if self._keys:
                    self._keys.secure_asker(socket)
                socket.connect(f"tcp://{name.decode()}")
            except BaseException:
                socket.close(linger=0)
                raise
            self.poller.register(socket, zmq.POLLIN)
            self._connected_at[name] = time.monotonic()
        self._peers[name] = socket  # the last one in the order was used last
        if len(self._peers) > MAX_PEERS:
            self._give_up(next(iter(self._peers)))
        return socket

    def _age_seconds(self, name: bytes) -> float:
        return time.monotonic() - self._connected_at[name]

    def _give_up(self, name: bytes) -> None:
        """Close the connection to a peer; the next message makes a new one."""
        socket = self._peers.pop(name)
        del self._connected_at[name]
        self.poller.unregister(socket)
        socket.close(linger=0)

    def _send_to_peer(self, name: bytes, message: Message) -> None:
        try:
            socket = self._peer(name)
        except (zmq.ZMQError, UnicodeError) as error:
            # The address came from outside, with a request or a directory, and is none.
            self.counters["not_sent"] += 1
            self._complain(
                "a %s cannot be sent to %r: %s",
                type(message).__name__,
                name.decode("utf-8", "replace"),
                error,
            )
            return
        before = self.counters["not_sent"]
        self._send(socket, [], message)
        if self.counters["not_sent"] > before and self._age_seconds(name) > RECONNECT_SECONDS:
            # ZeroMQ gives an address up for good where no rank of this deployment answered, and by now a new
            # rank may listen there.
            self._give_up(name)

    def _send(self, socket: "zmq.Socket[bytes]", route: list[bytes], message: Message) -> None:
        try:
            socket.send_multipart([*route, HEADER, self._encoder.encode(_readable(message))], zmq.DONTWAIT)
        except zmq.ZMQError as error:
            self.counters["not_sent"] += 1
            self._complain("a %s was not sent: %s", type(message).__name__, error)

    def _drain(self, socket: "zmq.Socket[bytes]", name: bytes | None) -> Iterator[tuple[bytes, Message]]:
        for _ in range(RECEIVE_BATCH):
            try:
                frames = socket.recv_multipart(zmq.DONTWAIT)
            except zmq.ZMQError:
                return  # nothing more is there, or the socket was given up while messages were dealt with
            incoming = name is None
            route = _INCOMING + frames[0] if incoming else _OUTGOING + cast(bytes, name)
            message = self._decode(frames[1:] if incoming else frames, route, incoming)
            if message is not None:
                yield route, message

    def _decode(self, frames: list[bytes], route: bytes, incoming: bool) -> Message | None:
        try:
            if len(frames) != 2:
                raise ValueError(f"{len(frames)} frames instead of a header and a message")
            if frames[0] != HEADER:
                raise ValueError(f"the header is {frames[0][:32]!r}, this side speaks {HEADER.decode()}")
            return cast(Message, self._decoder.decode(frames[1]))
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            self.counters["undecodable"] += 1
            self._complain(
                "a message was not understood: %s (%d so far)", error, self.counters["undecodable"]
            )
            if incoming:
                # Only here: two sides that answered each other's errors would never stop.
                self.reply(route, Error(reason=str(error)))
            return None

    def _note_refusals(self) -> None:
        """Count the connections that did not come about, and say so: the other side learns no reason."""
        for _ in range(RECEIVE_BATCH):
            if not self._refusals.poll(0):
                return
            recv_monitor_message(self._refusals)
            self.counters["refused_connections"] += 1
            self._complain(
                "a connection to %s:%d was refused (%d so far): %s",
                self.host,
                self.port,
                self.counters["refused_connections"],
                f"its key is not in {self._keys.directory}, or it has none"
                if self._keys
                else "it uses CURVE keys or speaks no ZeroMQ, and this rank has no curve_keys",
            )

    def _complain(self, text: str, *values: object) -> None:
        now = time.monotonic()
        if now - self._last_log >= LOG_EVERY_SECONDS:
            self._last_log = now
            logger.warning(text, *values)


def _readable(message: Message) -> Message:
    """Cut a reason that is longer than the other side reads: reasons quote reasons."""
    reason = getattr(message, "reason", "")
    if len(reason) <= LONGEST_REASON:
        return message
    return msgspec.structs.replace(message, reason=reason[:LONGEST_REASON])
