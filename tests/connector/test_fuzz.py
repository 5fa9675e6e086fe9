"""Whatever a stranger sends to live ranks, they go on, and their memory and transfers stay as they are.

Real control threads and real sockets. ``make test-full`` sends a million messages.
"""

import importlib.util
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import zmq
from dfirst.connector.side_channel import HEADER
from dfirst.protocol import rank as rank_module
from dfirst.protocol.commands import AcceptPush, OfferBlocks, StartPull
from dfirst.protocol.effects import RECEIVED, SENT
from dfirst.protocol.messages import Layout, LayoutQuery, Query, Sender, TransferKey
from dfirst.protocol.shards import layout_digest
from dfirst.protocol.timing import Timing
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from .fuzzing import Frames, messages, variant
from .ranks import HOST, Rank, start_rank, wait_until

PATIENT = Timing(
    hold_seconds=3600.0,
    transfer_deadline_seconds=3600.0,
    query_timeout_seconds=600.0,
    tombstone_seconds=7200.0,
    copy_timeout_seconds=5.0,
    quarantine_seconds=0.5,
)
REMEMBERED = 3000
"""Transfers that a rank here remembers at most, so that its memory is as full as it gets early on."""
ASKED, LONE, PUSHED = (TransferKey(f"{name}-{random.SystemRandom().getrandbits(64):x}", 0) for name in "apl")
WAITS_MS = 20_000
LOOKS = 12
"""How often the memory is looked at, on the way."""
GROWTH_BYTES = 48 << 20
"""What a process's resident memory moves by while nothing is kept."""


class Stranger:
    """Sends to both ranks."""

    def __init__(self, ranks: tuple[Rank, ...]) -> None:
        self._context = zmq.Context()
        self._dealers = [self._connected(rank.directory.ranks[0].port) for rank in ranks]
        self.sent = 0

    def _connected(self, port: int) -> "zmq.Socket[bytes]":
        dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.SNDTIMEO, WAITS_MS)
        dealer.connect(f"tcp://{HOST}:{port}")
        return dealer

    def send(self, frames: Frames) -> None:
        for dealer in self._dealers:
            dealer.send_multipart(frames)
            while dealer.poll(0):
                dealer.recv_multipart()
        self.sent += len(self._dealers)

    def all_are_heard(self) -> bool:
        """Ask a question that is answered after everything before it; return whether it is."""
        question = LayoutQuery(sender=Sender("stranger", 0, "s"), digest=f"mark-{self.sent}")
        for dealer in self._dealers:
            dealer.send_multipart([HEADER, msgspec.msgpack.encode(question)])
            while True:
                if not dealer.poll(WAITS_MS):
                    return False
                answer = msgspec.msgpack.decode(dealer.recv_multipart()[-1])
                if answer["type"] == "LAYOUT" and answer["digest"] == question.digest:
                    msgspec.convert(answer, Layout)
                    break
        return True

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Rank, Rank]]:
    """Two engines with transfers in three states: one asked for early, one offered, one accepted."""
    monkeypatch.setattr(rank_module, "MAX_OWNER_TRANSFERS", REMEMBERED)
    prefill, decode = start_rank("P", PATIENT), start_rank("D", PATIENT, fill=0)
    pull = StartPull(
        key=ASKED, request_id="d", remote=prefill.remote, block_ids=(5, 6), prompt_tokens=8, cached_tokens=0
    )
    decode.step(
        pull, AcceptPush(key=PUSHED, request_id="l", block_ids=(7, 8), prompt_tokens=8, cached_tokens=0)
    )
    prefill.step(OfferBlocks(key=LONE, request_id="p", block_ids=(1, 2), prompt_tokens=8))
    wait_until(lambda: states(prefill, decode) == EXPECTED)
    yield prefill, decode
    prefill.stop()
    decode.stop()


EXPECTED = {
    ("P", ASKED): "PARKED",
    ("P", LONE): "METADATA_QUERY",
    ("D", ASKED): "METADATA_QUERY",
    ("D", PUSHED): "METADATA_QUERY",
}


