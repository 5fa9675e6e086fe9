"""A router that serves, and the ways in which tests talk to it."""

import json
from collections.abc import Callable

import httpx
from dfirst.connector.router import RouterSettings, create_app
from fake_engines import RecordingCanceller, Served, wait_until

CHAT = "/v1/chat/completions"


class Router:
    """A running router and a client that talks to it."""

    def __init__(self, settings: RouterSettings) -> None:
        self.canceller = RecordingCanceller()
        self._served = Served(create_app(settings, self.canceller), settings.port)
        self.url = self._served.url
        self.client = httpx.Client(base_url=self.url, timeout=30)

    def complete(
        self, mode: str = "blockwise", path: str = "/v1/completions", **body: object
    ) -> httpx.Response:
        if "chat" not in path:
            body.setdefault("prompt", "hello")
        return self.client.post(path, json=body, headers={"X-DFirst-Mode": mode})

    def metric(self, start: str) -> float:
        """The sum of all samples whose line begins so."""
        lines = self.client.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(start))

    def settle(self) -> None:
        """Wait for what earlier requests left behind."""
        wait_until(lambda: self.client.get("/health").json()["transfers"] == 0, "all transfers have ended")
        # Cancellations were spawned before the end: one more round through the event loop and they have run.
        self.client.get("/health")

    def stop(self) -> None:
        self._served.stop()
        self.client.close()


MakeRouter = Callable[..., Router]


def stream_events(
    router: Router, mode: str = "blockwise", path: str = "/v1/completions", **body: object
) -> list:
    """The decoded events of a streamed answer; the closing ``[DONE]`` must be there and is left out."""
    body = {"stream": True, **body} if "chat" in path else {"stream": True, "prompt": "hello", **body}
    with router.client.stream("POST", path, json=body, headers={"X-DFirst-Mode": mode}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        payloads = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert payloads[-1] == "[DONE]"
    assert payloads.count("[DONE]") == 1
    return [json.loads(payload) for payload in payloads[:-1]]


def message_of(answer: httpx.Response) -> str:
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == answer.status_code
    return error["message"]
