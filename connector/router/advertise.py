"""The address under which decode engines reach the router's metaserver."""

import socket
from urllib.parse import urlsplit

from ..hosts import bracketed
from .settings import RouterSettings

METASERVER_PATH = "/v1/metaserver"
FAMILIES = {"0.0.0.0": socket.AF_INET, "::": socket.AF_INET6}
"""Where all addresses are listened on, of one family alone."""


def metaserver_url(settings: RouterSettings) -> str:
    host = settings.advertised_host or settings.host
    if host in FAMILIES:
        host = address_towards(settings.decode[0], host)
    return f"http://{bracketed(host)}:{settings.port}{METASERVER_PATH}"


def address_towards(url: str, wildcard: str) -> str:
    """This machine's address on the way to an engine, of the family that is listened on: the kernel picks
    it; nothing is sent.
    """
    parts = urlsplit(url)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            parts.hostname, parts.port or 80, FAMILIES[wildcard], socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError) as error:
        family = "IPv4" if wildcard == "0.0.0.0" else "IPv6"
        why = getattr(error, "strerror", None) or error
        raise ValueError(
            f"--host {wildcard} listens on {family} alone, and no {family} address of this machine towards "
            f"decode engine {url} was found ({why}): correct the engine's name, listen on another --host, or "
            "give with --advertised-host an address that decode engines reach"
        ) from error
