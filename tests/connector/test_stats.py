"""What is counted of transfers, from the ranks to the lines of ``/metrics``."""

import pickle
from collections import Counter as Counted
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from dfirst.connector.stats import (
    COUNTERS,
    EXPIRIES,
    Observed,
    RankStats,
    expiries,
    leases_now,
)
from dfirst.connector.trace import Tracer
from dfirst.connector.vllm_connector import DFirstConnector
from dfirst.connector.vllm_stats import TransferMetrics, TransferStats
from dfirst.protocol.commands import OfferBlocks, StartPull
from dfirst.protocol.effects import FAILED, RECEIVED, SENT
from dfirst.protocol.messages import TransferKey
from dfirst.protocol.specification import load_machine, machine_names
from dfirst.protocol.timing import Timing
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from vllm.v1.outputs import KVConnectorOutput

from .ranks import Rank, start_rank, wait_until
from .vllm_scheduler import Engine

TIMING = Timing(hold_seconds=1.0, query_retry_seconds=0.2, copy_timeout_seconds=5.0, quarantine_seconds=0.5)
KEY = TransferKey("counted", 0)
METASERVER = {"do_remote_prefill": True, "metaserver": "http://router/m", "transfer_id": "t", "attempt": 0}
PREFILL_LABELS: list[object] = ["a model", "0"]


@pytest.fixture
def pair() -> Iterator[tuple[Rank, Rank]]:
    prefill, decode = start_rank("P", TIMING), start_rank("D", TIMING, fill=0)
    yield prefill, decode
    prefill.stop()
    decode.stop()


def said(rank: Rank) -> Observed:
    return rank.loop.take_stats() or Observed()


def offer(name: str = KEY.transfer_id) -> OfferBlocks:
    return OfferBlocks(key=TransferKey(name, 0), request_id=name, block_ids=(1, 2), prompt_tokens=8)


def test_a_pull_is_counted_where_it_is_copied_and_its_lease_where_it_was_lent(
    pair: tuple[Rank, Rank],
) -> None:
    prefill, decode = pair
    prefill.step(offer())
    decode.step(
        StartPull(
            key=KEY, request_id="d", remote=prefill.remote, block_ids=(5, 6), prompt_tokens=8, cached_tokens=0
        )
    )
    total = Observed()
    wait_until(lambda: decode.outcomes() == [RECEIVED])
    wait_until(lambda: prefill.outcomes() == [SENT])
    total.add(said(decode))
    assert total.counts["bytes"] == {"blockwise": decode.cache[:, [5, 6]].nbytes}
    assert len(total.copy_seconds["blockwise"]) == 1
    assert said(decode).empty, "each number is said once"
    rows = dict(prefill.core.observer.rows)
    assert sum(rows[row.id] for row in load_machine("owner_leg").transitions if row.id in rows) > 0
    assert leases_now(rows) == 0
    assert "bytes" not in said(prefill).counts


def test_blocks_that_nobody_asked_for_are_an_expiry(pair: tuple[Rank, Rank]) -> None:
    prefill, _ = pair
    prefill.step(offer())
    wait_until(lambda: prefill.outcomes() == [SENT])
    assert said(prefill).counts["expiries"] == {"hold": 1}


def test_a_lease_is_counted_as_long_as_it_runs() -> None:
    lend = [row for row in load_machine("owner_leg").transitions if row.target == "LENT" != row.source]
    end = [row for row in load_machine("owner_leg").transitions if row.source == "LENT" and row.target != "="]
    assert lend
    assert end
    tracer = Tracer("", "P", 3, "rank")
    stats = RankStats(3, tracer, {}, {})
    tracer.rows[lend[0].id] += 2
    assert stats.take().leases == {"3": 2}
    assert stats.take() is None
    tracer.rows[end[0].id] += 1
    assert stats.take().leases == {"3": 1}


def test_every_time_out_that_is_counted_is_one_of_the_spec() -> None:
    events = {row.event for name in machine_names() for row in load_machine(name).transitions}
    assert set(EXPIRIES) <= events
    one_of_each = {row.id: 1 for name in machine_names() for row in load_machine(name).transitions}
    assert set(expiries(one_of_each)) == set(EXPIRIES.values())


