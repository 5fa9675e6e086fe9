"""A range of ports for the side channels of engines that are killed and started again."""

import secrets
import socket

PORTS = range(20000, 30000)
"""Below those that the kernel gives out by itself."""


def free_port_range(number: int, host: str = "127.0.0.1") -> str:
    """Return a range, as the setting `port_range` takes it, of just so many ports that nobody uses: what is
    started again then gets its old one.
    """
    while True:
        first = PORTS[secrets.randbelow(len(PORTS) - number)]
        try:
            for port in range(first, first + number):
                with socket.socket() as probe:
                    probe.bind((host, port))
        except OSError:
            continue
        return f"{first}-{first + number - 1}"
