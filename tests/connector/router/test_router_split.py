"""Several prompts and samples: one transfer each, one answer for the client."""

import pytest
from fake_engines import FakeDecodeEngine, FakePrefillEngine, wait_until
from running_router import CHAT, Router, stream_events

MODES = ["blockwise", "layerwise"]


@pytest.mark.parametrize("mode", MODES)
def test_prompts_and_samples_become_one_answer(
    router: Router, p: FakePrefillEngine, d: FakeDecodeEngine, mode: str
) -> None:
    answer = router.complete(mode, prompt=["one", "three"], n=2, seed=40).json()
    choices = answer["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    starts = [choice["text"].split(":")[0] for choice in choices]
    assert starts == ["one/40", "one/41", "three/40", "three/41"]
    # A prompt counts once, however many samples it has.
    assert answer["usage"]["prompt_tokens"] == len("one") + len("three")
    assert answer["usage"]["completion_tokens"] == 4 * 3
    assert answer["usage"]["total_tokens"] == 8 + 12
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert answer["id"].startswith("cmpl-")
    assert len({params["transfer_id"] for params in p.params}) == 4
    assert all(body["n"] == 1 for body in p.bodies + d.bodies)


@pytest.mark.parametrize("mode", MODES)
def test_streams_are_interleaved_under_one_id(
    router: Router, p: FakePrefillEngine, d: FakeDecodeEngine, mode: str
) -> None:
    d.word_seconds = 0.01
    events = stream_events(
        router, mode, prompt=[[1, 2], [3, 4, 5]], n=2, stream_options={"include_usage": True}
    )
    usage = events.pop()
    assert usage["choices"] == []
    assert usage["usage"]["prompt_tokens"] == 5
    assert usage["usage"]["completion_tokens"] == 12
    assert len({each["id"] for each in [*events, usage]}) == 1
    assert len({each["created"] for each in [*events, usage]}) == 1
    assert all("usage" not in each for each in events)
    texts = dict.fromkeys(range(4), "")
    for each in events:
        texts[each["choices"][0]["index"]] += each["choices"][0]["text"]
    assert texts[1] == "[1, 2]/None:0 [1, 2]/None:1 [1, 2]/None:2 "
    assert texts[2].startswith("[3, 4, 5]/None:0")
    order = [each["choices"][0]["index"] for each in events]
    assert order != sorted(order)


def test_a_chat_with_samples_numbers_its_choices(router: Router, p: FakePrefillEngine) -> None:
    messages = [{"role": "user", "content": "hi"}]
    answer = router.complete(path=CHAT, messages=messages, n=3).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["id"].startswith("chatcmpl-")
    events = stream_events(router, path=CHAT, messages=messages, n=2)
    assert {each["choices"][0]["index"] for each in events} == {0, 1}


def test_one_prompt_in_a_list_and_one_of_tokens_are_not_split(router: Router, d: FakeDecodeEngine) -> None:
    router.complete(prompt=["alone"])
    router.complete(prompt=[1, 2, 3])
    assert [body["prompt"] for body in d.bodies] == [["alone"], [1, 2, 3]]


@pytest.mark.parametrize("stream", [False, True])
def test_a_piece_that_fails_ends_the_others(
    router: Router, p: FakePrefillEngine, d: FakeDecodeEngine, stream: bool
) -> None:
    p.fail_with = (400, {"error": {"message": "too long", "type": "x", "param": None, "code": 400}})
    answer = router.complete(prompt=["a", "b"], stream=stream)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "too long"
    assert d.bodies == []


def test_an_error_inside_one_stream_ends_the_merged_one(
    router: Router, p: FakePrefillEngine, d: FakeDecodeEngine
) -> None:
    d.error_after = 1
    events = stream_events(router, prompt=["a", "b"])
    named = {f"kv load failed (transfer {params['transfer_id']})" for params in p.params}
    assert events[-1]["error"]["message"] in named
    wait_until(lambda: len(router.canceller.calls) == 2, "both transfers are cancelled")
