"""The address under which decode engines reach the router's metaserver."""

import socket
from urllib.parse import urlsplit

from .settings import RouterSettings

METASERVER_PATH = "/v1/metaserver"
WILDCARDS = ("", "0.0.0.0", "::")


def metaserver_url(settings: RouterSettings) -> str:
    host = settings.advertised_host or settings.host
    if host in WILDCARDS:
        host = address_towards(settings.decode[0])
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    return f"http://{host}:{settings.port}{METASERVER_PATH}"


def address_towards(url: str) -> str:
    """This machine's address on the way to an engine: the kernel picks it; nothing is sent."""
    parts = urlsplit(url)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ValueError(
            f"no address of this machine towards decode engine {url} could be found ({error}): "
            "set advertised_host to one that decode engines reach"
        ) from error
