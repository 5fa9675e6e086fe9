"""Engines that fail, break off, or are away."""

import socket
import threading
from collections.abc import Iterator

import pytest
from fake_engines import D_RANKS, P_RANKS, FakeDecodeEngine, FakePrefillEngine, free_port, wait_until
from running_router import MakeRouter, Router, message_of, stream_events

BODY_400 = {"error": {"message": "prompt too long", "type": "BadRequestError", "param": None, "code": 400}}
BODY_500 = {"error": {"message": "engine dead", "type": "x", "param": None, "code": 500}}


def test_a_rejection_by_p_reaches_the_client_and_d_is_not_asked(
    router: Router, p: FakePrefillEngine, d: FakeDecodeEngine
) -> None:
    p.fail_with = (400, BODY_400)
    for stream in (False, True):
        answer = router.complete(stream=stream)
        assert answer.status_code == 400
        assert answer.json() == BODY_400
    assert d.bodies == []


@pytest.mark.parametrize(("status", "expected"), [(500, 502), (503, 503), (504, 504)])
def test_a_failure_of_p_is_an_error_that_names_the_transfer(
    router: Router, p: FakePrefillEngine, d: FakeDecodeEngine, status: int, expected: int
) -> None:
    p.fail_with = (status, BODY_500)
    answer = router.complete()
    assert answer.status_code == expected
    assert p.params[0]["transfer_id"] in message_of(answer)
    assert "engine dead" in message_of(answer)
    assert d.bodies == []


@pytest.mark.parametrize("failure", [(400, BODY_400), (500, BODY_500)])
def test_when_d_fails_p_s_ranks_are_told(
    router: Router, p: FakePrefillEngine, d: FakeDecodeEngine, failure: tuple[int, dict]
) -> None:
    d.fail_with = failure
    assert router.complete().status_code == (400 if failure[0] == 400 else 502)
    wait_until(lambda: router.canceller.calls, "P's ranks are told")
    ranks, transfer_id, attempt, mode, reason = router.canceller.calls[0]
    assert (ranks, transfer_id, attempt, mode) == (P_RANKS, p.params[0]["transfer_id"], 0, "blockwise")
    assert str(failure[0]) in reason
    assert "prompt" not in reason


@pytest.mark.parametrize("way", ["status", "broken", "rejected"])
def test_layerwise_a_prefill_that_fails_is_told_to_d_s_ranks(
    router: Router, p: FakePrefillEngine, d: FakeDecodeEngine, way: str
) -> None:
    p.fail_with = {"status": (500, BODY_500), "rejected": (400, BODY_400), "broken": None}[way]
    p.breaks = way == "broken"
    # D recomputes once it is told.
    d.has_arrived = lambda transfer_id: router.canceller.calls
    assert router.complete("layerwise").status_code == 200
    ranks, transfer_id, attempt, mode, reason = router.canceller.calls[0]
    assert (ranks, transfer_id, attempt, mode) == (D_RANKS, d.params[0]["transfer_id"], 0, "layerwise")
    assert "prefill engine" in reason
    assert len(router.canceller.calls) == 1


def test_layerwise_a_prefill_that_takes_too_long_is_told_to_d_s_ranks(
    make_router: MakeRouter, p: FakePrefillEngine, d: FakeDecodeEngine
) -> None:
    router = make_router(prefill_timeout_seconds=0.1)
    p.hang = True
    d.has_arrived = lambda transfer_id: router.canceller.calls
    assert router.complete("layerwise").status_code == 200
    assert "within 0.1 seconds" in router.canceller.calls[0][-1]
    wait_until(lambda: p.aborted == 1, "P's request is closed")


def test_layerwise_with_no_p_at_all_is_told_to_d_s_ranks(
    make_router: MakeRouter, d: FakeDecodeEngine
) -> None:
    router = make_router(prefill=(f"http://127.0.0.1:{free_port()}",))
    d.has_arrived = lambda transfer_id: router.canceller.calls
    assert router.complete("layerwise").status_code == 200
    assert "accepts connections" in router.canceller.calls[0][-1]


