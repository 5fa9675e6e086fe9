"""What the router refuses, what it limits, and what it keeps to itself."""

import socket
import threading

import httpx
import pytest
from dfirst.connector.router import RouterSettings
from fake_engines import FakeDecodeEngine, FakePrefillEngine, wait_until
from running_router import MakeRouter, Router, message_of, stream_events


def test_limits(make_router: MakeRouter, p: FakePrefillEngine) -> None:
    router = make_router(
        max_body_bytes=1000,
        max_concurrent_requests=1,
        max_transfers_per_request=3,
        request_timeout_seconds=0.3,
        body_timeout_seconds=0.1,
    )
    assert router.complete(prompt="x" * 2000).status_code == 413
    chunks = (b"x" * 600 for _ in range(3))
    assert router.client.post("/v1/completions", content=chunks).status_code == 413
    assert router.complete(n=4).status_code == 400
    p.hang = True
    answers: list[httpx.Response] = []
    slow = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{router.url}/v1/completions", json={}))
    )
    slow.start()
    wait_until(lambda: p.bodies, "P is busy")
    busy = router.complete()
    assert busy.status_code == 503
    assert "1 requests" in message_of(busy)
    slow.join(5)
    assert answers[0].status_code == 504
    assert p.params[0]["transfer_id"] in message_of(answers[0])
    wait_until(lambda: p.aborted == 1, "P's request is closed")


def test_a_stream_that_takes_too_long_ends_with_an_error_event(
    make_router: MakeRouter, d: FakeDecodeEngine
) -> None:
    router = make_router(request_timeout_seconds=0.3)
    d.hang_after = 1
    events = stream_events(router)
    assert events[-1]["error"]["code"] == 504
    wait_until(lambda: router.canceller.calls, "P's ranks are told")
    assert "longer than 0.3 seconds" in router.canceller.calls[0][-1]


def test_models_that_do_not_come_are_504(make_router: MakeRouter, d: FakeDecodeEngine) -> None:
    router = make_router(models_timeout_seconds=0.1)
    d.hang = True
    answer = router.client.get("/v1/models")
    assert answer.status_code == 504
    assert message_of(answer) == "the decode engine did not name its models within 0.1 seconds"


def test_models_of_no_engine_are_503_and_name_no_transfer(make_router: MakeRouter) -> None:
    router = make_router(decode=("http://127.0.0.1:9",))
    answer = router.client.get("/v1/models")
    assert answer.status_code == 503
    assert message_of(answer) == "no decode engine accepts connections (1 tried): start one"


@pytest.mark.parametrize(
    ("method", "path", "status", "words"),
    [
        ("GET", "/v1/embeddings", 404, "nothing is served at '/v1/embeddings'"),
        ("POST", "/" + "x" * 5000, 404, "this router serves /v1/completions, /v1/chat/completions"),
        ("GET", "/v1/completions", 405, "GET is not served at '/v1/completions': use POST"),
        ("DELETE", "/v1/models", 405, "use GET"),
        ("GET", "/v1/metaserver", 405, "use POST"),
    ],
)
def test_what_is_not_served_is_said_in_openais_form(
    router: Router, method: str, path: str, status: int, words: str
) -> None:
    answer = router.client.request(method, path)
    assert answer.status_code == status
    assert words in message_of(answer)
    assert len(message_of(answer)) < 300
    assert ("allow" in answer.headers) is (status == 405)


def test_a_body_that_never_comes_is_408(make_router: MakeRouter) -> None:
    router = make_router(body_timeout_seconds=0.05)
    with socket.create_connection(("127.0.0.1", httpx.URL(router.url).port)) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{")
        assert client.recv(1000).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"n": 0}, "n must"),
        ({"n": True}, "n must"),
        ({"stream": "yes"}, "stream"),
        ({"n": 1, "best_of": 3}, "best_of"),
        ({"prompt_embeds": ["x"]}, "prompt_embeds"),
        ({"vllm_xargs": {"kv_transfer_params": "x"}}, "vllm_xargs"),
        ({"n": 2, "seed": "x"}, "seed"),
        ({"prompt": ["a", [1]]}, "prompt must"),
    ],
)
def test_what_cannot_be_right_is_refused(
    router: Router, p: FakePrefillEngine, d: FakeDecodeEngine, body: dict, word: str
) -> None:
    answer = router.complete(**body)
    assert answer.status_code == 400
    assert word in message_of(answer)
    assert p.bodies == d.bodies == []


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'"x"', b"[" * 100_000, b"\xff"])
def test_a_body_that_is_no_json_object_is_refused(router: Router, content: bytes) -> None:
    answer = router.client.post("/v1/completions", content=content)
    assert answer.status_code == 400
    assert "JSON" in message_of(answer)


def test_an_unknown_mode_is_refused(router: Router, p: FakePrefillEngine) -> None:
    answer = router.complete("sideways")
    assert answer.status_code == 400
    assert "use one of blockwise, blockwise-d-first, layerwise" in message_of(answer)
    assert p.bodies == []


def test_prompts_are_in_no_log(
    router: Router, p: FakePrefillEngine, d: FakeDecodeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "dfirst")
    quoting = {"error": {"message": "bad: my secret", "type": "x", "param": None, "code": 500}}
    for engine in (p, d):
        engine.fail_with = (500, quoting)
        router.complete(prompt="my secret")
        engine.fail_with = (400, quoting)
        router.complete(prompt="my secret")
        engine.fail_with = None
    p.grants = False
    router.complete(prompt="my secret")
    p.fail_with = None
    router.client.post("/v1/completions", content=b'{"prompt": "my secret"')
    router.client.post("/v1/my secret", json={"prompt": "my secret"})
    assert "given up" in caplog.text
    assert "my secret" not in caplog.text


@pytest.mark.parametrize(
    "wrong",
    [
        {"prefill": ()},
        {"decode": ("10.0.0.1:8100",)},
        {"decode": ("http://a:1", "http://a:1")},
        {"mode": "sideways"},
        {"max_body_bytes": 0},
        {"connect_timeout_seconds": -1.0},
    ],
)
def test_settings_that_cannot_work_are_refused(wrong: dict) -> None:
    with pytest.raises(ValueError, match=r".+: (give|use|write|name)"):
        RouterSettings(**{"prefill": ("http://a:1",), "decode": ("http://b:1",), **wrong})


@pytest.mark.parametrize("stream", [False, True])
def test_a_router_that_stops_answers_and_cancels_what_it_cuts_short(
    make_router: MakeRouter, d: FakeDecodeEngine, stream: bool
) -> None:
    router = make_router()
    d.hang = not stream
    d.hang_after = 1
    answers: list[tuple[int, str]] = []
    begun = threading.Event()

    def ask() -> None:
        body = {"prompt": "hello", "stream": stream}
        with router.client.stream("POST", "/v1/completions", json=body) as response:
            begun.set()
            answers.append((response.status_code, response.read().decode()))

    asking = threading.Thread(target=ask)
    asking.start()
    wait_until(lambda: begun.is_set() if stream else d.bodies, "the request is under way")
    router.stop()
    asking.join(5)
    status, text = answers[0]
    assert status == (200 if stream else 503)
    assert "the router stops" in text
    assert [reason for *_, reason in router.canceller.calls] == ["the router stops"]
    assert router.canceller.closed == 1