def states(prefill: Rank, decode: Rank) -> dict[tuple[str, TransferKey], str]:
    """Return the states of the transfers that no stranger knows."""
    found = {}
    for name, rank in (("P", prefill), ("D", decode)):
        for key in (ASKED, LONE, PUSHED):
            entity: Any = rank.core.owners.get(key) or rank.core.movers.get(key)
            if entity is not None:
                found[name, key] = entity.state
    return found


def question(prefill: Rank, decode: Rank, transfer_id: str) -> Frames:
    """Return a QUERY for a transfer that nobody has heard of, right in all else: it is parked."""
    query = Query(
        sender=decode.core.sender,
        key=TransferKey(transfer_id, 0),
        sequence=1,
        target_incarnation=prefill.core.sender.incarnation,
        mode="blockwise",
        layout_digest=layout_digest(decode.directory),
        prompt_tokens=8,
        cached_tokens=0,
        tail_seconds=0.0,
    )
    return [HEADER, msgspec.msgpack.encode(query)]


def check_all_is_as_it_was(prefill: Rank, decode: Rank, stranger: Stranger) -> None:
    assert stranger.all_are_heard()
    assert states(prefill, decode) == EXPECTED
    assert prefill.core.owners[LONE].block_ids == (1, 2)
    assert not prefill.core.owners[LONE].leases
    assert prefill.outcomes() == decode.outcomes() == []
    assert not decode.cache.any()


def check_transfers_still_work(prefill: Rank, decode: Rank) -> None:
    prefill.step(OfferBlocks(key=ASKED, request_id="a", block_ids=(3, 4), prompt_tokens=8))
    wait_until(lambda: decode.outcomes() == [RECEIVED])
    assert np.array_equal(decode.cache[:, [5, 6]], prefill.cache[:, [3, 4]])
    wait_until(lambda: prefill.outcomes() == [SENT])


def flood(pair: tuple[Rank, Rank], examples: int, variants: int, caplog: pytest.LogCaptureFixture) -> None:
    """Let Hypothesis make so many messages, and send variants of each to both ranks."""
    prefill, decode = pair
    stranger = Stranger(pair)
    resident: list[int] = []
    caplog.set_level("ERROR")

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(messages([prefill.directory, decode.directory]), st.integers(0, 1 << 32))
    def send(message: dict[str, Any], seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(variants):
            stranger.send(variant(message, chance))
            stranger.send(question(prefill, decode, f"{chance.getrandbits(64):x}"))
        check_all_is_as_it_was(prefill, decode, stranger)
        if len(resident) < LOOKS * stranger.sent / (examples * variants * 2):
            resident.append(psutil.Process().memory_info().rss)

    try:
        send()
    finally:
        stranger.close()
    assert stranger.sent >= examples * variants * 2
    assert REMEMBERED >= len(prefill.core.owners) > min(REMEMBERED, examples * variants) / 2
    assert [record.getMessage() for record in caplog.records] == [], "nothing was an error of the rank's own"
    assert prefill.loop._thread.is_alive()
    assert decode.loop._thread.is_alive()
    settled = resident[len(resident) // 3]
    assert max(resident[len(resident) // 3 :]) - settled < GROWTH_BYTES
    check_transfers_still_work(prefill, decode)


def test_thousands_of_messages_change_nothing(
    pair: tuple[Rank, Rank], caplog: pytest.LogCaptureFixture
) -> None:
    flood(pair, 30, 30, caplog)


@pytest.mark.slow
@pytest.mark.full
def test_a_million_messages_change_nothing(pair: tuple[Rank, Rank], caplog: pytest.LogCaptureFixture) -> None:
    flood(pair, 400, 625, caplog)


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris is not installed")
def test_bytes_that_are_led_by_the_codes_own_branches_raise_nothing(tmp_path: Path) -> None:
    program = Path(__file__).with_name("fuzz_bytes.py")
    command = [sys.executable, str(program), "-runs=200000", "-seed=1", "-max_len=4096", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=900, env=os.environ, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "Done 200000 runs" in ended.stderr
