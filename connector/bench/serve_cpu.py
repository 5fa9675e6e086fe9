"""CPU time of servers, each with all processes under it."""

import contextlib
from collections.abc import Sequence

import msgspec
import psutil

from ..launch import Server

CLIENT = "client"
"""The name of this process, which sends the load."""


class CpuTime(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of CPU, in user and in kernel mode together."""

    process: str
    seconds: float


def cpu_times(servers: Sequence[Server]) -> list[CpuTime]:
    """Return what each server and its children have used since they started, and this process itself."""
    own = psutil.Process().cpu_times()
    return [
        *(CpuTime(process=server.log.stem, seconds=_tree_seconds(server)) for server in servers),
        CpuTime(process=CLIENT, seconds=own.user + own.system),
    ]


def used_between(before: Sequence[CpuTime], after: Sequence[CpuTime]) -> list[CpuTime]:
    """Return the seconds from one reading to the next of the same servers."""
    return [
        CpuTime(process=late.process, seconds=late.seconds - early.seconds)
        for early, late in zip(before, after, strict=True)
    ]


def _tree_seconds(server: Server) -> float:
    if server.pid is None:
        raise ValueError(f"{server.name} is not running, so its CPU time cannot be read")
    root = psutil.Process(server.pid)
    seconds = 0.0
    for process in [root, *root.children(recursive=True)]:
        # A short-lived helper may end between the two calls; what it used is in its parent's account.
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            seconds += times.user + times.system
    return seconds
