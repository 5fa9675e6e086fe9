"""Errors in an engine's stream get the transfer's id, and nothing else is touched."""

import pytest
from dfirst.connector.router.sse import with_transfer

TOKEN = b'data: {"choices": [{"text": "a {\\"error\\""}]}\n\n'
DONE = b"data: [DONE]\n\n"


def test_an_error_among_other_events_is_named() -> None:
    error = b'data: {"error": {"message": "m", "code": 500}}\n\n'
    named = b'data: {"error":{"message":"m (transfer t)","code":500}}\n\n'
    assert with_transfer(TOKEN + error + DONE, "t") == TOKEN + named + DONE


@pytest.mark.parametrize(
    "error", [b'{"error": "m"}', b'{"error": {"message": 5}}', b'{"error": {}}', b'{"error"']
)
def test_an_error_of_another_form_stays(error: bytes) -> None:
    block = b"data: " + error + b"\n\n"
    assert with_transfer(block, "t") == block
