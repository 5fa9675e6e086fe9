"""The bench against servers that misbehave: whatever they do wrong is noticed, what the plan did is not."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from dfirst.connector.chaos import metrics
from dfirst.connector.chaos.accounts import Sums, sums_of
from dfirst.connector.chaos.bench import LAST_QUESTIONS, Bench
from dfirst.connector.chaos.follower import TraceFollower
from dfirst.connector.chaos.load import Pool
from dfirst.connector.chaos.orders import FaultDesk
from dfirst.connector.chaos.plan import MODES, Crowd, DeafPeer, Event, HangUp, Kill, Phase, Plan, Tamper
from dfirst.connector.launch import LaunchError

from .fake_set import FakeSet, fake_reference

SECONDS = 0.6


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSet]:
    monkeypatch.setattr("dfirst.connector.chaos.bench.GRACE_SECONDS", 0.1)
    fake = FakeSet()
    yield fake
    fake.stop()


def run(running: FakeSet, directory: Path, *events: Event, requests: int = 4) -> Bench:
    pool = Pool(1)
    references = [fake_reference(one.prompt, one.output_tokens) for one in pool.prompts]
    plan = Plan(1, SECONDS, tuple(sorted(events, key=lambda event: event.at)), (Phase(0.0, requests),))
    (directory / "traces").mkdir()

    async def drive() -> Bench:
        limits = httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(timeout=None, limits=limits) as client:
            bench = Bench(
                cast(Any, running),
                plan,
                pool,
                references,
                FaultDesk(directory / "faults"),
                TraceFollower(directory / "traces"),
                client,
            )
            await bench.run()
            return bench

    return asyncio.run(drive())


def sums(bench: Bench) -> Sums:
    return sums_of(bench.answers, bench.outages, frozenset(bench.abort_allowed))


def test_without_faults_all_is_right(running: FakeSet, tmp_path: Path) -> None:
    bench = run(running, tmp_path)
    assert {asked.verdict for asked in bench.answers} == {"right"}
    assert len(bench.answers) > len(MODES) * LAST_QUESTIONS
    assert len(running.router.asked) == len(bench.answers)


@pytest.mark.parametrize("misdeed", ["wrong", "error", "formless", "break off"])
def test_what_nobody_ordered_is_noticed(running: FakeSet, tmp_path: Path, misdeed: str) -> None:
    # Only a stream can break off; others answer as usual.
    running.router.misdeeds = [misdeed] * 20
    found = sums(run(running, tmp_path))
    assert bool(found.wrong) == (misdeed == "wrong")
    assert bool(found.unexcused) == (misdeed != "wrong")
    assert found.excused == 0


def test_a_killed_router_excuses_those_whom_it_cut_off_and_nobody_else(
    running: FakeSet, tmp_path: Path
) -> None:
    running.router.least_at_once = 9  # more than there ever are: all are held until it is killed
    bench = run(running, tmp_path, Kill(at=0.3, server="router"), requests=8)
    found = sums(bench)
    assert found.excused > 0
    assert (found.wrong, found.silent, found.unexcused) == ([], [], [])
    assert bench.injected == {"router killed": 1, "router restarted on the same port": 1}
    assert bench.outages.all[0].until is not None


def test_a_server_that_ends_by_itself_ends_the_run(running: FakeSet, tmp_path: Path) -> None:
    running.decode[0].dead = True
    with pytest.raises(LaunchError, match="decode ended by itself"):
        run(running, tmp_path)


def test_a_crowd_asks_for_more_at_once(running: FakeSet, tmp_path: Path) -> None:
    run(running, tmp_path, requests=1)
    # The last questions come in one go.
    usual = running.router.most_at_once
    assert usual <= len(MODES) * LAST_QUESTIONS
    (tmp_path / "crowd").mkdir()
    running.router.least_at_once = usual + 1
    run(running, tmp_path / "crowd", Crowd(at=0.2), requests=1)
    assert running.router.most_at_once > usual


def test_engines_are_sent_to_a_deaf_peer(running: FakeSet, tmp_path: Path) -> None:
    bench = run(running, tmp_path, DeafPeer(at=0.1, engine="decode"), DeafPeer(at=0.2, engine="prefill"))
    assert bench.injected == {"decode sent to a deaf peer": 1, "prefill sent to a deaf peer": 1}
    (to_decode,) = running.decode[0].asked
    assert to_decode["kv_transfer_params"]["do_remote_prefill"] is True
    (to_prefill,) = running.prefill[0].asked
    assert to_prefill["max_tokens"] == 1
    assert {asked.verdict for asked in bench.answers} == {"right"}


def test_a_fault_of_messages_becomes_an_order(running: FakeSet, tmp_path: Path) -> None:
    run(running, tmp_path, Tamper(at=0.1, engine="decode", fault="lost", of="DONE"))
    assert b'"fault":"lost","of":"DONE"' in (tmp_path / "faults" / "orders.jsonl").read_bytes()


def test_a_client_whose_transfer_never_comes_there_is_answered(running: FakeSet, tmp_path: Path) -> None:
    hang_up = HangUp(at=0.1, mode="layerwise", machine="decode_layerwise", state="PARKED", after=0.0)
    bench = run(running, tmp_path, hang_up)
    assert {asked.verdict for asked in bench.answers} == {"right"}
    assert bench.injected == {}


def test_blocks_are_counted(running: FakeSet) -> None:
    engine = running.decode[0]
    engine.usage, engine.preemptions = 3 / 96, 5

    async def read() -> tuple[int, int]:
        async with httpx.AsyncClient() as client:
            return (
                await metrics.blocks_in_use(client, engine.url),
                await metrics.preemptions(client, engine.url),
            )

    assert asyncio.run(read()) == (3, 5)
