"""Plain requests to one engine, past the router."""

import json
import urllib.request
from typing import Any

TIMEOUT_SECONDS = 120.0

_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def post(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """POST a body, return the answer; an HTTP error is raised."""
    request = urllib.request.Request(
        f"{url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with _direct.open(request, timeout=TIMEOUT_SECONDS) as answer:
        return json.load(answer)


def complete(url: str, prompt: str, max_tokens: int, params: dict[str, Any] | None = None) -> str:
    """Return the text of a greedy completion."""
    body: dict[str, Any] = {"model": "demo", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    if params is not None:
        body["kv_transfer_params"] = params
    return post(url, "/v1/completions", body)["choices"][0]["text"]
