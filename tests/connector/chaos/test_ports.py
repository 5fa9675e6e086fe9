"""Ranges of ports for engines that come back."""

import socket

import pytest
from dfirst.connector.chaos import ports
from dfirst.connector.chaos.ports import free_port_range
from dfirst.connector.extra_config import decode_extra_config


def test_a_range_is_what_the_setting_takes_and_free() -> None:
    config = decode_extra_config({"port_range": free_port_range(3)})
    assert len(config.ports) == 3
    for port in config.ports:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", port))


def test_ports_in_use_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        first = taken.getsockname()[1]
        monkeypatch.setattr(ports, "PORTS", range(first, first + 200))  # the first one is taken
        draws = iter([0, 100])
        monkeypatch.setattr(ports.secrets, "randbelow", lambda _: next(draws))
        assert free_port_range(2) == f"{first + 100}-{first + 101}"
