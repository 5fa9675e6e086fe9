"""The client's answer being written, whole or as a stream; an error fits in at any point."""

import msgspec
from starlette.types import Send

from .errors import RouterError
from .sse import CONTENT_TYPE, DONE


class Reply:
    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._request_id = request_id
        self.started = False
        self.finished = False
        self.outcome = "ok"
        self.transfers: list[str] = []
        """Named in the answer's head, from the moment that nobody can post for them any more."""

    async def whole(self, status: int, content: bytes, content_type: str) -> None:
        await self._start(status, content_type, len(content))
        await self._body(content, more=False)

    async def json(self, value: object) -> None:
        await self.whole(200, msgspec.json.encode(value), "application/json")

    async def begin_stream(self) -> None:
        await self._start(200, CONTENT_TYPE, None)

    async def chunk(self, content: bytes) -> None:
        await self._body(content, more=True)

    async def end_stream(self) -> None:
        await self._body(b"", more=False)

    async def error(self, error: RouterError) -> None:
        """The error as the answer, or as the last event of a stream that has begun."""
        if self.finished:
            return
        self.outcome = "error"
        if self.started:
            await self._body(error.event() + DONE, more=False)
        else:
            await self.whole(error.status, error.content(), error.content_type)

    async def _start(self, status: int, content_type: str, length: int | None) -> None:
        self.started = True
        headers = [
            (b"content-type", content_type.encode("latin-1")),
            (b"x-request-id", self._request_id.encode("latin-1")),
        ]
        if self.transfers:
            headers.append((b"x-dfirst-transfer", ", ".join(self.transfers).encode()))
        if length is not None:
            headers.append((b"content-length", str(length).encode()))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _body(self, content: bytes, *, more: bool) -> None:
        self.finished = not more
        await self._send({"type": "http.response.body", "body": content, "more_body": more})
