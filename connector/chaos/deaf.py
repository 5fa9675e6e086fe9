"""A peer that accepts connections, reads all that it is told, and never answers."""

import asyncio
import contextlib


class DeafListener:
    """Listens on a port of its own between `start` and `close`."""

    def __init__(self) -> None:
        self.host = ""
        self.port = 0
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.StreamWriter] = set()

    async def start(self, host: str) -> None:
        self._server = await asyncio.start_server(self._swallow, host, 0)
        self.host, self.port = self._server.sockets[0].getsockname()[:2]

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.close()

    async def _swallow(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        try:
            with contextlib.suppress(ConnectionError):
                while await reader.read(65536):
                    pass
        finally:
            self._connections.discard(writer)
            writer.close()