def test_events_without_a_row_and_problems_of_the_channel_are_counted() -> None:
    tracer = Tracer("", "P", 0, "rank")
    core: Counted[str] = Counted(unknown_leg=1, received_Query=9)
    channel: Counted[str] = Counted(undecodable=2)
    stats = RankStats(0, tracer, core, channel)
    tracer.ignored, tracer.unexpected["x.y.z"] = 3, 1
    counts = stats.take().counts
    assert counts["events"] == {"ignored": 3, "unexpected": 1}
    assert counts["channel"] == {"unknown_leg": 1, "undecodable": 2}
    channel["undecodable"] += 5
    assert stats.take().counts == {"channel": {"undecodable": 5}}


@pytest.mark.parametrize("outcome", [RECEIVED, FAILED])
def test_the_scheduler_counts_an_end_by_mode_and_outcome(outcome: str) -> None:
    engine = Engine()
    engine.add("r", range(1, 40), METASERVER)
    engine.step()
    failed = {"r"} if outcome == FAILED else set()
    engine.side.output_arrived(KVConnectorOutput(finished_recving={"r"}, failed_recving=failed))
    assert engine.side.take_stats().counts == {"transfers": {f"layerwise/{outcome}": 1}}
    assert engine.side.take_stats() is None


def test_what_ranks_say_is_added_up() -> None:
    one = TransferStats.of(Observed(counts={"bytes": {"blockwise": 5}}, leases={"0": 2}))
    other = TransferStats.of(
        Observed(counts={"bytes": {"blockwise": 7}}, copy_seconds={"blockwise": [0.5, 1.5]}, leases={"1": 1})
    )
    total = pickle.loads(pickle.dumps(one)).aggregate(pickle.loads(pickle.dumps(other)))
    assert not total.is_empty()
    assert total.reduce() == {
        "bytes blockwise": 12,
        "copies blockwise": 2,
        "mean copy seconds blockwise": 1.0,
        "leases": 3,
    }
    total.reset()
    assert total.is_empty()


def shown(*said_by_engines: Observed) -> str:
    """Return what ``/metrics`` shows after that, carried as vLLM carries it."""
    registry = CollectorRegistry()
    types = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    config: Any = SimpleNamespace(kv_transfer_config=None)
    metrics = DFirstConnector.build_prom_metrics(config, types, ["model_name", "engine"], {0: PREFILL_LABELS})
    assert isinstance(metrics, TransferMetrics)
    for observed in said_by_engines:
        carried = msgspec.msgpack.decode(msgspec.msgpack.encode(TransferStats.of(observed).to_dict()))
        metrics.observe(carried, 0)
        assert not DFirstConnector.build_kv_connector_stats(carried).is_empty()
    return generate_latest(registry).decode()


def test_metrics_show_what_was_said() -> None:
    text = shown(
        Observed(counts={"transfers": {"layerwise/failed": 1}, "bytes": {"blockwise": 10}}, leases={"0": 2}),
        Observed(counts={"bytes": {"blockwise": 5}}, copy_seconds={"blockwise": [0.002]}, leases={"1": 1}),
    )
    where = 'engine="0"'
    what = 'model_name="a model"'
    assert f'dfirst_transfers_total{{{where},mode="layerwise",{what},outcome="failed"}} 1.0' in text
    assert f'dfirst_copied_bytes_total{{{where},mode="blockwise",{what}}} 15.0' in text
    assert f'dfirst_copy_seconds_bucket{{{where},le="0.003",mode="blockwise",{what}}} 1.0' in text
    assert f"dfirst_leases{{{where},{what}}} 3.0" in text


def test_every_counter_is_shown_with_its_labels() -> None:
    counts = {name: {"/".join(spec.labels): 1} for name, spec in COUNTERS.items()}
    text = shown(Observed(counts=counts))
    for spec in COUNTERS.values():
        assert f"{spec.name}_total{{" in text
        assert all(f'{label}="{label}"' in text for label in spec.labels)
