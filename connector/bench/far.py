"""The other process of a benchmark."""

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


class Far:
    """A process that answers calls by name, until it is let go."""

    def __init__(self, serve: Callable[[Connection, int], None], size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(target=serve, args=(there, size), daemon=True)
        self._process.start()
        there.close()

    def __call__(self, name: str, *arguments: object) -> Any:
        connection: Connection = self._here
        connection.send((name, arguments))
        try:
            return connection.recv()
        except EOFError as error:
            raise RuntimeError(f"the prefill process ended at {name}; what it said is above") from error

    def end(self) -> None:
        """Let it go."""
        self._here.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
