"""Where decode engines are told that the router is: at an address of the family on which it listens."""

import pytest
from dfirst.connector.router.advertise import metaserver_url
from dfirst.connector.router.settings import RouterSettings

V4, V6 = "http://127.0.0.1:8200", "http://[::1]:8200"


def url(decode: str, **settings: str) -> str:
    return metaserver_url(RouterSettings(prefill=("http://127.0.0.1:8100",), decode=(decode,), **settings))


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ({"host": "0.0.0.0"}, "127.0.0.1"),
        ({"host": "10.0.0.5"}, "10.0.0.5"),
        ({"host": "fd00::5"}, "[fd00::5]"),
        ({"host": "::", "advertised_host": "router.local"}, "router.local"),
        ({"advertised_host": "fd00::6"}, "[fd00::6]"),
    ],
)
def test_the_address_stands_in_a_url(settings: dict[str, str], shown: str) -> None:
    assert url(V4, **settings) == f"http://{shown}:8000/v1/metaserver"


@pytest.mark.parametrize(("host", "decode", "family"), [("::", V4, "IPv6"), ("0.0.0.0", V6, "IPv4")])
def test_an_address_on_which_nobody_listens_is_not_told(host: str, decode: str, family: str) -> None:
    with pytest.raises(ValueError, match=f"--host {host} listens on {family} alone") as refused:
        url(decode, host=host)
    assert decode in str(refused.value)
    assert "--advertised-host" in str(refused.value)


def test_a_router_on_ipv6_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without a socket of this family, which not every machine has.
    class Probe:
        def __init__(self, *kind: object) -> None: ...
        def __enter__(self) -> "Probe":
            return self

        def __exit__(self, *error: object) -> None: ...
        def connect(self, address: object) -> None: ...
        def getsockname(self) -> tuple[str, int]:
            return ("::1", 1)

    monkeypatch.setattr("socket.socket", Probe)
    assert url(V6, host="::") == "http://[::1]:8000/v1/metaserver"
