"""A pair and a router in miniature: HTTP servers in threads that answer as one engine alone would, die when
they are killed, and misbehave on order. No KV cache, no transfer.
"""

import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from dfirst.connector.demo_client import Answer
from dfirst.connector.launch import LaunchError
from dfirst.connector.local_set import LocalSetSpec
from dfirst.connector.processes import free_port

ANSWER_SECONDS = 0.05
HOLD_SECONDS = 10.0
RESTART_SECONDS = 0.5


def fake_tokens(prompt: str, count: int) -> list[int]:
    """What a fake engine answers: its tokens follow from the prompt."""
    return [(len(prompt) * 7 + ord(prompt[-1]) + number) % 250 for number in range(count)]


def fake_reference(prompt: str, count: int) -> Answer:
    return Answer(sent=0.0, answered=0.0, token_ids=tuple(fake_tokens(prompt, count)))


class FakeServer:
    """One of the three."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.spec = type("FakeSpec", (), {"name": name})()
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.usage = 0.0
        self.preemptions = 0
        self.asked: list[dict[str, Any]] = []
        self.aborted: list[str] = []
        self.most_at_once = 0
        self.least_at_once = 0
        """Answers are held until there have been so many at once, or for long."""
        self.misdeeds: list[str] = []
        """What happens to the next answers: `wrong`, `error`, `formless`, `break off`."""
        self.dead = False
        self._server: ThreadingHTTPServer | None = None
        self._connections: list[socket.socket] = []
        self._under_way = 0
        self._changed = threading.Condition()
        self.start(0.0)

    def start(self, seconds: float = RESTART_SECONDS) -> None:
        threading.Timer(seconds, self._serve).start() if seconds else self._serve()

    def check(self) -> None:
        if self.dead:
            raise LaunchError(f"{self.name} ended by itself")

    def kill(self) -> None:
        """As SIGKILL would: every connection breaks, and what was held is never answered."""
        self._break_connections()
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()
        self._break_connections()  # those that came meanwhile
        with self._changed:
            self.least_at_once = 0
            self._changed.notify_all()

    def _break_connections(self) -> None:
        connections, self._connections = self._connections, []
        for connection in connections:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # it has ended by itself

    def _serve(self) -> None:
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def setup(self) -> None:
                super().setup()
                owner._connections.append(self.connection)

            def log_message(self, *_: object) -> None:
                return None

            def do_GET(self) -> None:
                self._send(200, owner.metrics() if self.path == "/metrics" else b"ok")

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if "abort" in self.path:
                    owner.aborted += body["request_ids"]
                    self._send(200, b"")
                    return
                owner.asked.append(body)
                owner.wait_a_little()
                try:
                    self._send(*owner.answer(body))
                except OSError:
                    return  # the client has gone, or this server was killed

            def _send(self, status: int, content: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128  # a connection that finds no place is tried again after a second

        self._server = Server(("127.0.0.1", self.port), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def wait_a_little(self) -> None:
        with self._changed:
            self._under_way += 1
            self.most_at_once = max(self.most_at_once, self._under_way)
            self._changed.notify_all()
        time.sleep(ANSWER_SECONDS)
        with self._changed:
            self._changed.wait_for(lambda: self.most_at_once >= self.least_at_once, HOLD_SECONDS)
            self._under_way -= 1

    def answer(self, body: dict[str, Any]) -> tuple[int, bytes]:
        misdeed = self.misdeeds.pop(0) if self.misdeeds else ""
        if misdeed == "error":
            return 502, b'{"error": {"message": "it broke", "type": "engine_error", "code": 502}}'
        if misdeed == "formless":
            return 500, b"Internal Server Error"
        tokens = fake_tokens(body["prompt"], body["max_tokens"])
        if misdeed == "wrong":
            tokens[-1] += 1
        choice = {"text": "", "token_ids": tokens, "finish_reason": "length"}
        content = json.dumps({"choices": [choice]}).encode()
        if body.get("stream"):
            content = b"data: " + content + (b"\n\n" if misdeed == "break off" else b"\n\ndata: [DONE]\n\n")
        return 200, content

    def metrics(self) -> bytes:
        return (
            f'vllm:cache_config_info{{engine="0",num_gpu_blocks="96"}} 1.0\n'
            f'vllm:kv_cache_usage_perc{{engine="0"}} {self.usage}\n'
            f'vllm:num_preemptions_total{{engine="0"}} {self.preemptions}\n'
        ).encode()


class FakeSet:
    """What the bench needs of a `LocalSet`."""

    def __init__(self) -> None:
        self.prefill = [FakeServer("prefill")]
        self.decode = [FakeServer("decode")]
        self.router = FakeServer("router")
        self.spec = LocalSetSpec(
            model="m",
            served_model_name="m",
            logs=Path(),
            connector_config={"lease_seconds": 1.0, "stall_allowance_seconds": 0.5},
        )

    @property
    def engines(self) -> list[FakeServer]:
        return [*self.prefill, *self.decode]

    def stop(self) -> None:
        for server in (*self.engines, self.router):
            server.kill()
