"""Names and addresses of hosts, as they are given and as they stand in a URL."""

import ipaddress
import re

_NAME = re.compile(r"[\w-]+(\.[\w-]+)*\.?")


def check_host(option: str, host: str) -> None:
    """Raise ``ValueError`` in one sentence for what is neither a host's name nor its address."""
    if not is_host(host):
        raise ValueError(
            f"{option} is {host!r}; give a bare host name or address such as 10.0.0.5 or fd00::5, without "
            "scheme, port, path or brackets"
        )


def is_host(host: str) -> bool:
    return _NAME.fullmatch(host) is not None or is_ipv6(host)


def is_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True


def bracketed(host: str) -> str:
    """Return a host as it stands in an address or a URL: IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host
