"""What two real control threads write, with real sockets and the real engine: it conforms to the spec."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from dfirst.connector.step import Chunk
from dfirst.protocol.commands import AbortTransfer, AcceptPush, FinishPush, OfferBlocks, StartPull, StartPush
from dfirst.protocol.messages import TransferKey
from dfirst.protocol.timing import Timing
from dfirst.spec.conform import conform

from tests.connector.ranks import Rank, start_rank, wait_until

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
KEY = TransferKey("real-1", 0)
PREFILL_BLOCKS = (3, 4, 9, 11)
DECODE_BLOCKS = (20, 2, 3, 7)
PROMPT = 14


@pytest.fixture(params=["direct", "staged"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Rank, Rank]]:
    staged = request.param == "staged"
    prefill = start_rank("P", TIMING, trace=str(tmp_path), staged=staged)
    decode = start_rank("D", TIMING, fill=0xEE, trace=str(tmp_path), staged=staged)
    yield prefill, decode
    prefill.stop()
    decode.stop()


def freed(*ranks: Rank) -> bool:
    for rank in ranks:
        rank.outcomes()
    transfers = [{**rank.core.movers, **rank.core.owners}.get(KEY) for rank in ranks]
    if any(transfer is None or transfer.state != "FREED" for transfer in transfers):
        return False
    movers = [rank.core.movers[KEY] for rank in ranks if KEY in rank.core.movers]
    return all(leg.state == "FREED" for mover in movers for leg in mover.legs.values())


def check(directory: Path, prefill: Rank, decode: Rank) -> None:
    wait_until(lambda: freed(prefill, decode))
    prefill.stop()
    decode.stop()
    found = conform([directory])
    assert found.violation is None, found.violation.sentence
    assert (found.files, found.transfers, found.running) == (2, 1, [])


def test_a_pull(pair: tuple[Rank, Rank], tmp_path: Path) -> None:
    prefill, decode = pair
    decode.step(
        StartPull(
            key=KEY,
            request_id="d",
            remote=prefill.remote,
            block_ids=DECODE_BLOCKS,
            prompt_tokens=PROMPT,
            cached_tokens=4,
        )
    )
    wait_until(lambda: KEY in prefill.core.owners and prefill.core.owners[KEY].state == "PARKED")
    prefill.step(OfferBlocks(key=KEY, request_id="p", block_ids=PREFILL_BLOCKS, prompt_tokens=PROMPT))
    check(tmp_path, prefill, decode)


def push(prefill: Rank, decode: Rank) -> None:
    decode.step(
        AcceptPush(key=KEY, request_id="d", block_ids=DECODE_BLOCKS, prompt_tokens=PROMPT, cached_tokens=4)
    )
    command = StartPush(key=KEY, request_id="p", remote=decode.remote, prompt_tokens=PROMPT, cached_tokens=4)
    prefill.step(command, chunks=(Chunk(key=KEY, block_ids=PREFILL_BLOCKS[:2], end_token=6, last=False),))


def test_a_push(pair: tuple[Rank, Rank], tmp_path: Path) -> None:
    prefill, decode = pair
    push(prefill, decode)
    prefill.step(chunks=(Chunk(key=KEY, block_ids=PREFILL_BLOCKS, end_token=PROMPT, last=True),))
    prefill.step(FinishPush(KEY))
    check(tmp_path, prefill, decode)


def test_a_push_that_is_longer_than_its_lease(pair: tuple[Rank, Rank], tmp_path: Path) -> None:
    prefill, decode = pair
    push(prefill, decode)
    wait_until(lambda: decode.core.counters["received_Renew"] >= 3)
    prefill.step(chunks=(Chunk(key=KEY, block_ids=PREFILL_BLOCKS, end_token=PROMPT, last=True),))
    prefill.step(FinishPush(KEY))
    check(tmp_path, prefill, decode)


def test_a_push_that_is_aborted(pair: tuple[Rank, Rank], tmp_path: Path) -> None:
    prefill, decode = pair
    push(prefill, decode)
    wait_until(lambda: KEY in decode.core.owners and decode.core.owners[KEY].state == "PUSHES_PENDING")
    decode.step(AbortTransfer(KEY, "the client has gone"))
    prefill.step(FinishPush(KEY))
    check(tmp_path, prefill, decode)


def test_a_pull_of_blocks_that_cannot_be(pair: tuple[Rank, Rank], tmp_path: Path) -> None:
    prefill, decode = pair
    prefill.step(OfferBlocks(key=KEY, request_id="p", block_ids=PREFILL_BLOCKS[:1], prompt_tokens=PROMPT))
    decode.step(
        StartPull(
            key=KEY,
            request_id="d",
            remote=prefill.remote,
            block_ids=DECODE_BLOCKS,
            prompt_tokens=PROMPT,
            cached_tokens=0,
        )
    )
    check(tmp_path, prefill, decode)
    assert decode.reports[0].outcome == "failed"
