"""A rank's control thread when something goes wrong: the transfer in question ends, the others go on, and so
does the thread.
"""

import logging
import os
import secrets
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from dfirst.connector import rank_loop
from dfirst.connector.rank_loop import about
from dfirst.connector.step import Chunk
from dfirst.protocol.commands import (
    AcceptPush,
    Collected,
    CopyEnded,
    FinishPush,
    LegKey,
    MessageReceived,
    OfferBlocks,
    RemoteEngine,
    RemoteRank,
    StartPull,
    StartPush,
)
from dfirst.protocol.effects import FAILED, RECEIVED, SENT
from dfirst.protocol.messages import Ack, Sender, TransferKey
from dfirst.protocol.timing import Timing

from .ranks import BLOCKS, Rank, start_rank, wait_until

TIMING = Timing(
    lease_seconds=20.0,
    query_retry_seconds=0.2,
    query_timeout_seconds=1.5,
    hold_seconds=30.0,
    copy_timeout_seconds=5.0,
    quarantine_seconds=0.5,
    stall_allowance_seconds=0.5,
    done_retry_seconds=0.2,
)
PROMPT = 14
NOT_COPIED, COPIED = (5, 6, 7, 8), (10, 11, 12, 13)
"""D's blocks: those of transfers that fail, and those of transfers that do not."""
STOP_SECONDS, STOP_SLACK_SECONDS = 0.5, 1.0
ERRORS = 5
"""That are looked at of those that come one after the other."""
SOON_SECONDS = 6.0
"""On a busy machine, and far below a lease."""


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Rank, Rank]]:
    """Two ranks that outlive whatever is done to them here."""
    prefill, decode = start_rank("P", TIMING), start_rank("D", TIMING, fill=0)
    yield prefill, decode
    prefill.stop()
    decode.stop()


@pytest.fixture
def key() -> TransferKey:
    return TransferKey(secrets.token_hex(4), 0)


def offer(key: TransferKey, blocks: tuple[int, ...] = (1, 2, 3, 4)) -> OfferBlocks:
    return OfferBlocks(key=key, request_id=f"p-{key.transfer_id}", block_ids=blocks, prompt_tokens=PROMPT)


def pull(key: TransferKey, remote: RemoteEngine, blocks: tuple[int, ...] = NOT_COPIED) -> StartPull:
    return StartPull(
        key=key,
        request_id=f"d-{key.transfer_id}",
        remote=remote,
        block_ids=blocks,
        prompt_tokens=PROMPT,
        cached_tokens=0,
    )


def accept(key: TransferKey, blocks: tuple[int, ...]) -> AcceptPush:
    return AcceptPush(key=key, request_id="d", block_ids=blocks, prompt_tokens=PROMPT, cached_tokens=0)


def push(key: TransferKey, remote: RemoteEngine) -> StartPush:
    return StartPush(key=key, request_id="p", remote=remote, prompt_tokens=PROMPT, cached_tokens=0)


