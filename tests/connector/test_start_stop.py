"""Starts that cannot work stop with one sentence; an end in good order tells the peers and leaves nothing."""

import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from dfirst.connector.curve import make_keys, read_engine_keys
from dfirst.connector.mooncake_engine import MooncakeEngine
from dfirst.connector.step import Chunk
from dfirst.protocol.commands import AcceptPush, OfferBlocks, StartPull, StartPush
from dfirst.protocol.effects import FAILED
from dfirst.protocol.messages import TransferKey
from dfirst.protocol.timing import Timing

from .ranks import HOST, Rank, start_rank, wait_until

PATIENT = Timing(lease_seconds=60.0, copy_timeout_seconds=5.0, quarantine_seconds=0.5)
"""By these times nobody notices within the test that a peer has gone: it has to be told."""
SOON_SECONDS = 5.0
KEY = TransferKey("ending", 0)


@pytest.fixture
def pair() -> Iterator[tuple[Rank, Rank]]:
    prefill, decode = start_rank("P", PATIENT), start_rank("D", PATIENT, fill=0)
    yield prefill, decode
    prefill.stop()
    decode.stop()


def pull(prefill: Rank) -> StartPull:
    return StartPull(
        key=KEY, request_id="d", remote=prefill.remote, block_ids=(5, 6), prompt_tokens=8, cached_tokens=0
    )


def reason_of_the_refusal(prefill: Rank, decode: Rank) -> str:
    prefill.step(OfferBlocks(key=KEY, request_id="p", block_ids=(1, 2), prompt_tokens=8))
    decode.step(pull(prefill))
    wait_until(lambda: decode.outcomes() == [FAILED])
    [report] = decode.reports
    assert not decode.cache.any()
    return report.reason


# What cannot work together is said at the first hand-shake


def test_engines_with_different_models_are_refused_in_one_sentence(pair: tuple[Rank, Rank]) -> None:
    other = start_rank("Q", PATIENT, model="another model")
    reason = reason_of_the_refusal(other, pair[1])
    other.stop()
    assert "they serve different models (another model and m)" in reason
    assert "prefill engine Q (2 heads) and decode engine D (2 heads) cannot work together" in reason
    assert "\n" not in reason


def test_two_engines_with_one_id_are_refused_in_one_sentence(pair: tuple[Rank, Rank]) -> None:
    other = start_rank("D", PATIENT)
    reason = reason_of_the_refusal(other, pair[1])
    other.stop()
    assert "both are called D: give each its own engine_id" in reason


def test_memory_that_cannot_be_registered_stops_the_start_in_one_sentence() -> None:
    engine = MooncakeEngine(HOST, "tcp", 5.0, 0.5)
    with pytest.raises(RuntimeError, match=r"Mooncake refused to register 1 ranges of 0 bytes .*ulimit -l"):
        engine.register([(0, 0)])
    engine.close()


# An end in good order


def test_a_reader_that_stops_tells_the_owner(pair: tuple[Rank, Rank]) -> None:
    prefill, decode = pair
    decode.step(pull(prefill))
    wait_until(lambda: KEY in prefill.core.owners and bool(prefill.core.owners[KEY].parked))
    started = time.monotonic()
    decode.stop()
    wait_until(
        lambda: [lease.state for lease in prefill.core.owners[KEY].leases.values()] == ["STOPPED"],
        SOON_SECONDS,
    )
    assert time.monotonic() - started < SOON_SECONDS


def test_an_owner_that_stops_tells_its_writers(pair: tuple[Rank, Rank]) -> None:
    prefill, decode = pair
    decode.step(AcceptPush(key=KEY, request_id="d", block_ids=(5, 6), prompt_tokens=8, cached_tokens=0))
    begun = Chunk(key=KEY, block_ids=(1,), end_token=4, last=False)
    push = StartPush(key=KEY, request_id="p", remote=decode.remote, prompt_tokens=8, cached_tokens=0)
    prefill.step(push, chunks=(begun,))
    wait_until(lambda: KEY in prefill.core.movers and prefill.core.movers[KEY].state == "PUSHES_PENDING")
    decode.stop()
    wait_until(lambda: prefill.core.movers[KEY].state in ("FAILED", "CANCELLING"), SOON_SECONDS)
    assert "this engine stops" in prefill.core.movers[KEY].reason


def test_a_writer_that_stops_tells_the_owner(pair: tuple[Rank, Rank]) -> None:
    prefill, decode = pair
    decode.step(AcceptPush(key=KEY, request_id="d", block_ids=(5, 6), prompt_tokens=8, cached_tokens=0))
    push = StartPush(key=KEY, request_id="p", remote=decode.remote, prompt_tokens=8, cached_tokens=0)
    prefill.step(push, chunks=(Chunk(key=KEY, block_ids=(1,), end_token=4, last=False),))
    wait_until(lambda: KEY in decode.core.owners and decode.core.owners[KEY].state == "PUSHES_PENDING")
    prefill.stop()
    wait_until(lambda: decode.outcomes() == [FAILED], SOON_SECONDS)


def test_an_end_with_open_transfers_leaves_no_thread_socket_or_file(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    keys = read_engine_keys(str(tmp_path / "keys"))
    one_of_each(tmp_path)  # what the first start loads for good is loaded by now
    threads, files = set(threading.enumerate()), open_files()
    prefill = start_rank("P", PATIENT, trace=str(tmp_path / "traces"), keys=keys)
    decode = start_rank("D", PATIENT, trace=str(tmp_path / "traces"), keys=keys)
    decode.step(pull(prefill))
    wait_until(lambda: KEY in prefill.core.owners and bool(prefill.core.owners[KEY].parked))
    prefill.stop()
    decode.stop()
    wait_until(lambda: set(threading.enumerate()) <= threads, SOON_SECONDS)
    wait_until(lambda: open_files() <= files, SOON_SECONDS)


def open_files() -> Counter[str]:
    """Count what this process has open, by kind or path. Locks on data ports that were used are kept for as
    long as a copy of a peer may still be on its way to them (rule R6).
    """
    found: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            target = os.readlink(f"/proc/self/fd/{number}")
            if "dfirst-ports" not in target:
                found[target.partition(":")[0]] += 1
    return found


def one_of_each(tmp_path: Path) -> None:
    start_rank("first", PATIENT, trace=str(tmp_path / "traces")).stop()
