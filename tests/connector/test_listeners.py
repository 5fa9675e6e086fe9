"""Listening sockets are restricted to an address, also where many are opened at once."""

import socket
import struct
from concurrent.futures import ThreadPoolExecutor

from dfirst.connector.listeners import keep_to_address

THREADS = 8
ROUNDS = 30
ACCEPT_TIMEOUT = struct.Struct("ll")


def open_listener(_number: int) -> tuple[int, int]:
    """Open a socket as the engine does; return for how long it accepts, which is set with the filter."""
    with keep_to_address("127.0.0.1"):
        listener = socket.create_server(("", 0))
    with listener:
        option = listener.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, ACCEPT_TIMEOUT.size)
        return ACCEPT_TIMEOUT.unpack(option)


def test_sockets_that_are_opened_at_once_are_each_restricted() -> None:
    with ThreadPoolExecutor(THREADS) as pool:
        times = list(pool.map(open_listener, range(THREADS * ROUNDS)))
    assert all(seconds or microseconds for seconds, microseconds in times)
