"""What can go wrong with a request, each with its HTTP status and the form in which OpenAI's clients read it.

``message`` goes to the client. ``reason`` goes to logs and to engines: it never holds text that an engine or
a client wrote, since that may quote a prompt.
"""

import msgspec


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


class RouterError(Exception):
    """The request ends here, with this answer to the client."""

    content_type = "application/json"

    def __init__(
        self, status: int, kind: str, message: str, *, reason: str = "", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.message = message
        self.reason = reason or message
        self.param = param

    def content(self) -> bytes:
        return msgspec.json.encode(ErrorBody(ErrorDetail(self.message, self.kind, self.param, self.status)))

    def event(self) -> bytes:
        """The error inside a stream that has begun."""
        return b"data: " + self.content() + b"\n\n"


class BadRequest(RouterError):
    """The client's request cannot be served as it stands."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(400, "invalid_request_error", message, param=param)


class EngineError(RouterError):
    """An engine broke, stayed away or took too long."""

    def __init__(self, status: int, what: str, transfer_id: str, *, detail: str = "") -> None:
        message = f"{what}{named(transfer_id)}"
        if detail:
            message += f": {detail}"
        super().__init__(status, "engine_error", message, reason=what)


class EngineRejected(RouterError):
    """An engine found fault with the request: its own words and status go to the client."""

    def __init__(self, role: str, status: int, content: bytes, content_type: str) -> None:
        what = f"the {role} engine rejected the request with status {status}"
        super().__init__(status, "invalid_request_error", what)
        self.content_type = content_type
        self.engine_content = content

    def content(self) -> bytes:
        return self.engine_content

    def event(self) -> bytes:
        try:
            one_line = msgspec.json.encode(msgspec.json.decode(self.engine_content))
        except msgspec.DecodeError:
            return b"data: " + super().content() + b"\n\n"
        return b"data: " + one_line + b"\n\n"


class StreamedError(RouterError):
    """A decode engine reported an error inside its stream: it goes on, with the transfer's id."""

    def __init__(self, payload: bytes) -> None:
        super().__init__(502, "engine_error", "the decode engine reported an error in its stream")
        self.payload = payload

    def content(self) -> bytes:
        return self.payload


def named(transfer_id: str) -> str:
    """Return how a transfer is named at the end of a sentence; nothing where a call belongs to none."""
    return f" (transfer {transfer_id})" if transfer_id else ""


def engine_message(content: bytes) -> str:
    """The sentence in an engine's error answer, where it has one."""
    try:
        return msgspec.json.decode(content, type=ErrorText).error.message
    except msgspec.DecodeError:
        return ""


class ErrorTextDetail(msgspec.Struct):
    message: str


class ErrorText(msgspec.Struct):
    error: ErrorTextDetail
