"""A prompt prefilled in one engine and decoded in another gives the tokens that one engine alone gives."""

from typing import NamedTuple

import pytest
from dfirst.connector.demo_model import Kind
from dfirst.connector.engine_spec import Mode

from .engines import EngineHouse, assert_equal, prompts

MODES: tuple[Mode, ...] = ("blockwise", "blockwise-d-first", "layerwise")
TOKENS = (20, 64, 100, 600)
"""Shorter than a block, whole blocks, ending inside a block, and several chunks."""
NOT_BY_A_DONE = ("lease_end", "hold_end", "deadline")


class Layout(NamedTuple):
    """What the engines of a pair are like. `mqa` has fewer KV heads than two ranks."""

    kind: Kind
    prefill_tp: int = 1
    decode_tp: int = 1
    prefill_dp: int = 1
    decode_dp: int = 1

    def __str__(self) -> str:
        prefill = f"TP{self.prefill_tp}" + (f"DP{self.prefill_dp}" if self.prefill_dp > 1 else "")
        decode = f"TP{self.decode_tp}" + (f"DP{self.decode_dp}" if self.decode_dp > 1 else "")
        return f"{self.kind} {prefill} to {decode}"


KINDS: tuple[Kind, ...] = ("gqa", "mqa", "mla")
FEW = (
    Layout("gqa", prefill_dp=2, decode_tp=2),
    Layout("mqa", prefill_tp=2, decode_dp=2),
    Layout("mla", prefill_tp=2),
)
"""Each kind, each size on each side, at least once."""
ALL = [
    *FEW,
    *(Layout(kind, p, d) for kind in KINDS for p in (1, 2) for d in (1, 2)),
    *(Layout(kind, prefill_dp=2) for kind in KINDS),
    *(Layout(kind, decode_dp=2) for kind in KINDS),
]
LAYOUTS = [
    pytest.param(layout, id=str(layout), marks=[] if layout in FEW else pytest.mark.full)
    for layout in dict.fromkeys(ALL)
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_hands_over_token_for_token(engines: EngineHouse, layout: Layout) -> None:
    """And every rank of P hears that it was read from the rank that read it, not by the end of a time."""
    requests = [request for mode in MODES for request in prompts(mode, *TOKENS, title=str(layout))]
    references = engines.references(layout.kind, requests)
    pair = engines.pair(
        layout.kind,
        prefill_tp=layout.prefill_tp,
        decode_tp=layout.decode_tp,
        prefill_dp=layout.prefill_dp,
        decode_dp=layout.decode_dp,
    )
    answers = pair.ask(requests)
    assert_equal(requests, answers, references)
    for answer in answers:
        trace = pair.trace_of(answer)
        assert trace.bytes > 0
        assert not [step for step in trace.transitions if step.event in NOT_BY_A_DONE]
    # All at once, with a common beginning.
    mode = MODES[len(str(layout)) % len(MODES)]
    shared = prompts(mode, 200, title=f"shared {layout}")[0]
    crowd = [
        type(shared)(mode=mode, name=f"tail {tail}", prompt=shared.prompt + f" tail {tail}" * tail)
        for tail in range(1, 7)
    ]
    assert_equal(crowd, pair.ask(crowd, at_once=True), engines.references(layout.kind, crowd))
