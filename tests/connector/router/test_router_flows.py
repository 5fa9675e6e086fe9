"""Each flow from end to end: what the engines are sent, and what the client gets."""

import threading

import httpx
import pytest
from fake_engines import P_RANKS, FakeDecodeEngine, FakePrefillEngine, wait_until
from running_router import CHAT, MakeRouter, Router, stream_events


def test_blockwise_sends_the_prompt_to_p_and_what_p_answers_to_d(
    router: Router, p: FakePrefillEngine, d: FakeDecodeEngine
) -> None:
    answer = router.complete(max_tokens=50, min_tokens=9, temperature=0.5)
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["text"].startswith("hello/None:0")
    sent = dict(p.bodies[0])
    asked = sent.pop("kv_transfer_params")
    assert sent == {
        "prompt": "hello",
        "temperature": 0.5,
        "max_tokens": 1,
        "min_tokens": 1,
        "n": 1,
        "stream": False,
    }
    assert len(asked.pop("transfer_id")) >= 32
    assert asked == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "attempt": 0,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    got = dict(d.bodies[0])
    granted = got.pop("kv_transfer_params")
    assert got == {"prompt": "hello", "max_tokens": 50, "min_tokens": 9, "temperature": 0.5}
    assert granted["remote_block_ids"] == [3, 4, 5]
    assert granted["remote_ranks"] == P_RANKS
    assert router.canceller.calls == []


def test_blockwise_streams(router: Router, p: FakePrefillEngine) -> None:
    events = stream_events(router, stream_options={"include_usage": True}, max_tokens=7)
    assert (
        "".join(each["choices"][0]["text"] for each in events[:-1])
        == "hello/None:0 hello/None:1 hello/None:2 "
    )
    assert events[-1]["usage"]["completion_tokens"] == 3
    assert p.bodies[0]["stream"] is False
    assert "stream_options" not in p.bodies[0]


def test_chat_lowers_both_names_of_the_token_limit(router: Router, p: FakePrefillEngine) -> None:
    answer = router.complete(path=CHAT, messages=[{"role": "user", "content": "hi"}], max_completion_tokens=9)
    assert answer.json()["choices"][0]["message"]["content"].startswith("chat/")
    assert p.bodies[0]["max_completion_tokens"] == p.bodies[0]["max_tokens"] == 1


def test_the_request_id_is_the_transfer_id_behind_the_client_s_own(
    router: Router, p: FakePrefillEngine, d: FakeDecodeEngine
) -> None:
    headers = {"X-Request-Id": "mine 1\u00fc".encode(), "Authorization": "Bearer key"}
    answer = router.client.post("/v1/completions", json={"prompt": "a"}, headers=headers)
    expected = "mine_1__-" + p.params[0]["transfer_id"]
    assert p.headers[0]["x-request-id"] == d.headers[0]["x-request-id"] == expected
    assert answer.headers["x-request-id"] == expected
    assert p.headers[0]["authorization"] == d.headers[0]["authorization"] == "Bearer key"


@pytest.mark.parametrize("granted", [False, True])
def test_without_blocks_from_p_d_computes_the_prompt(
    router: Router, p: FakePrefillEngine, d: FakeDecodeEngine, granted: bool
) -> None:
    p.grants = granted
    p.grant_changes = {"do_remote_prefill": False}
    assert router.complete(kv_transfer_params={"from": "the client"}).status_code == 200
    assert "kv_transfer_params" not in d.bodies[0]


def test_p_that_answers_for_another_transfer_is_an_error(
    router: Router, p: FakePrefillEngine, d: FakeDecodeEngine
) -> None:
    p.grant_changes = {"transfer_id": "someone else's"}
    assert router.complete().status_code == 502
    assert d.bodies == []


@pytest.mark.parametrize("stream", [False, True])
def test_layerwise_asks_d_first_and_p_with_what_d_posts(
    router: Router, p: FakePrefillEngine, d: FakeDecodeEngine, stream: bool
) -> None:
    if stream:
        assert len(stream_events(router, mode="layerwise")) == 3
    else:
        assert router.complete(mode="layerwise").status_code == 200
    asked = d.params[0]
    assert asked["do_remote_prefill"] is True
    assert asked["do_remote_decode"] is False
    assert asked["attempt"] == 0
    assert asked["metaserver"] == f"{router.url}/v1/metaserver"
    assert d.post_statuses == [202]
    assert d.last_post is not None
    assert p.params == [d.last_post[1]]
    assert p.bodies[0]["max_tokens"] == 1
    assert router.canceller.calls == []


def test_layerwise_d_may_answer_without_a_post(
    router: Router, p: FakePrefillEngine, d: FakeDecodeEngine
) -> None:
    d.posts = False
    assert router.complete(mode="LayerWise").status_code == 200
    assert p.bodies == []


