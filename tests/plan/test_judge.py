"""The judge itself: it notices what can be wrong with copies, and with who waits for whom."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from dfirst.protocol import copies as copying
from dfirst.protocol.copies import Copies
from dfirst.protocol.plan import RequestPlan

from .judge import Wrong, pull, push
from .memory import Form, Part, slab_offsets, value_of
from .table import PAIRS, Pair, request_for

PAIR = Pair(4, (8, 2, 2), (4, 1, 1))
TOKENS, CACHED = 39, 8


def run(move: Callable[..., object] = pull, **arguments: object) -> None:
    prefill, decode = (
        replace(side, form=replace(side.form, padding=(0, 0, 0, 0, 0, 1))) for side in PAIR.sides()
    )
    move(prefill, decode, request_for(prefill, decode, TOKENS, CACHED, "judged"), **arguments)


def lose_a_run(made: Copies) -> Copies:
    return Copies(made.source_addresses[1:], made.target_addresses[1:], made.lengths[1:])


def repeat_a_run(made: Copies) -> Copies:
    columns = (made.source_addresses, made.target_addresses, made.lengths)
    return Copies(*(np.concatenate([column, column[:1]]) for column in columns))


def read_elsewhere(made: Copies) -> Copies:
    return Copies(np.roll(made.source_addresses, 1), made.target_addresses, made.lengths)


def write_elsewhere(made: Copies) -> Copies:
    return Copies(made.source_addresses, np.roll(made.target_addresses, 1), made.lengths)


def copy_a_byte_more(made: Copies) -> Copies:
    return Copies(made.source_addresses, made.target_addresses, made.lengths + 1)


def copy_a_byte_less(made: Copies) -> Copies:
    return Copies(made.source_addresses, made.target_addresses, made.lengths - 1)


def leave_the_memory(made: Copies) -> Copies:
    return Copies(made.source_addresses + (1 << 30), made.target_addresses, made.lengths)


@pytest.mark.parametrize(
    "mistake",
    [
        lose_a_run,
        repeat_a_run,
        read_elsewhere,
        write_elsewhere,
        copy_a_byte_more,
        copy_a_byte_less,
        leave_the_memory,
    ],
)
def test_copies_that_are_not_exactly_right_are_noticed(
    mistake: Callable[[Copies], Copies], monkeypatch: pytest.MonkeyPatch
) -> None:
    run()
    real = copying.copies
    monkeypatch.setattr(copying, "copies", lambda *arguments: mistake(real(*arguments)))
    with pytest.raises(Wrong):
        run()


def test_a_prefix_that_is_moved_too_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = copying.copies
    monkeypatch.setattr(
        copying,
        "copies",
        lambda leg, source, target, ours, theirs, tokens, layers: real(
            leg, source, target, ours, theirs, range(tokens.stop), layers
        ),
    )
    with pytest.raises(Wrong):
        run()


def test_a_push_that_sends_tokens_before_they_are_computed_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run(push, chunk_ends=[16, 32, TOKENS])
    real = copying.copies

    def too_early(
        leg: object, source: object, target: object, ours: object, theirs: object, *rest: object
    ) -> Copies:
        tokens, layers = rest
        # All at the first chunk, nothing at the others.
        everything = range(CACHED, TOKENS) if tokens.start == CACHED else range(0)
        return real(leg, source, target, ours, theirs, everything, layers)

    monkeypatch.setattr(copying, "copies", too_early)
    with pytest.raises(Wrong, match="was not computed"):
        run(push, chunk_ends=[16, 32, TOKENS])


def test_a_push_that_sends_a_layer_before_it_is_computed_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = copying.copies
    monkeypatch.setattr(copying, "copies", lambda *arguments: real(*arguments[:-1], [1 - arguments[-1][0]]))
    with pytest.raises(Wrong, match="was not computed"):
        run(push, chunk_ends=[TOKENS])


@pytest.mark.parametrize(
    ("method", "answer"),
    [
        ("readers", lambda real: lambda plan, rank: real(plan, rank) - {min(real(plan, rank))}),
        ("readers", lambda real: lambda plan, rank: real(plan, rank) | {3}),
        ("writers", lambda real: lambda plan, rank: real(plan, rank) - {min(real(plan, rank), default=0)}),
        ("writers", lambda real: lambda plan, rank: real(plan, rank) | {15}),
        ("releases_of", lambda _: lambda _plan, _rank: ()),
        ("releases_of", lambda _: lambda plan, _rank: tuple(plan.releasers)),
    ],
)
def test_a_word_too_many_or_too_few_is_noticed(
    method: str, answer: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RequestPlan, method, answer(getattr(RequestPlan, method)))
    prefill, decode = PAIRS[5].sides()
    with pytest.raises(Wrong, match="waits for"):
        pull(prefill, decode, request_for(prefill, decode, 5, 0, "words"))


def test_any_two_places_have_values_that_differ_somewhere() -> None:
    tokens, elements = np.arange(40)[:, None], np.arange(4)[None, :]
    seen: dict[bytes, tuple[int, ...]] = {}
    for layer, part, head in itertools.product(range(4), range(2), range(8)):
        for token, content in enumerate(value_of(layer, part, head, tokens, elements)):
            place = (layer, part, head, token)
            assert seen.setdefault(content.tobytes(), place) == place


@pytest.mark.parametrize("parts", [(Part("kv", 2, 3),), (Part("k", 4),)])
def test_a_slab_holds_every_byte_once(parts: tuple[Part, ...]) -> None:
    (part,) = Form(parts=parts).parts
    offsets = slab_offsets(4, part.key_bytes, part.value_bytes)
    assert sorted(offsets.ravel().tolist()) == list(range(4 * part.content_bytes))
