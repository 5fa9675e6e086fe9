"""Announcing blocks to routers: bounded as a whole, in the background, and every failure is told once."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
import pytest
from dfirst.connector.announcer import Announcer
from dfirst.connector.transfer_params import AnnouncedBlocks
from dfirst.protocol.commands import RemoteRank

from .ranks import wait_until

HOST = "127.0.0.1"
TIMEOUT_SECONDS = 1.0
SLACK_SECONDS = 5.0
"""For a busy machine."""
BLOCKS = AnnouncedBlocks(
    do_remote_prefill=False,
    do_remote_decode=True,
    transfer_id="t",
    attempt=0,
    request_id="r",
    remote_engine_id="D",
    remote_host=HOST,
    remote_port=1,
    remote_ranks=(RemoteRank(HOST, 1, "i"),),
    layout_digest="d",
    remote_block_ids=((1, 2),),
    remote_block_size=16,
    remote_cached_tokens=0,
    remote_tp_size=1,
    remote_pcp_size=1,
    remote_dcp_size=1,
)

Answer = Callable[["FakeRouter", int], None]
"""Answers the request with this number."""


class FakeRouter(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    answer: Answer
    bodies: list[bytes]

    def do_POST(self) -> None:
        self.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).answer(self, len(self.bodies))

    def status(self, code: int) -> None:
        self.send_response(code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Keep the test's output to itself."""


@contextmanager
def router(answer: Answer) -> Iterator[tuple[str, list[bytes]]]:
    """A metaserver that answers like this; its URL, and the bodies that it has taken."""
    bodies: list[bytes] = []
    handler = type("Handler", (FakeRouter,), {"answer": staticmethod(answer), "bodies": bodies})
    server = ThreadingHTTPServer((HOST, 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield f"http://{HOST}:{server.server_address[1]}/metaserver", bodies
    server.shutdown()
    server.server_close()


@contextmanager
def deaf_router() -> Iterator[tuple[str, list[bytes]]]:
    with socket.create_server((HOST, 0)) as deaf:
        yield f"http://{HOST}:{deaf.getsockname()[1]}/metaserver", []


@contextmanager
def no_router() -> Iterator[tuple[str, list[bytes]]]:
    with socket.create_server((HOST, 0)) as closed:
        port = closed.getsockname()[1]
    yield f"http://{HOST}:{port}/metaserver", []


def drip(handler: FakeRouter, _number: int) -> None:
    """A byte now and then, so that no single read is ever late."""
    for byte in b"HTTP/1.1 202 Accepted\r\n" * 20:
        time.sleep(0.1)
        try:
            handler.wfile.write(bytes([byte]))
        except OSError:
            return


def endless_body(handler: FakeRouter, _number: int) -> None:
    handler.send_response(202)
    handler.send_header("Content-Length", "1000000")
    handler.end_headers()


@pytest.fixture
def announcer() -> Iterator[Announcer]:
    """Patient, as a busy machine needs it."""
    made = Announcer(60.0)
    yield made
    made.close()


@pytest.fixture
def hasty() -> Iterator[Announcer]:
    made = Announcer(TIMEOUT_SECONDS)
    yield made
    made.close()


def failure_of(announcer: Announcer) -> tuple[str, float]:
    """Wait for the failure of request r; return its reason and the seconds that it took."""
    started = time.monotonic()
    failures: list[tuple[str, str]] = []
    wait_until(lambda: bool(failures.extend(announcer.take_failures()) or failures))
    assert [request_id for request_id, _ in failures] == ["r"]
    assert announcer.take_failures() == []
    return failures[0][1], time.monotonic() - started


def test_blocks_are_posted_once(announcer: Announcer) -> None:
    with router(lambda handler, _: handler.status(202)) as (url, bodies):
        announcer.announce(url, BLOCKS, "r")
        wait_until(lambda: len(bodies) == 1)
        time.sleep(0.2)
        assert [msgspec.json.decode(body) for body in bodies] == [
            msgspec.json.decode(msgspec.json.encode(BLOCKS))
        ]
        assert announcer.take_failures() == []


def test_what_a_router_says_behind_its_status_is_not_waited_for(hasty: Announcer) -> None:
    with router(endless_body) as (url, bodies):
        hasty.announce(url, BLOCKS, "r")
        wait_until(lambda: len(bodies) == 1)
        time.sleep(TIMEOUT_SECONDS + 0.3)
        assert hasty.take_failures() == []


def test_a_router_that_stumbles_is_asked_again(announcer: Announcer) -> None:
    with router(lambda handler, number: handler.status(503 if number < 3 else 202)) as (url, bodies):
        announcer.announce(url, BLOCKS, "r")
        wait_until(lambda: len(bodies) == 3)
        time.sleep(0.2)
        assert announcer.take_failures() == []


@pytest.mark.parametrize("code", [400, 404, 422])
def test_a_router_that_refuses_is_not_asked_twice(announcer: Announcer, code: int) -> None:
    with router(lambda handler, _: handler.status(code)) as (url, bodies):
        announcer.announce(url, BLOCKS, "r")
        reason, _ = failure_of(announcer)
        assert reason == f"the metaserver {url} could not be told: it answered {code}"
        assert len(bodies) == 1


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: router(lambda handler, _: handler.status(500)), "it answered 500"),
        (lambda: router(lambda handler, _: time.sleep(10)), "no answer within 1 s"),
        (lambda: router(drip), "no answer within 1 s"),
        (deaf_router, "no answer within 1 s"),
        (no_router, "ConnectError"),
    ],
    ids=["fails", "silent", "drips", "deaf", "away"],
)
def test_a_router_that_does_not_take_them_is_given_up_in_time(
    hasty: Announcer, made: Callable[[], AbstractContextManager[tuple[str, list[bytes]]]], words: str
) -> None:
    with made() as (url, _):
        hasty.announce(url, BLOCKS, "r")
        reason, seconds = failure_of(hasty)
    assert words in reason
    assert seconds < TIMEOUT_SECONDS + SLACK_SECONDS


@pytest.mark.parametrize("url", ["", "metaserver", "ftp://router/x", "http://", "http://[::1", "http://\0"])
def test_an_address_that_is_none_fails_at_once(announcer: Announcer, url: str) -> None:
    announcer.announce(url, BLOCKS, "r")
    reason, _ = failure_of(announcer)
    assert reason.startswith(f"the metaserver {url} could not be told: ")


def test_slow_routers_hold_up_no_other_one(announcer: Announcer) -> None:
    with deaf_router() as (slow, _), router(lambda handler, _: handler.status(202)) as (url, bodies):
        started = time.monotonic()
        for number in range(50):
            announcer.announce(slow, BLOCKS, f"slow-{number}")
        announcer.announce(url, BLOCKS, "r")
        assert time.monotonic() - started < SLACK_SECONDS, "announcing returns at once"
        wait_until(lambda: len(bodies) == 1)
        assert announcer.take_failures() == []


def test_the_end_waits_for_no_router_and_leaves_no_thread() -> None:
    announcer = Announcer(60.0)
    with deaf_router() as (url, _):
        announcer.announce(url, BLOCKS, "r")
        started = time.monotonic()
        announcer.close()
        assert time.monotonic() - started < SLACK_SECONDS
        assert not [thread for thread in threading.enumerate() if thread.name == "dfirst-announce"]
        announcer.announce(url, BLOCKS, "too late")
        announcer.close()


def test_an_engine_that_never_announces_has_no_thread() -> None:
    Announcer(1.0).close()
    assert not [thread for thread in threading.enumerate() if thread.name == "dfirst-announce"]