def test_layerwise_prefill_left_over_when_d_has_answered_is_closed_after_a_grace(
    make_router: MakeRouter, p: FakePrefillEngine, d: FakeDecodeEngine
) -> None:
    router = make_router(prefill_grace_seconds=0.1)
    p.hang = True
    d.has_arrived = lambda transfer_id: True
    assert router.complete(mode="layerwise").status_code == 200
    wait_until(lambda: p.aborted == 1, "P's request is closed")
    assert router.canceller.calls == []


def test_the_metaserver_knows_a_transfer_from_its_start_to_its_end(
    router: Router, p: FakePrefillEngine, d: FakeDecodeEngine
) -> None:
    repeated: list[int] = []

    def arrived_after_a_repeat(transfer_id: str) -> bool:
        if d.last_post is not None and not repeated:
            url, post = d.last_post
            repeated.append(httpx.post(url, json=post).status_code)
            repeated.append(httpx.post(url, json={**post, "attempt": 1}).status_code)
        return transfer_id in p.pushed

    d.has_arrived = arrived_after_a_repeat
    assert router.complete(mode="layerwise").status_code == 200
    assert repeated == [202, 404]
    assert len(p.bodies) == 1
    assert d.last_post is not None
    url, post = d.last_post
    assert httpx.post(url, json=post).status_code == 404
    assert httpx.post(url, json={**post, "transfer_id": "unknown"}).status_code == 404
    assert httpx.post(url, json={"transfer_id": 5}).status_code == 400
    assert httpx.post(url, json={**post, "do_remote_decode": False}).status_code == 400
    assert httpx.post(url, content=b"no json").status_code == 400


def test_who_has_seen_an_answer_cannot_post_for_it(
    router: Router, p: FakePrefillEngine, d: FakeDecodeEngine
) -> None:
    """A client knows the transfer by then: its post would tell a prefill engine where to write."""
    d.last_post = None
    router.complete("layerwise")
    assert d.last_post is not None
    url, post = d.last_post
    d.posts = False
    d.hang_after = 1
    body = {"prompt": "a", "stream": True}
    with router.client.stream(
        "POST", "/v1/completions", json=body, headers={"X-DFirst-Mode": "layerwise"}
    ) as response:
        transfer_id = response.headers["x-dfirst-transfer"]
        assert transfer_id == d.params[-1]["transfer_id"]
        assert httpx.post(url, json={**post, "transfer_id": transfer_id}).status_code == 404
    assert len(p.bodies) == 1


def test_the_router_s_own_mode_serves_requests_without_the_header(
    make_router: MakeRouter, p: FakePrefillEngine, d: FakeDecodeEngine
) -> None:
    router = make_router(mode="layerwise")
    assert router.client.post("/v1/completions", json={"prompt": "a"}).status_code == 200
    assert "metaserver" in d.params[0]


def test_what_only_one_engine_can_do_goes_to_d_alone(
    router: Router, p: FakePrefillEngine, d: FakeDecodeEngine
) -> None:
    for extra in (
        {"prompt_logprobs": 0},
        {"echo": True, "logprobs": 1},
        {"use_beam_search": True, "n": 4},
        {"truncate_prompt_tokens": -1},
    ):
        assert router.complete(**extra).status_code == 200
        assert d.bodies[-1] == {"prompt": "hello", **extra}
    assert router.complete(echo=True).status_code == 200
    assert len(p.bodies) == 1


def test_events_are_passed_on_as_they_come(router: Router, d: FakeDecodeEngine) -> None:
    d.hang_after = 2
    body = {"prompt": "a", "stream": True}
    with router.client.stream("POST", "/v1/completions", json=body) as response:
        lines = (line for line in response.iter_lines() if line)
        assert "a/None:0" in next(lines)
        assert "a/None:1" in next(lines)
        d.hang_after = None
        assert "a/None:2" in next(lines)


def test_status_pages(router: Router, p: FakePrefillEngine) -> None:
    assert router.client.get("/v1/models").json()["data"][0]["id"] == "tiny"
    health = router.client.get("/health").json()
    assert health["status"] == "ok"
    assert health["prefill"] == [{"url": p.url, "in_flight": 0, "passed_over": False}]
    counter = 'dfirst_router_requests_total{mode="blockwise",outcome="ok"}'
    before = router.metric(counter)
    router.complete()
    wait_until(lambda: router.metric(counter) > before, "the request is counted")


def test_many_requests_at_once_are_not_throttled(router: Router, d: FakeDecodeEngine) -> None:
    d.hang = True
    answer: list[int] = []

    def ask() -> None:
        answer.append(router.complete(n=120, prompt="a").status_code)

    thread = threading.Thread(target=ask)
    thread.start()
    wait_until(lambda: len(d.bodies) == 120, "all 120 pieces reach D side by side", seconds=20)
    d.hang = False
    thread.join(10)
    assert answer == [200]
