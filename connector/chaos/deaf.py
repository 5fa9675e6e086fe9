"""A peer that accepts connections, reads all that it is told, and never answers."""

import contextlib
import socket
import threading
from types import TracebackType
from typing import Any

NAME = "deaf"


class DeafListener:
    """Listens on a port of its own inside `with`."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._listener = socket.create_server((host, 0))
        self._address = self._listener.getsockname()[:2]
        self._connections: list[socket.socket] = []

    def params(self, transfer_id: str, *, decodes: bool) -> dict[str, Any]:
        """Return the transfer parameters with which a router would send an engine to this peer."""
        host, port = self._address
        return {
            "do_remote_prefill": decodes,
            "do_remote_decode": not decodes,
            "transfer_id": transfer_id,
            "attempt": 0,
            "remote_engine_id": NAME,
            "remote_ranks": [{"host": host, "port": port, "incarnation": NAME}],
            "layout_digest": NAME,
        }

    def __enter__(self) -> "DeafListener":
        threading.Thread(target=self._accept, name="deaf-listener", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Closing alone does not wake who waits in accept or recv.
        for each in (self._listener, *self._connections):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = self._listener.accept()
                self._connections.append(connection)
                threading.Thread(
                    target=_read_all, args=(connection,), name="deaf-listener", daemon=True
                ).start()


def _read_all(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # closed, or reset by the peer
        while connection.recv(65536):
            pass
