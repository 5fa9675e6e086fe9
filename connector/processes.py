"""Child processes that are waited for, stopped whole, and never outlive the one that started them.

A vLLM engine is a tree of processes. Each child here leads a process group of its own, so that one signal
reaches the whole tree, and on Linux the kernel sends it SIGTERM (PR_SET_PDEATHSIG) should its parent die.
It stays in its parent's session: Linux shares the processor out between sessions first (autogroup), and was
seen to leave a prefill engine none for tens of seconds beside the threads by which a decode engine waits.
"""

import atexit
import contextlib
import ctypes
import errno
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from .hosts import check_host, is_ipv6

POLL_SECONDS = 0.25
STOP_SECONDS = 15.0
EXCERPT_LINES = 12

_PR_SET_PDEATHSIG = 1
_CAUSE = re.compile(r"\b\w+(Error|Exception): ")
# Loaded before any fork: between fork and exec nothing may import or allocate more than it must.
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
_given_ports: set[int] = set()


class LaunchError(RuntimeError):
    """A child did not start, or ended when it should have run; the message holds the end of its log."""


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that nobody listens on now and that this process has not given out before."""
    while True:
        with socket.socket(socket.AF_INET6 if is_ipv6(host) else socket.AF_INET) as probe:
            probe.bind((host, 0))
            port: int = probe.getsockname()[1]
        if port not in _given_ports:
            _given_ports.add(port)
            return port


def check_port(host: str, port: int) -> None:
    """Raise `LaunchError`, or `ValueError` for no host at all, if no server can listen there; port 0 asks for
    any free one."""
    check_host("--host", host)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise _no_host(host, error) from error
    for family, kind, protocol, _, address in found:
        try:
            probe = socket.socket(family, kind, protocol)
        except OSError:
            continue  # as the server does: this machine lacks the family
        with probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                # As the server does: an IPv4 listener on the same port is no obstacle.
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                probe.bind(address)
            except OSError as error:
                if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                    raise _no_host(host, error) from error
                raise LaunchError(
                    f"port {port} of {host} cannot be used: {error.strerror}; name another one with --port"
                ) from error


def _no_host(host: str, error: Exception) -> LaunchError:
    why = getattr(error, "strerror", None) or error
    return LaunchError(
        f"--host {host} cannot be listened on: {why}; give an address of this machine, such as 127.0.0.1, or "
        "0.0.0.0 for all"
    )


class Child:
    """One child process with its log file. Start it from the main thread: the kernel's word that the
    parent has died is bound to the thread that forked."""

    def __init__(self, name: str, log: Path) -> None:
        self.name = name
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._started = False

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        if self.alive:
            raise LaunchError(f"{self.name} runs already, as process {self.pid}; stop it before a new start")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        parent = os.getpid()
        # A second start goes on in the same log: what led to it is read there.
        with self.log.open("ab" if self._started else "wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                preexec_fn=lambda: _begin(parent),
            )
        self._started = True
        atexit.register(self.kill)

    def wait_until(self, ready: Callable[[], bool], timeout_seconds: float) -> float:
        """Waits until `ready()`; returns the seconds it took. Raises if the child or the time ends first."""
        started = time.monotonic()
        while True:
            self.check()
            if ready():
                return time.monotonic() - started
            if time.monotonic() - started > timeout_seconds:
                raise LaunchError(
                    f"{self.name} was not ready after {timeout_seconds:.0f} s; raise the time-out, or see "
                    f"its log {self.log}:\n{log_excerpt(self.log)}"
                )
            time.sleep(POLL_SECONDS)

    def check(self) -> None:
        """Raises if the child is not running."""
        if self._process is None:
            raise LaunchError(f"{self.name} was never started")
        code = self._process.poll()
        if code is not None:
            how = f"with exit code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
            raise LaunchError(f"{self.name} ended {how}; its log is {self.log}:\n{log_excerpt(self.log)}")

    def kill(self) -> None:
        """SIGKILL to the whole group, also to what its leader left behind. Harmless when nothing runs."""
        if self._process is None:
            return
        _signal_group(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._forget()

    def stop(self, timeout_seconds: float = STOP_SECONDS) -> None:
        """SIGTERM, then SIGKILL for whatever is left."""
        self.ask_to_stop()
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_seconds)
        self.kill()

    def ask_to_stop(self) -> None:
        """SIGTERM and no waiting, for stopping several at once: `stop` each of them afterwards."""
        if self.alive and self._process is not None:
            self._process.terminate()

    def _forget(self) -> None:
        # Its number may belong to another process from now on.
        self._process = None
        atexit.unregister(self.kill)


def end_on_sigterm_as_on_ctrl_c() -> None:
    """So that whoever stops this process with SIGTERM also gets its children stopped in order."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def log_excerpt(log: Path, lines: int = EXCERPT_LINES) -> str:
    """The line that tells why, if one looks like it, and the last lines of a log."""
    try:
        text = log.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return "  (there is no such log)"
    last = text[-lines:]
    # An engine's last words are about its own shutdown; the cause is the last line of an earlier traceback.
    causes = [line for line in text[:-lines] if _CAUSE.search(line) and "WARNING" not in line]
    picked = [*causes[-2:], "...", *last] if causes else last
    return "\n".join(f"  {line[:300]}" for line in picked) or "  (the log is empty)"


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def _begin(parent: int) -> None:
    os.setpgid(0, 0)
    if _libc is None:
        return
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        # The parent died between fork and the call above: nobody is left to stop this child.
        os._exit(1)
