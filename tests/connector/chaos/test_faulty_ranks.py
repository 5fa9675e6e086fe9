"""Two real ranks whose messages and copies go wrong at random: what is reported as received is whole, every
transfer comes to its end, and what both write conforms to the spec. No vLLM.
"""

import random
from functools import partial
from pathlib import Path

import pytest
from dfirst.connector.chaos.channel import FaultyChannel
from dfirst.connector.chaos.engine import FaultyEngine
from dfirst.connector.chaos.orders import COPY_FAULTS, MESSAGE_FAULTS, FaultDesk, OrderBook
from dfirst.connector.data_path import DataPath
from dfirst.connector.step import Chunk
from dfirst.protocol.commands import AcceptPush, FinishPush, OfferBlocks, StartPull, StartPush
from dfirst.protocol.effects import FAILED, RECEIVED, SENT
from dfirst.protocol.messages import TransferKey
from dfirst.protocol.timing import Timing
from dfirst.spec.conform import conform

from tests.connector import ranks
from tests.connector.ranks import Rank, start_rank, wait_until

TIMING = Timing(
    lease_seconds=2.0,
    query_retry_seconds=0.1,
    query_timeout_seconds=2.0,
    hold_seconds=3.0,
    copy_timeout_seconds=5.0,
    quarantine_seconds=0.5,
    stall_allowance_seconds=0.5,
    done_retry_seconds=0.1,
    farewell_seconds=3.0,
)
PROMPT = 14
BLOCKS_EACH = 4
AT_ONCE = 7
ROUNDS = 4
EMPTY = 0xEE
END_SECONDS = 30.0
"""Far more than any lease with its tail."""


def start_faulty(name: str, desk: FaultDesk, traces: Path, patch: pytest.MonkeyPatch) -> Rank:
    book = OrderBook(desk.directory, name, 0)
    patch.setattr(ranks, "SideChannel", lambda *arguments: FaultyChannel(book, *arguments))
    patch.setattr(
        ranks, "DataPath", lambda engine, *more, **rest: DataPath(FaultyEngine(engine, book), *more, **rest)
    )
    return start_rank(name, TIMING, fill=None if name == "P" else EMPTY, trace=str(traces))


@pytest.mark.parametrize("seed", [1])
def test_nothing_is_lost_or_mixed_up(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(seed)
    desk = FaultDesk(tmp_path / "faults")
    prefill = start_faulty("P", desk, tmp_path / "traces", monkeypatch)
    decode = start_faulty("D", desk, tmp_path / "traces", monkeypatch)
    outcomes: list[str] = []
    for number in range(ROUNDS):
        order_faults(chance, desk, number)
        decode.cache[:] = EMPTY
        keys = [TransferKey(f"{number}-{slot}", 0) for slot in range(AT_ONCE)]
        blocks = {key: blocks_of(slot) for slot, key in enumerate(keys)}
        for key in keys:
            start = pull if chance.random() < 0.5 else push
            start(key, prefill, decode, blocks[key])
        for rank in (prefill, decode):
            wait_until(partial(all_reported, rank, frozenset(keys)), END_SECONDS)
        for report in decode.reports:
            if report.key in blocks and report.outcome == RECEIVED:
                assert_whole(prefill, decode, blocks[report.key])
        outcomes += [report.outcome for report in decode.reports if report.key in blocks]
    assert len(outcomes) == ROUNDS * AT_ONCE
    assert {report.outcome for report in prefill.reports} == {SENT}
    assert outcomes.count(RECEIVED) > outcomes.count(FAILED) > 0
    wait_until(lambda: quiet(prefill) and quiet(decode), END_SECONDS)
    prefill.stop()
    decode.stop()
    injected = {one.fault for one in desk.injected()}
    assert injected == {*MESSAGE_FAULTS, *COPY_FAULTS}
    found = conform([tmp_path / "traces"])
    assert found.violation is None, found.violation.sentence
    assert found.transfers == ROUNDS * AT_ONCE


def order_faults(chance: random.Random, desk: FaultDesk, number: int) -> None:
    """One of each kind to each side, and a copy to go wrong on one of them."""
    for engine in "PD":
        for fault in MESSAGE_FAULTS:
            desk.order(engine, fault, seconds=chance.uniform(0.0, 1.0))
    desk.order(chance.choice("PD"), COPY_FAULTS[number % len(COPY_FAULTS)], seconds=chance.uniform(0.1, 0.4))


def blocks_of(slot: int) -> tuple[int, ...]:
    return tuple(range(slot * BLOCKS_EACH, (slot + 1) * BLOCKS_EACH))


def pull(key: TransferKey, prefill: Rank, decode: Rank, blocks: tuple[int, ...]) -> None:
    prefill.step(OfferBlocks(key=key, request_id="p", block_ids=blocks, prompt_tokens=PROMPT))
    decode.step(
        StartPull(
            key=key,
            request_id="d",
            remote=prefill.remote,
            block_ids=blocks,
            prompt_tokens=PROMPT,
            cached_tokens=0,
        )
    )


def push(key: TransferKey, prefill: Rank, decode: Rank, blocks: tuple[int, ...]) -> None:
    decode.step(AcceptPush(key=key, request_id="d", block_ids=blocks, prompt_tokens=PROMPT, cached_tokens=0))
    command = StartPush(key=key, request_id="p", remote=decode.remote, prompt_tokens=PROMPT, cached_tokens=0)
    prefill.step(command, chunks=(Chunk(key=key, block_ids=blocks[:2], end_token=6, last=False),))
    prefill.step(chunks=(Chunk(key=key, block_ids=blocks, end_token=PROMPT, last=True),))
    prefill.step(FinishPush(key))


def all_reported(rank: Rank, keys: frozenset[TransferKey]) -> bool:
    rank.outcomes()
    return keys <= {report.key for report in rank.reports}


def assert_whole(prefill: Rank, decode: Rank, blocks: tuple[int, ...]) -> None:
    """Blocks have the same numbers on both sides here."""
    assert (decode.cache[:, list(blocks)] == prefill.cache[:, list(blocks)]).all()


def quiet(rank: Rank) -> bool:
    """Every transfer of the rank, and every leg, is at its end."""
    movers, owners = rank.core.movers.values(), rank.core.owners.values()
    legs = [leg for mover in movers for leg in mover.legs.values()]
    return all(one.state == "FREED" for one in (*movers, *owners, *legs))
