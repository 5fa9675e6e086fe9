"""A rank's control thread with real sockets and the real engine: what is reported is what has arrived."""

from collections.abc import Iterator

import numpy as np
import pytest
from dfirst.connector import rank_loop
from dfirst.connector.step import Chunk
from dfirst.protocol.commands import AbortTransfer, AcceptPush, FinishPush, OfferBlocks, StartPull, StartPush
from dfirst.protocol.copies import Copies
from dfirst.protocol.effects import FAILED, RECEIVED, SENT
from dfirst.protocol.messages import TransferKey
from dfirst.protocol.timing import Timing

from .ranks import Rank, start_rank, wait_until

TIMING = Timing(
    lease_seconds=2.0,
    query_retry_seconds=0.2,
    query_timeout_seconds=2.0,
    hold_seconds=3.0,
    copy_timeout_seconds=5.0,
    quarantine_seconds=0.5,
    stall_allowance_seconds=0.5,
    done_retry_seconds=0.2,
)
KEY = TransferKey("loop-1", 0)
PREFILL_BLOCKS = (3, 4, 9, 11)
DECODE_BLOCKS = (20, 2, 3, 7)
PROMPT = 14
CACHED = 4
PATTERN = 0xEE


@pytest.fixture(params=["direct", "staged"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Rank, Rank]]:
    staged = request.param == "staged"
    prefill = start_rank("P", TIMING, staged=staged)
    decode = start_rank("D", TIMING, fill=PATTERN, staged=staged)
    yield prefill, decode
    prefill.stop()
    decode.stop()


def offer() -> OfferBlocks:
    return OfferBlocks(key=KEY, request_id="p", block_ids=PREFILL_BLOCKS, prompt_tokens=PROMPT)


def pull(prefill: Rank) -> StartPull:
    return StartPull(
        key=KEY,
        request_id="d",
        remote=prefill.remote,
        block_ids=DECODE_BLOCKS,
        prompt_tokens=PROMPT,
        cached_tokens=CACHED,
    )


def accept() -> AcceptPush:
    return AcceptPush(
        key=KEY, request_id="d", block_ids=DECODE_BLOCKS, prompt_tokens=PROMPT, cached_tokens=CACHED
    )


def push(decode: Rank) -> StartPush:
    return StartPush(
        key=KEY, request_id="p", remote=decode.remote, prompt_tokens=PROMPT, cached_tokens=CACHED
    )


