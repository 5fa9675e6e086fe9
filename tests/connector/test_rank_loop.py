"""A rank's control thread with real sockets and the real engine: what is reported is what has arrived."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import msgspec
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
PREFILL_BLOCKS = (3, 4, 9, 11)
DECODE_BLOCKS = (20, 2, 3, 7)
PROMPT = 14
CACHED = 4
PATTERN = 0xEE


@dataclass(frozen=True)
class Pair:
    """A prefill and a decode rank, and a transfer between them that no other test has."""

    prefill: Rank
    decode: Rank
    staged: bool
    key: TransferKey

    def sent(self) -> list[str]:
        """What the prefill rank has reported of the transfer."""
        return self.prefill.outcomes(self.key)

    def received(self) -> list[str]:
        """What the decode rank has reported of it."""
        return self.decode.outcomes(self.key)

    def offer(self) -> OfferBlocks:
        return OfferBlocks(key=self.key, request_id="p", block_ids=PREFILL_BLOCKS, prompt_tokens=PROMPT)

    def pull(self) -> StartPull:
        return StartPull(
            key=self.key,
            request_id="d",
            remote=self.prefill.remote,
            block_ids=DECODE_BLOCKS,
            prompt_tokens=PROMPT,
            cached_tokens=CACHED,
        )

    def accept(self) -> AcceptPush:
        return AcceptPush(
            key=self.key,
            request_id="d",
            block_ids=DECODE_BLOCKS,
            prompt_tokens=PROMPT,
            cached_tokens=CACHED,
        )

    def push(self) -> StartPush:
        return StartPush(
            key=self.key,
            request_id="p",
            remote=self.decode.remote,
            prompt_tokens=PROMPT,
            cached_tokens=CACHED,
        )

    def chunk(self, end_token: int, last: bool) -> Chunk:
        blocks = -(-end_token // 4)
        return Chunk(key=self.key, block_ids=PREFILL_BLOCKS[:blocks], end_token=end_token, last=last)

    def check_arrived(self) -> None:
        """All blocks behind the cached prefix are equal, and nothing else was touched."""
        expected = np.full_like(self.decode.cache, PATTERN)
        for source, target in list(zip(PREFILL_BLOCKS, DECODE_BLOCKS, strict=True))[1:]:
            expected[:, target] = self.prefill.cache[:, source]
        assert np.array_equal(self.decode.cache, expected)


def started(timing: Timing, staged: bool = False) -> Pair:
    prefill = start_rank("P", timing, staged=staged)
    decode = start_rank("D", timing, staged=staged)
    return Pair(prefill, decode, staged, TransferKey("alone", 0))


@pytest.fixture(scope="module", params=["direct", "staged"])
def ranks(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = started(TIMING, request.param == "staged")
    yield pair
    pair.prefill.stop()
    pair.decode.stop()


@pytest.fixture
def pair(ranks: Pair, request: pytest.FixtureRequest) -> Pair:
    ranks.decode.cache[:] = PATTERN
    return replace(ranks, key=TransferKey(request.node.name, 0))


def test_a_pulled_prompt_arrives_whole_and_frees_the_prefill_blocks(pair: Pair) -> None:
    staged_before = pair.prefill.core.observer.rows["OL22"]
    pair.prefill.step(pair.offer())
    pair.decode.step(pair.pull())
    wait_until(lambda: pair.received() == [RECEIVED])
    pair.check_arrived()
    wait_until(lambda: pair.sent() == [SENT])
    if pair.staged:
        parts = len(PREFILL_BLOCKS) - 1  # of one block and layer each, but for those that are cached
        staged = pair.prefill.core.observer.rows["OL22"] - staged_before
        assert staged == parts * pair.prefill.cache.shape[0]
        assert len(pair.prefill.core.slots._free) == 2


def test_whoever_asks_for_reports_may_wait_for_the_first(pair: Pair) -> None:
    assert pair.decode.loop.take_reports(0.01) == []
    pair.prefill.step(pair.offer())
    pair.decode.step(pair.pull())
    (report,) = pair.decode.loop.take_reports(30.0)
    assert (report.key, report.outcome) == (pair.key, RECEIVED)
    (report,) = pair.prefill.loop.take_reports(30.0)
    assert (report.key, report.outcome) == (pair.key, SENT)


def test_a_question_that_comes_before_its_blocks_is_answered_when_they_come(pair: Pair) -> None:
    pair.decode.step(pair.pull())
    wait_until(
        lambda: pair.key in pair.prefill.core.owners and pair.prefill.core.owners[pair.key].state == "PARKED"
    )
    pair.prefill.step(pair.offer())
    wait_until(lambda: pair.received() == [RECEIVED])
    pair.check_arrived()


def test_a_prompt_is_pushed_in_chunks_layer_by_layer(pair: Pair) -> None:
    pair.decode.step(pair.accept())
    pair.prefill.step(pair.push(), chunks=(pair.chunk(6, last=False),))
    pair.prefill.step(chunks=(pair.chunk(11, last=False),))
    pair.prefill.step(chunks=(pair.chunk(PROMPT, last=True),))
    wait_until(lambda: pair.received() == [RECEIVED])
    pair.check_arrived()
    assert pair.sent() == []
    pair.prefill.step(FinishPush(pair.key))
    wait_until(lambda: pair.sent() == [SENT])


def test_layers_that_were_computed_before_the_blocks_were_lent_are_pushed_then(pair: Pair) -> None:
    pair.prefill.step(pair.push(), chunks=(pair.chunk(6, last=False),))
    pair.prefill.step(chunks=(pair.chunk(PROMPT, last=True),))
    pair.prefill.step(FinishPush(pair.key))
    pair.decode.step(pair.accept())
    wait_until(lambda: pair.received() == [RECEIVED])
    pair.check_arrived()
    wait_until(lambda: pair.sent() == [SENT])


def test_a_preempted_prompt_is_pushed_again_from_its_new_blocks(pair: Pair) -> None:
    pair.decode.step(pair.accept())
    other = Chunk(key=pair.key, block_ids=(14, 15, 16), end_token=12, last=False)
    pair.prefill.step(pair.push(), chunks=(other,))
    pair.prefill.step(preempted=frozenset({pair.key}), chunks=(pair.chunk(PROMPT, last=True),))
    wait_until(lambda: pair.received() == [RECEIVED])
    pair.check_arrived()


def test_an_aborted_push_gives_both_sides_their_blocks_back(pair: Pair) -> None:
    pair.decode.step(pair.accept())
    pair.prefill.step(pair.push(), chunks=(pair.chunk(6, last=False),))
    wait_until(
        lambda: (
            pair.key in pair.decode.core.owners
            and pair.decode.core.owners[pair.key].state == "PUSHES_PENDING"
        )
    )
    pair.decode.step(AbortTransfer(pair.key, "the client has gone"))
    wait_until(lambda: pair.received() == [FAILED])
    pair.prefill.step(FinishPush(pair.key))
    wait_until(lambda: pair.sent() == [SENT])


def test_a_layout_that_leads_out_of_this_ranks_memory_moves_nothing(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the two layouts come to, no byte outside this rank's cache is touched."""
    outside = pair.decode.cache.ctypes.data + pair.decode.cache.nbytes - 1
    run = Copies(
        *(np.asarray([number], dtype=np.int64) for number in (pair.prefill.cache.ctypes.data, outside, 2))
    )
    monkeypatch.setattr(rank_loop, "pulled", lambda started, own: run)
    pair.prefill.step(pair.offer())
    pair.decode.step(pair.pull())
    wait_until(lambda: pair.received() == [FAILED])
    assert "2 bytes at" in pair.decode.reports[-1].reason
    assert (pair.decode.cache == PATTERN).all()


def test_a_prefill_engine_that_is_gone_fails_the_pull_in_time() -> None:
    pair = started(msgspec.structs.replace(TIMING, query_timeout_seconds=0.5))
    gone = pair.pull()
    pair.prefill.stop()
    pair.decode.step(gone)
    wait_until(lambda: pair.received() == [FAILED])
    assert "did not give its layout" in pair.decode.reports[0].reason
    pair.decode.stop()


def test_a_decode_engine_that_never_comes_leaves_the_blocks_after_the_hold_time() -> None:
    pair = started(msgspec.structs.replace(TIMING, hold_seconds=0.5))
    pair.prefill.step(pair.offer())
    wait_until(lambda: pair.sent() == [SENT])
    pair.prefill.stop()
    pair.decode.stop()
