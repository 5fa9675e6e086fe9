"""A router's CANCEL: heard by a real rank, and bounded where nobody answers."""

import asyncio
import time
from collections.abc import Iterator

import msgspec
import pytest
import zmq
from dfirst.connector.cancel import ATTEMPTS, SideChannelCanceller
from dfirst.connector.router.cancel import RankAddress
from dfirst.connector.side_channel import HEADER
from dfirst.protocol.commands import OfferBlocks
from dfirst.protocol.effects import SENT
from dfirst.protocol.messages import Ack, Error, Sender, TransferKey
from dfirst.protocol.timing import Timing

from .ranks import HOST, Rank, start_rank, wait_until

TIMING = Timing(done_retry_seconds=0.2)
PATIENT = Timing(done_retry_seconds=5.0)
BOUND_SECONDS = ATTEMPTS * TIMING.done_retry_seconds
SLACK_SECONDS = 4.0
"""For a busy machine."""
KEY = TransferKey("cancelled", 0)


@pytest.fixture
def owner() -> Iterator[Rank]:
    rank = start_rank("P", Timing())
    yield rank
    rank.stop()


def address(rank: Rank) -> RankAddress:
    (entry,) = rank.directory.ranks
    return RankAddress(entry.host, entry.port, entry.incarnation)


def cancel(*ranks: RankAddress, timing: Timing = TIMING) -> float:
    """Cancel at these ranks; return the seconds that it took."""

    async def all_of_it() -> None:
        canceller = SideChannelCanceller(timing)
        await canceller.cancel(ranks, KEY.transfer_id, KEY.attempt, "blockwise", "the client has gone")
        canceller.close()

    started = time.monotonic()
    asyncio.run(all_of_it())
    return time.monotonic() - started


def test_a_rank_that_is_told_gives_its_blocks_back(owner: Rank) -> None:
    owner.step(OfferBlocks(key=KEY, request_id="p", block_ids=(1, 2), prompt_tokens=8))
    wait_until(lambda: KEY in owner.core.owners)
    assert cancel(address(owner), timing=PATIENT) < PATIENT.done_retry_seconds, "acknowledged at once"
    wait_until(lambda: owner.outcomes() == [SENT])


def test_a_cancellation_may_come_before_the_blocks(owner: Rank) -> None:
    cancel(address(owner), timing=PATIENT)
    owner.step(OfferBlocks(key=KEY, request_id="p", block_ids=(1, 2), prompt_tokens=8))
    wait_until(lambda: owner.outcomes() == [SENT])


def test_an_earlier_incarnation_is_cancelled_without_harm(owner: Rank) -> None:
    owner.step(OfferBlocks(key=KEY, request_id="p", block_ids=(1, 2), prompt_tokens=8))
    entry = address(owner)
    earlier = RankAddress(entry.host, entry.port, "earlier")
    assert cancel(earlier, timing=PATIENT) < PATIENT.done_retry_seconds
    time.sleep(0.1)
    assert owner.outcomes() == []


def test_a_rank_that_is_dead_is_given_up_in_time(owner: Rank) -> None:
    started = time.monotonic()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as silent:
        silent_port = silent.bind_to_random_port(f"tcp://{HOST}")
        dead = RankAddress(HOST, 9, "i")
        cancel(dead, RankAddress(HOST, silent_port, "i"), address(owner))
    assert BOUND_SECONDS <= time.monotonic() - started < BOUND_SECONDS + SLACK_SECONDS


def test_an_address_that_is_none_is_given_up_at_once(owner: Rank) -> None:
    nowhere = RankAddress("no such host!", 5, "i")
    assert cancel(nowhere, address(owner), timing=PATIENT) < PATIENT.done_retry_seconds


def test_other_words_do_not_count_as_an_acknowledgement() -> None:
    other = Ack(sender=Sender("P", 0, "i"), key=TransferKey("another", 0), sequence=0)
    assert answered_with([HEADER, msgspec.msgpack.encode(other)]) >= BOUND_SECONDS


@pytest.mark.parametrize("frames", [[HEADER, msgspec.msgpack.encode(Error(reason="what?"))], [b"garbage"]])
def test_who_does_not_understand_is_not_told_again(frames: list[bytes]) -> None:
    assert answered_with(frames, PATIENT) < PATIENT.done_retry_seconds


def answered_with(frames: list[bytes], timing: Timing = TIMING) -> float:
    """Return the seconds that a cancellation takes if the first CANCEL is answered like this."""

    async def all_of_it() -> None:
        canceller = SideChannelCanceller(timing)
        with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as rank:
            port = rank.bind_to_random_port(f"tcp://{HOST}")
            telling = asyncio.create_task(
                canceller.cancel([RankAddress(HOST, port, "i")], KEY.transfer_id, 0, "blockwise", "why")
            )
            name, *_ = await rank.recv_multipart()
            await rank.send_multipart([name, *frames])
            await telling
        canceller.close()

    started = time.monotonic()
    asyncio.run(all_of_it())
    return time.monotonic() - started
