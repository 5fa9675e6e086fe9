"""Plain requests to one engine, past the router."""

import http.client
import json
import urllib.request
from typing import Any
from urllib.parse import urlsplit

TIMEOUT_SECONDS = 120.0

_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def post(url: str, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> dict[str, Any]:
    """POST a body, return the answer; an HTTP error is raised."""
    request = urllib.request.Request(
        f"{url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json", **(headers or {})}
    )
    with _direct.open(request, timeout=TIMEOUT_SECONDS) as answer:
        content = answer.read()
    return json.loads(content) if content else {}


def complete(
    url: str,
    prompt: str,
    max_tokens: int,
    params: dict[str, Any] | None = None,
    headers: dict[str, str] | None = None,
) -> str:
    """Return the text of a greedy completion."""
    body: dict[str, Any] = {"model": "demo", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    if params is not None:
        body["kv_transfer_params"] = params
    return post(url, "/v1/completions", body, headers)["choices"][0]["text"]


class Leaving:
    """A client that sends a request and hangs up when it is told to."""

    def __init__(self, url: str, prompt: str, *, max_tokens: int = 200, mode: str = "", **more: Any) -> None:
        body = {"model": "demo", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **more}
        headers = {"Content-Type": "application/json", **({"X-DFirst-Mode": mode} if mode else {})}
        address = urlsplit(url)
        self._connection = http.client.HTTPConnection(
            address.hostname or "", address.port, timeout=TIMEOUT_SECONDS
        )
        self._connection.request("POST", "/v1/completions", json.dumps(body), headers)

    def hang_up(self) -> None:
        """Close the connection, whatever is under way."""
        self._connection.close()
