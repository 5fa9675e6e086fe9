"""Two settings of the Transfer Engine's listening sockets that it has no option for.

The engine listens on all addresses of the host and serves registered memory to whoever connects. A socket
filter that drops packets for other addresses makes it listen, in effect, on the configured one.
"""

import contextlib
import ctypes
import ipaddress
import logging
import os
import socket
import stat
import struct
import threading
from collections.abc import Iterator

logger = logging.getLogger(__name__)

_SO_ATTACH_FILTER = 26
_NETWORK_HEADER = 0xFFF00000
"""Offset by which a filter reads the IP header instead of the TCP header."""
_LOAD_BYTE, _LOAD_WORD = 0x30, 0x20
_SHIFT_RIGHT, _JUMP_EQUAL, _RETURN = 0x74, 0x15, 0x06
_DESTINATION_OFFSET_BYTES = 16
_ACCEPT_SECONDS = 0.1
_KNOCK_SECONDS = 1.0
ONE_AT_A_TIME = threading.RLock()
"""Held by whoever compares this process's sockets before and after something: two at once would each take the
other's sockets, and the duplicates through which it looks at them, for what it waits for.
"""


@contextlib.contextmanager
def keep_to_address(host: str) -> Iterator[None]:
    """Restrict the sockets that start to listen on all addresses inside this block to ``host``.

    ``host`` must be an IPv4 address: a name may mean another address to the peers than it means here.
    """
    with ONE_AT_A_TIME:
        before = _listening_everywhere().keys()
        yield
        for inode, number in _listening_everywhere().items():
            if inode not in before:
                _restrict(number, host)


def _restrict(number: int, host: str) -> None:
    try:
        address = int(ipaddress.IPv4Address(host))
    except ipaddress.AddressValueError:
        logger.warning("%s is no IPv4 address: the data ports stay open on all addresses", host)
        return
    with _borrowed(number) as listener:
        _let_accept_return(listener)
        if address:
            _attach_filter(listener, address)
        _end_first_accept(host, listener.getsockname()[1])


def _let_accept_return(listener: socket.socket) -> None:
    # The engine's destructor waits for its thread to come out of accept, and holds the interpreter lock.
    timeout = struct.pack("ll", 0, int(_ACCEPT_SECONDS * 1_000_000))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)


def _end_first_accept(host: str, port: int) -> None:
    # The thread may wait already, and then as long as the engine had told it to: for a second.
    try:
        socket.create_connection((host, port), timeout=_KNOCK_SECONDS).close()
    except OSError as error:
        logger.debug("%s:%d: nobody accepts yet: %s", host, port, error)


def _listening_everywhere() -> dict[int, int]:
    """Return this process's TCP sockets that listen on all addresses: descriptors by their inodes.

    A descriptor's number alone names no socket: another thread may close one and the next gets its number.
    """
    found = {}
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        try:
            status = os.fstat(number)
            if not stat.S_ISSOCK(status.st_mode):
                continue
            with _borrowed(number) as candidate:
                listening = candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if listening and candidate.getsockname()[0] in ("0.0.0.0", "::"):
                    found[status.st_ino] = number
        except OSError:
            continue  # closed by another thread since it was listed, or no TCP socket
    return found


@contextlib.contextmanager
def _borrowed(number: int) -> Iterator[socket.socket]:
    """Use a descriptor that belongs to the engine as a Python socket, and leave it open."""
    # A duplicate, since closing the Python object closes what it holds.
    borrowed = socket.socket(fileno=os.dup(number))
    try:
        yield borrowed
    finally:
        borrowed.close()


def _attach_filter(listener: socket.socket, address: int) -> None:
    """Drop what is not IPv4 for ``address``: with the first packet of a connection, the connection."""
    steps = [
        (_LOAD_BYTE, 0, 0, _NETWORK_HEADER),
        (_SHIFT_RIGHT, 0, 0, 4),
        (_JUMP_EQUAL, 0, 3, 4),
        (_LOAD_WORD, 0, 0, _NETWORK_HEADER + _DESTINATION_OFFSET_BYTES),
        (_JUMP_EQUAL, 0, 1, address),
        (_RETURN, 0, 0, 0xFFFFFFFF),
        (_RETURN, 0, 0, 0),
    ]
    program = b"".join(struct.pack("HBBI", *step) for step in steps)
    buffer = ctypes.create_string_buffer(program, len(program))
    listener.setsockopt(
        socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", len(steps), ctypes.addressof(buffer))
    )