def chunk(end_token: int, last: bool) -> Chunk:
    blocks = -(-end_token // 4)
    return Chunk(key=KEY, block_ids=PREFILL_BLOCKS[:blocks], end_token=end_token, last=last)


def check_arrived(prefill: Rank, decode: Rank) -> None:
    """All blocks behind the cached prefix are equal, and nothing else was touched."""
    expected = np.full_like(decode.cache, PATTERN)
    for source, target in list(zip(PREFILL_BLOCKS, DECODE_BLOCKS, strict=True))[1:]:
        expected[:, target] = prefill.cache[:, source]
    assert np.array_equal(decode.cache, expected)


def test_a_pulled_prompt_arrives_whole_and_frees_the_prefill_blocks(pair: tuple[Rank, Rank]) -> None:
    prefill, decode = pair
    prefill.step(offer())
    decode.step(pull(prefill))
    wait_until(lambda: decode.outcomes() == [RECEIVED])
    check_arrived(prefill, decode)
    wait_until(lambda: prefill.outcomes() == [SENT])


def test_a_question_that_comes_before_its_blocks_is_answered_when_they_come(pair: tuple[Rank, Rank]) -> None:
    prefill, decode = pair
    decode.step(pull(prefill))
    wait_until(lambda: KEY in prefill.core.owners and prefill.core.owners[KEY].state == "PARKED")
    prefill.step(offer())
    wait_until(lambda: decode.outcomes() == [RECEIVED])
    check_arrived(prefill, decode)


def test_a_prompt_is_pushed_in_chunks_layer_by_layer(pair: tuple[Rank, Rank]) -> None:
    prefill, decode = pair
    decode.step(accept())
    prefill.step(push(decode), chunks=(chunk(6, last=False),))
    prefill.step(chunks=(chunk(11, last=False),))
    prefill.step(chunks=(chunk(PROMPT, last=True),))
    wait_until(lambda: decode.outcomes() == [RECEIVED])
    check_arrived(prefill, decode)
    assert prefill.outcomes() == []
    prefill.step(FinishPush(KEY))
    wait_until(lambda: prefill.outcomes() == [SENT])


def test_layers_that_were_computed_before_the_blocks_were_lent_are_pushed_then(
    pair: tuple[Rank, Rank],
) -> None:
    prefill, decode = pair
    prefill.step(push(decode), chunks=(chunk(6, last=False),))
    prefill.step(chunks=(chunk(PROMPT, last=True),))
    prefill.step(FinishPush(KEY))
    decode.step(accept())
    wait_until(lambda: decode.outcomes() == [RECEIVED])
    check_arrived(prefill, decode)
    wait_until(lambda: prefill.outcomes() == [SENT])


def test_a_preempted_prompt_is_pushed_again_from_its_new_blocks(pair: tuple[Rank, Rank]) -> None:
    prefill, decode = pair
    decode.step(accept())
    other = Chunk(key=KEY, block_ids=(14, 15, 16), end_token=12, last=False)
    prefill.step(push(decode), chunks=(other,))
    prefill.step(preempted=frozenset({KEY}), chunks=(chunk(PROMPT, last=True),))
    wait_until(lambda: decode.outcomes() == [RECEIVED])
    check_arrived(prefill, decode)


def test_an_aborted_push_gives_both_sides_their_blocks_back(pair: tuple[Rank, Rank]) -> None:
    prefill, decode = pair
    decode.step(accept())
    prefill.step(push(decode), chunks=(chunk(6, last=False),))
    wait_until(lambda: KEY in decode.core.owners and decode.core.owners[KEY].state == "PUSHES_PENDING")
    decode.step(AbortTransfer(KEY, "the client has gone"))
    wait_until(lambda: decode.outcomes() == [FAILED])
    prefill.step(FinishPush(KEY))
    wait_until(lambda: prefill.outcomes() == [SENT])


def test_a_layout_that_leads_out_of_this_ranks_memory_moves_nothing(
    pair: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the two layouts come to, no byte outside this rank's cache is touched."""
    prefill, decode = pair
    outside = decode.cache.ctypes.data + decode.cache.nbytes - 1
    run = Copies(
        *(np.asarray([number], dtype=np.int64) for number in (prefill.cache.ctypes.data, outside, 2))
    )
    monkeypatch.setattr(rank_loop, "pulled", lambda started, own: run)
    prefill.step(offer())
    decode.step(pull(prefill))
    wait_until(lambda: decode.outcomes() == [FAILED])
    assert "2 bytes at" in decode.reports[0].reason
    assert (decode.cache == PATTERN).all()


def test_a_prefill_engine_that_is_gone_fails_the_pull_in_time() -> None:
    prefill, decode = start_rank("P", TIMING), start_rank("D", TIMING, fill=PATTERN)
    gone = pull(prefill)
    prefill.stop()
    decode.step(gone)
    wait_until(lambda: decode.outcomes() == [FAILED])
    assert "did not give its layout" in decode.reports[0].reason
    decode.stop()


def test_a_decode_engine_that_never_comes_leaves_the_blocks_after_the_hold_time(
    pair: tuple[Rank, Rank],
) -> None:
    prefill, _ = pair
    prefill.step(offer())
    wait_until(lambda: prefill.outcomes() == [SENT])


def test_staged_copies_go_through_the_owners_slot() -> None:
    prefill, decode = start_rank("P", TIMING, staged=True), start_rank("D", TIMING, PATTERN, staged=True)
    prefill.step(offer())
    decode.step(pull(prefill))
    wait_until(lambda: decode.outcomes() == [RECEIVED])
    check_arrived(prefill, decode)
    wait_until(lambda: prefill.outcomes() == [SENT])
    parts = len(PREFILL_BLOCKS) - 1  # of one block and layer each, but for those that are cached
    assert prefill.core.observer.rows["OL22"] == parts * prefill.cache.shape[0]
    assert len(prefill.core.slots._free) == 2
    prefill.stop()
    decode.stop()
