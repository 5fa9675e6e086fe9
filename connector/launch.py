"""Starts and stops real engines and the router on this host, for `dfirst up`, `dfirst demo` and the tests.

Each is a `Server`: a child process that answers GET /health once it is ready. What it is told at its
start is in `engine_spec`.
"""

import http.client
import os
import urllib.request
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from .engine_spec import EngineSpec, RouterSpec, engine_command, engine_environment, router_command
from .hosts import bracketed
from .processes import STOP_SECONDS, Child, LaunchError, free_port

__all__ = ["Engine", "EngineSpec", "LaunchError", "RouterProcess", "RouterSpec", "Server", "is_healthy"]

# Half a minute on an idle machine, minutes on a crowded one; an engine that has died is noticed at once.
START_SECONDS = 600.0
HEALTH_SECONDS = 2.0

Self = TypeVar("Self", bound="Server")

# Engines here are on this host: a proxy that the environment names is not for them.
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Server(ABC):
    """A child that serves HTTP. `with Engine(spec) as engine:` starts it and stops it at the end."""

    def __init__(self, name: str, host: str, port: int, log: Path) -> None:
        self.name = name
        self.host = host
        self.port = port or free_port(host)
        self.log = log
        self._child = Child(name, log)

    @property
    def url(self) -> str:
        return f"http://{bracketed(self.host)}:{self.port}"

    @property
    def pid(self) -> int | None:
        return self._child.pid

    @property
    def alive(self) -> bool:
        return self._child.alive

    def start(self: Self) -> Self:
        """Starts the processes and returns at once; `wait_ready` tells when it answers."""
        self._child.start(self._command(), self._environment())
        return self

    def wait_ready(self, timeout_seconds: float = START_SECONDS) -> float:
        """Waits for it to answer; returns the seconds waited. A `LaunchError` holds the end of its log."""
        return self._child.wait_until(lambda: is_healthy(self.url), timeout_seconds)

    def check(self) -> None:
        """Raises `LaunchError` if it has ended."""
        self._child.check()

    def kill(self) -> None:
        """SIGKILL for every process of it, as a crash would look to its peers."""
        self._child.kill()

    def ask_to_stop(self) -> None:
        """SIGTERM and no waiting, for stopping several at once: `stop` each of them afterwards."""
        self._child.ask_to_stop()

    def stop(self, timeout_seconds: float = STOP_SECONDS) -> None:
        """SIGTERM, then SIGKILL for what is left after the time-out."""
        self._child.stop(timeout_seconds)

    def __enter__(self: Self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @abstractmethod
    def _command(self) -> list[str]:
        """The command line that starts it."""

    def _environment(self) -> dict[str, str]:
        return dict(os.environ)


class Engine(Server):
    """A vLLM API server with its engine cores and workers."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(f"the {spec.name} engine", spec.host, spec.port, spec.log)
        self.spec = spec

    def _command(self) -> list[str]:
        return engine_command(self.spec, self.port)

    def _environment(self) -> dict[str, str]:
        return engine_environment(self.spec, os.environ)


class RouterProcess(Server):
    """The router, in a process of its own."""

    def __init__(self, spec: RouterSpec) -> None:
        super().__init__("the router", spec.host, spec.port, spec.log)
        self.spec = spec

    def _command(self) -> list[str]:
        return router_command(self.spec, self.port)


def is_healthy(url: str) -> bool:
    """Whether GET /health answers 200 now."""
    try:
        with _direct.open(f"{url}/health", timeout=HEALTH_SECONDS) as answer:
            return bool(answer.status == 200)
    except (OSError, http.client.HTTPException):
        # Not listening yet, or not ready to answer: both are a plain no.
        return False
