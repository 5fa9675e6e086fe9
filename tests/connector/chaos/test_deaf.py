"""The peer that takes everything and says nothing."""

import contextlib
import socket
import threading

import pytest
from dfirst.connector.chaos.deaf import DeafListener
from dfirst.connector.transfer_params import read_params


@pytest.mark.parametrize("decodes", [True, False])
def test_engines_take_what_names_it(decodes: bool) -> None:
    with DeafListener() as deaf:
        transfer = read_params(deaf.params("t", decodes=decodes), "r", 10)
    assert transfer is not None
    assert transfer.mode == ("blockwise" if decodes else "layerwise")
    assert transfer.remote is not None


def test_it_accepts_reads_and_never_answers_until_it_ends() -> None:
    with DeafListener() as deaf:
        (rank,) = deaf.params("t", decodes=True)["remote_ranks"]
        caller = socket.create_connection((rank["host"], rank["port"]))
        caller.settimeout(0.2)
        caller.sendall(bytes(4 << 20))
        with pytest.raises(TimeoutError):
            caller.recv(1)
        caller.settimeout(5.0)
    with caller, contextlib.suppress(ConnectionResetError):
        assert caller.recv(1) == b""
    assert not [
        thread for thread in threading.enumerate() if thread.name == "deaf-listener" and _stays(thread)
    ]


def _stays(thread: threading.Thread) -> bool:
    thread.join(5.0)
    return thread.is_alive()
