"""Server-sent events as they come from an engine: cut into whole events, and otherwise left alone.

Only whole events go on, so that an engine that breaks off in the middle of one leaves the client's stream
in a state where an error event can follow.
"""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec

from .errors import named

DONE = b"data: [DONE]\n\n"
DONE_PAYLOAD = b"[DONE]"
CONTENT_TYPE = "text/event-stream; charset=utf-8"
ERROR_START = b'data: {"error"'
BOUNDARY = b"\n\n"


def is_stream(response: httpx.Response) -> bool:
    content_type: str = response.headers.get("content-type", "")
    return content_type.startswith("text/event-stream")


async def event_blocks(response: httpx.Response) -> AsyncIterator[bytes]:
    """As many whole events as each chunk completes, in one piece."""
    rest = b""
    async for chunk in response.aiter_bytes():
        # JSON holds no bare carriage return: those here only end lines.
        rest += chunk.replace(b"\r", b"")
        end = rest.rfind(BOUNDARY)
        if end >= 0:
            yield rest[: end + len(BOUNDARY)]
            rest = rest[end + len(BOUNDARY) :]


def payloads(block: bytes) -> list[bytes]:
    """What stands behind ``data:`` in each event of a block."""
    return [
        event.removeprefix(b"data:").strip() for event in block.split(BOUNDARY) if event.startswith(b"data:")
    ]


def holds_error(block: bytes) -> bool:
    """True if an event is an error. No text of a model looks so: a line break inside JSON is escaped."""
    return block.startswith(ERROR_START) or b"\n" + ERROR_START in block


def with_transfer(block: bytes, transfer_id: str) -> bytes:
    """The events of a block; an error among them also says which transfer it ended."""
    return BOUNDARY.join(
        b"data: " + error_with_transfer(event.removeprefix(b"data:"), transfer_id)
        if event.startswith(ERROR_START)
        else event
        for event in block.split(BOUNDARY)
    )


def error_with_transfer(payload: bytes, transfer_id: str) -> bytes:
    """An engine's error with the transfer's id in its message; one of another form stays as it is."""
    try:
        body = msgspec.json.decode(payload, type=dict[str, Any])
        body["error"]["message"] += named(transfer_id)
    except (msgspec.DecodeError, KeyError, TypeError):
        return payload.strip()
    return msgspec.json.encode(body)