def chunk(key: TransferKey, end_token: int) -> Chunk:
    blocks = (1, 2, 3, 4)[: -(-end_token // 4)]
    return Chunk(key=key, block_ids=blocks, end_token=end_token, last=end_token == PROMPT)


def outcomes(rank: Rank, key: TransferKey) -> list[str]:
    rank.outcomes()
    return [report.outcome for report in rank.reports if report.key == key]


def check_that_both_go_on(prefill: Rank, decode: Rank) -> None:
    following = TransferKey(secrets.token_hex(4), 0)
    prefill.step(offer(following))
    decode.step(pull(following, prefill.remote, COPIED))
    wait_until(lambda: outcomes(decode, following) == [RECEIVED])


@pytest.mark.parametrize("host", ["no such host!", "é"])
def test_an_address_that_is_none_fails_its_transfer(
    pair: tuple[Rank, Rank], key: TransferKey, host: str
) -> None:
    prefill, decode = pair
    decode.step(pull(key, RemoteEngine("P", "d", (RemoteRank(host, 5, "i"),))))
    wait_until(lambda: outcomes(decode, key) == [FAILED])
    check_that_both_go_on(prefill, decode)


@pytest.mark.parametrize("blocks", [(1, 2, 3), (), (1, 2, 3, BLOCKS), (1, 2, 3, -1)])
def test_blocks_that_cannot_be_what_is_lent_are_not_read(
    pair: tuple[Rank, Rank], key: TransferKey, blocks: tuple[int, ...]
) -> None:
    prefill, decode = pair
    prefill.step(offer(key, blocks))
    decode.step(pull(key, prefill.remote))
    wait_until(lambda: outcomes(decode, key) == [FAILED], SOON_SECONDS)
    wait_until(lambda: outcomes(prefill, key) == [SENT], SOON_SECONDS)
    assert not decode.cache[:, NOT_COPIED].any()
    check_that_both_go_on(prefill, decode)


@pytest.mark.parametrize("blocks", [NOT_COPIED[:3], (*NOT_COPIED[:3], BLOCKS)])
def test_a_push_into_blocks_that_cannot_be_what_is_lent_fails(
    pair: tuple[Rank, Rank], key: TransferKey, blocks: tuple[int, ...]
) -> None:
    prefill, decode = pair
    decode.step(accept(key, blocks))
    prefill.step(push(key, decode.remote), chunks=(chunk(key, PROMPT),))
    prefill.step(FinishPush(key))
    wait_until(lambda: outcomes(decode, key) == [FAILED], SOON_SECONDS)
    wait_until(lambda: outcomes(prefill, key) == [SENT], SOON_SECONDS)
    check_that_both_go_on(prefill, decode)


def test_a_rank_that_ends_says_so_to_those_whose_blocks_it_was_lent(
    pair: tuple[Rank, Rank], key: TransferKey
) -> None:
    leaving, decode = start_rank("leaving", TIMING), pair[1]
    decode.step(accept(key, COPIED))
    leaving.step(push(key, decode.remote), chunks=(chunk(key, 8),))
    wait_until(lambda: key in decode.core.owners and decode.core.owners[key].state == "PUSHES_PENDING")
    leaving.stop()
    wait_until(lambda: outcomes(decode, key) == [FAILED], SOON_SECONDS)


def test_an_effect_that_fails_takes_no_other_one_with_it(
    pair: tuple[Rank, Rank], key: TransferKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = pair
    lines: list[str] = []
    monkeypatch.setattr(rank_loop.logger, "exception", lambda text, *values: lines.append(text % values))
    with monkeypatch.context() as broken:
        broken.setattr(decode.loop._channel, "send", lambda *_: 1 / 0)
        decode.step(pull(key, prefill.remote))
        wait_until(lambda: outcomes(decode, key) == [FAILED])
    assert any(line.endswith("Send could not be carried out") for line in lines)
    check_that_both_go_on(prefill, decode)


def test_an_error_that_comes_again_and_again_fills_no_core(
    pair: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = pair
    lines: list[str] = []
    monkeypatch.setattr(rank_loop.logger, "exception", lambda text, *values: lines.append(text % values))
    with monkeypatch.context() as broken:
        broken.setattr(decode.core, "next_deadline", lambda: 1 / 0)
        started = time.monotonic()
        decode.step()
        wait_until(lambda: len(lines) >= ERRORS)
        seconds = time.monotonic() - started
    assert seconds >= (ERRORS - 1) * rank_loop.PAUSE_AFTER_ERROR_SECONDS
    check_that_both_go_on(prefill, decode)


def test_the_end_is_bounded_by_a_copy_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = start_rank("P", TIMING)
    given: list[float] = []
    monkeypatch.setattr(
        rank.loop._data, "shutdown", lambda seconds: given.append(seconds) or time.sleep(seconds) or False
    )
    started = time.monotonic()
    rank.loop.stop(STOP_SECONDS)
    assert time.monotonic() - started < STOP_SECONDS + STOP_SLACK_SECONDS
    assert given[0] < STOP_SECONDS
    wait_until(lambda: not rank.loop._thread.is_alive())
    rank.engine.close()


def test_the_end_is_bounded_by_a_thread_that_does_not_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rank = start_rank("P", TIMING)
    release = threading.Event()
    monkeypatch.setattr(rank.core, "tick", lambda now: release.wait(20.0) and [])
    rank.step()
    started = time.monotonic()
    with caplog.at_level(logging.WARNING, rank_loop.logger.name):
        rank.loop.stop(STOP_SECONDS)
    assert time.monotonic() - started < STOP_SECONDS + STOP_SLACK_SECONDS
    assert f"did not end within {STOP_SECONDS:g} s" in caplog.text
    release.set()
    wait_until(lambda: not rank.loop._thread.is_alive())
    rank.engine.close()


def test_what_comes_after_the_end_touches_no_file_of_others() -> None:
    rank = start_rank("P", TIMING)
    rank.stop()
    numbers = os.pipe()
    rank.step(offer(TransferKey("late", 0)))
    os.set_blocking(numbers[0], False)
    with pytest.raises(BlockingIOError):
        os.read(numbers[0], 1)
    assert rank.outcomes() == []
    for number in numbers:
        os.close(number)


def test_nothing_of_a_transfer_is_kept_when_it_is_over(pair: tuple[Rank, Rank], key: TransferKey) -> None:
    prefill, decode = pair
    decode.step(accept(key, COPIED))
    prefill.step(push(key, decode.remote), chunks=(chunk(key, PROMPT),))
    prefill.step(FinishPush(key))
    wait_until(lambda: outcomes(prefill, key) == [SENT])
    wait_until(lambda: outcomes(decode, key) == [RECEIVED])
    for rank in pair:
        wait_until(lambda rank=rank: not rank.loop._legs and not rank.loop._items)
        assert rank.loop._feed._feeds == {}


NAMED = TransferKey("t", 0)


@pytest.mark.parametrize(
    "value",
    [
        offer(NAMED),
        Collected(NAMED),
        CopyEnded(LegKey(NAMED, "D", 0, "i"), True, ""),
        MessageReceived(Ack(sender=Sender("D", 0, "i"), key=NAMED, sequence=0), b""),
    ],
)
def test_the_log_names_the_transfer(value: Any) -> None:
    assert about(value) == "t.0"


def test_the_log_says_so_if_there_is_no_transfer() -> None:
    assert about(object()) == "no transfer"
