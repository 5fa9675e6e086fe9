"""The engines' addresses as the router is given them; what cannot be meant is refused in one sentence."""

import re
from urllib.parse import SplitResult, urlsplit

from ..hosts import is_host

LIKE = "http://host:8100"
_PORTS = {"http": 80, "https": 443}
_USER = re.compile(r"//.*@")
_PLACE = re.compile(r"(\[[^\[\]]+\]|[^\[\]:]+)(:[^:]*)?")
_IPV6 = re.compile(r"[\[\]]|//[0-9a-fA-F]*:[0-9a-fA-F]*:")


def check_engines(prefill: tuple[str, ...], decode: tuple[str, ...]) -> None:
    """Raise ``ValueError`` if an address cannot be one, or if an engine is named twice."""
    options: dict[tuple[str, str, int], str] = {}
    for option, urls in (("--prefill", prefill), ("--decode", decode)):
        if isinstance(urls, str) or not urls:
            raise ValueError(f"{option} names no engine: give at least one address such as {LIKE}")
        for url in urls:
            parts = _checked(option, url)
            engine = (parts.scheme, parts.hostname or "", parts.port or _PORTS[parts.scheme])
            before = options.get(engine)
            if before == option:
                raise ValueError(f"{option} {url!r} is named twice: name each engine once")
            if before is not None:
                raise ValueError(f"{url!r} is named with {before} and {option}: name it with one of them")
            options[engine] = option


def _checked(option: str, url: str) -> SplitResult:
    # A password is for no screen and no log.
    start = f"{option} {_USER.sub('//***@', url)!r}"
    if re.search(r"[\s\x00-\x1f\x7f]", url):
        raise ValueError(f"{start} holds a space or a control character: write it like {LIKE}")
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ValueError(f"{start} is no address: {_hint(url)}") from None
    if parts.scheme not in _PORTS:
        raise ValueError(f"{start} is no address: {_hint(url)}")
    if "@" in url:
        raise ValueError(f"{start} holds a user or a password, which the router would show: leave them out")
    if not _PLACE.fullmatch(parts.netloc) or not is_host(parts.hostname or ""):
        raise ValueError(f"{start} is no address: {_hint(url)}")
    try:
        port = parts.port
    except ValueError:
        port = 0
    if port == 0:
        raise ValueError(f"{start} names a port that cannot be: give one from 1 to 65535, as in {LIKE}")
    rest = url.partition("//")[2].removeprefix(parts.netloc)
    if rest not in ("", "/"):
        raise ValueError(f"{start} has {rest!r} behind the host and port: leave it out, as in {LIKE}")
    return parts


def _hint(url: str) -> str:
    if _IPV6.search(url):
        return "an IPv6 address stands in brackets, as in http://[::1]:8100"
    return f"write it like {LIKE}"
