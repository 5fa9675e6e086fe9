"""Clients that leave: both engines hear of it, whatever the moment and the mode."""

import json
import socket
import time
from collections.abc import Callable

import httpx
import pytest
from fake_engines import D_RANKS, P_RANKS, FakeDecodeEngine, FakePrefillEngine, wait_until
from running_router import Router


def hang_up_on(router: Router, mode: str, stream: bool, when: Callable[[], object], **body: object) -> None:
    """Send a request over a socket of its own and close it when the moment has come."""
    content = json.dumps({"prompt": "hello", "stream": stream, **body}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-DFirst-Mode: {mode}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", httpx.URL(router.url).port)) as client:
        client.sendall(head.encode() + content)
        wait_until(when, "the moment to hang up")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("mode", ["blockwise", "layerwise"])
class TestHangUp:
    def test_while_p_computes(
        self, router: Router, p: FakePrefillEngine, d: FakeDecodeEngine, mode: str, stream: bool
    ) -> None:
        p.hang = True
        hang_up_on(router, mode, stream, lambda: p.bodies)
        wait_until(lambda: p.aborted == 1, "P's request is closed")
        if mode == "blockwise":
            assert d.bodies == []
            assert router.canceller.calls == []
        else:
            wait_until(lambda: d.aborted == 1, "D's request is closed")
            wait_until(lambda: router.canceller.calls, "D's ranks are told")
            transfer_id = d.params[0]["transfer_id"]
            assert router.canceller.calls == [(D_RANKS, transfer_id, 0, mode, "the client hung up")]
            assert d.last_post is not None
            assert httpx.post(d.last_post[0], json=d.last_post[1]).status_code == 404

    def test_while_d_generates(
        self, router: Router, p: FakePrefillEngine, d: FakeDecodeEngine, mode: str, stream: bool
    ) -> None:
        if stream:
            d.hang_after = 1
            hang_up_on(router, mode, stream, lambda: p.finished and d.bodies)
        else:
            d.has_arrived = lambda transfer_id: False
            d.hang = mode == "blockwise"
            hang_up_on(router, mode, stream, lambda: p.finished and d.bodies)
        wait_until(lambda: d.aborted == 1, "D's request is closed")
        ranks = P_RANKS if mode == "blockwise" else D_RANKS
        wait_until(lambda: router.canceller.calls, "the known ranks are told")
        assert router.canceller.calls == [(ranks, d.params[0]["transfer_id"], 0, mode, "the client hung up")]

    def test_on_several_prompts(
        self, router: Router, p: FakePrefillEngine, d: FakeDecodeEngine, mode: str, stream: bool
    ) -> None:
        p.hang = True
        hang_up_on(router, mode, stream, lambda: len(p.bodies) == 4, prompt=["a", "b"], n=2)
        wait_until(lambda: p.aborted == 4, "P's requests are closed")


def test_while_p_s_answer_is_on_its_way_its_ranks_are_told_where_they_are_known(
    router: Router, p: FakePrefillEngine, d: FakeDecodeEngine
) -> None:
    """P may hold blocks for the transfer by then, and nobody else would ever ask for them."""
    p.grant_changes = {"layout_digest": "p-layout"}
    assert router.complete("blockwise").status_code == 200
    p.hang = True
    hang_up_on(router, "blockwise", False, lambda: len(p.bodies) == 2)
    wait_until(lambda: router.canceller.calls, "P's ranks are told")
    transfer_id = p.params[1]["transfer_id"]
    assert router.canceller.calls == [(P_RANKS, transfer_id, 0, "blockwise", "the client hung up")]


def test_a_client_that_leaves_before_its_body_is_complete_costs_nothing(
    router: Router, p: FakePrefillEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "dfirst")
    gone = 'dfirst_router_requests_total{mode="blockwise",outcome="hang_up"}'
    before = router.metric(gone)
    with socket.create_connection(("127.0.0.1", httpx.URL(router.url).port)) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{")
        time.sleep(0.05)
    wait_until(lambda: router.metric(gone) > before, "the request is counted as left")
    assert p.bodies == []
    assert "the client hung up after" in caplog.text
