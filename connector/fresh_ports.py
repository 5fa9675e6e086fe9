"""Data ports that no process of this host has had lately (rule R6).

A copy that was meant for a process that has ended reaches whoever listens at its data port next, at the same
addresses in memory. The Transfer Engine draws its ports at random, so that a restarted rank seldom gets its
predecessor's; here it never does. Every rank that serves keeps a file for each of its ports, and a lock on it
for as long as it lives. Who starts later asks for none of these ports until the file has lain without a lock
for as long as a lease and its last write may take.

Processes that share a host's addresses without sharing its temporary directory or its user do not know of
each other: for them the rule rests on the draw alone.
"""

import contextlib
import fcntl
import logging
import os
import socket
import stat
import tempfile
import time
from collections.abc import Collection, Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

_ALIVE, _ENDED = b"alive", b"ended"
_kept: list[int] = []
"""Descriptors of this process's own files: their locks end with it."""


def default_directory() -> Path:
    """Return where this user's processes on this host keep their files."""
    return Path(tempfile.gettempdir()) / f"dfirst-ports-{os.getuid()}"


def listening_ports() -> set[int]:
    """Return the TCP ports at which this process listens."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed since it was listed
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                found.update(_listening_port(int(name)))
    return found


def _listening_port(number: int) -> list[int]:
    # A duplicate, since closing the Python object closes what it holds.
    with socket.socket(fileno=os.dup(number)) as candidate:
        inet = candidate.family in (socket.AF_INET, socket.AF_INET6)
        if inet and candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return [candidate.getsockname()[1]]
    return []


def all_fresh(ports: Collection[int], seconds: float, keep: bool, directory: Path | None = None) -> bool:
    """Return whether no process has had one of these ports within the last ``seconds``; if so, and ``keep``,
    they are this process's until it ends. A directory that cannot be written is logged, and counts as yes.
    """
    directory = directory or default_directory()
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        with _locked(directory / "lock"):
            for path in directory.iterdir():
                if path.name.isdecimal():
                    _forget_if_old(path, seconds)
            if any((directory / str(port)).exists() for port in ports):
                return False
            if keep:
                _kept.extend(_file(directory / str(port)) for port in ports)
    except OSError as error:
        logger.warning("which data ports were used lately cannot be noted: %s", error)
    return True


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _file(path: Path) -> int:
    number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.write(number, _ALIVE)
    return number


def _forget_if_old(path: Path, seconds: float) -> None:
    with path.open("r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return  # its process lives
        if file.read() != _ENDED:
            # Nobody knows when it ended, but that it has ended by now: the count begins here.
            file.seek(0)
            file.write(_ENDED)
            file.truncate()
        elif time.time() >= path.stat().st_mtime + seconds:
            path.unlink()