def test_a_canceller_that_fails_harms_no_request(
    router: Router, d: FakeDecodeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    router.canceller.error = OSError("no route")
    d.fail_with = (500, BODY_500)
    assert router.complete().status_code == 502
    wait_until(lambda: "cancelling transfer" in caplog.text, "the failure is logged")


def test_a_stream_that_breaks_off_ends_with_an_error_event(
    router: Router, p: FakePrefillEngine, d: FakeDecodeEngine
) -> None:
    d.break_after = 1
    events = stream_events(router)
    assert events[0]["choices"][0]["text"] == "hello/None:0 "
    assert events[1]["error"]["code"] == 502
    assert p.params[0]["transfer_id"] in events[1]["error"]["message"]
    assert len(events) == 2
    wait_until(lambda: router.canceller.calls, "P's ranks are told")


def test_an_error_event_of_d_goes_on_with_the_transfer_and_p_s_ranks_are_told(
    router: Router, p: FakePrefillEngine, d: FakeDecodeEngine
) -> None:
    d.error_after = 1
    events = stream_events(router)
    transfer_id = p.params[0]["transfer_id"]
    assert events[-1]["error"]["message"] == f"kv load failed (transfer {transfer_id})"
    assert events[-1]["error"]["code"] == 500
    wait_until(lambda: router.canceller.calls, "P's ranks are told")


@pytest.fixture
def second_d() -> Iterator[FakeDecodeEngine]:
    engine = FakeDecodeEngine()
    yield engine
    engine.stop()


def test_an_engine_that_refuses_connections_is_passed_over(
    make_router: MakeRouter, p: FakePrefillEngine, d: FakeDecodeEngine
) -> None:
    down_p, down_d = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    router = make_router(prefill=(down_p, p.url), decode=(down_d, d.url))
    for mode in ("blockwise", "layerwise", "blockwise"):
        assert router.complete(mode).status_code == 200
    # Each new attempt has its own number, and only what was sent to nobody is tried elsewhere.
    assert [params["attempt"] for params in p.params] == [1, 0, 0]
    assert d.params[0]["attempt"] == 1
    assert router.metric("dfirst_router_engine_failures_total") == 2
    passed_over = [each["passed_over"] for each in router.client.get("/health").json()["decode"]]
    assert passed_over == [True, False]


def test_layerwise_the_attempt_counts_on_when_a_d_refuses(
    make_router: MakeRouter, p: FakePrefillEngine, d: FakeDecodeEngine
) -> None:
    router = make_router(decode=(f"http://127.0.0.1:{free_port()}", d.url))
    assert router.complete("layerwise").status_code == 200
    assert d.params[0]["attempt"] == 1
    assert d.post_statuses == [202]
    assert p.params[0]["attempt"] == 1


def test_no_engine_at_all_is_503_and_one_that_comes_back_is_used_at_once(
    make_router: MakeRouter, p: FakePrefillEngine, d: FakeDecodeEngine
) -> None:
    port = free_port()
    router = make_router(decode=(f"http://127.0.0.1:{port}",))
    answer = router.complete()
    assert answer.status_code == 503
    assert "no decode engine accepts connections" in message_of(answer)
    assert p.params[0]["transfer_id"] in message_of(answer)
    assert router.client.get("/v1/models").status_code == 503
    late = FakeDecodeEngine(port)
    assert router.complete().status_code == 200
    late.stop()


def test_requests_go_to_the_engine_with_the_least_under_way(
    make_router: MakeRouter, d: FakeDecodeEngine, second_d: FakeDecodeEngine
) -> None:
    router = make_router(decode=(d.url, second_d.url))
    assert router.complete(prompt=["a", "b", "c", "d"]).status_code == 200
    assert len(d.bodies) == len(second_d.bodies) == 2
    d.hang = True
    slow = threading.Thread(target=lambda: router.complete(prompt="e"))
    slow.start()
    wait_until(lambda: len(d.bodies) == 3, "D is busy")
    for _ in range(3):
        assert router.complete().status_code == 200
    assert len(d.bodies) == 3
    d.hang = False
    slow.join(5)


def read_request(connection: socket.socket) -> None:
    with connection.makefile("rb") as stream:
        length = 0
        while (line := stream.readline()) not in (b"\r\n", b""):
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        stream.read(length)


def test_a_kept_connection_that_the_engine_closed_is_no_failure(
    make_router: MakeRouter, p: FakePrefillEngine
) -> None:
    """The engine reads a second request on a kept connection and closes it unanswered."""
    served: list[int] = []

    def serve_once_each(listener: socket.socket) -> None:
        content = b'{"choices": []}'
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                read_request(connection)
                head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 15\r\n\r\n"
                connection.sendall(head + content)
                served.append(1)
                read_request(connection)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve_once_each, args=(listener,), daemon=True).start()
        router = make_router(decode=(f"http://127.0.0.1:{listener.getsockname()[1]}",))
        assert [router.complete().status_code for _ in range(3)] == [200, 200, 200]
        assert router.metric("dfirst_router_engine_failures_total") == 2
        listener.shutdown(socket.SHUT_RDWR)
    assert len(served) == 3
