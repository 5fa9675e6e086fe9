"""A prompt prefilled in one engine and decoded in another gives the tokens that one engine alone gives."""

import pytest
from dfirst.connector.demo_model import Kind
from dfirst.connector.engine_spec import Mode

from .engines import EngineHouse, assert_equal, prompts

LAYOUTS: tuple[tuple[Kind, int, int], ...] = (("gqa", 2, 1), ("gqa", 1, 2), ("mla", 2, 1))
MODES: tuple[Mode, ...] = ("blockwise", "blockwise-d-first", "layerwise")
TOKENS = (20, 64, 100, 600)
"""Shorter than a block, whole blocks, ending inside a block, and several chunks."""


@pytest.mark.parametrize(("kind", "prefill_tp", "decode_tp"), LAYOUTS)
def test_every_layout_hands_over_token_for_token(
    engines: EngineHouse, kind: Kind, prefill_tp: int, decode_tp: int
) -> None:
    title = f"{prefill_tp} to {decode_tp}"
    requests = [request for mode in MODES for request in prompts(mode, *TOKENS, title=title)]
    references = engines.references(kind, requests)
    pair = engines.pair(kind, prefill_tp=prefill_tp, decode_tp=decode_tp)
    answers = pair.ask(requests)
    assert_equal(requests, answers, references)
    for answer in answers:
        assert pair.trace_of(answer).bytes > 0


@pytest.mark.parametrize("mode", MODES)
def test_many_at_once_with_a_shared_prefix_hand_over(engines: EngineHouse, mode: Mode) -> None:
    shared = prompts(mode, 200, title="shared")[0]
    requests = [
        type(shared)(mode=mode, name=f"tail {tail}", prompt=shared.prompt + f" tail {tail}" * tail)
        for tail in range(1, 7)
    ]
    references = engines.references("mla", requests)
    pair = engines.pair("mla", prefill_tp=2, decode_tp=1)
    assert_equal(requests, pair.ask(requests, at_once=True), references)
