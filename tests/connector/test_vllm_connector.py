"""The connector as vLLM finds, asks, starts and stops it."""

import logging
import sys
import threading
import time
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from dfirst.connector import vllm_connector, vllm_plugin, worker_side
from dfirst.connector.curve import make_keys
from dfirst.connector.idle_wait import LEAST_SECONDS, MOST_SECONDS, IdleWait
from dfirst.connector.rank_loop import StepBegan, StepEnded
from dfirst.connector.step import Chunk, StepMetadata
from dfirst.connector.vllm_connector import DFirstConnector
from dfirst.connector.worker_side import RankHandshake
from dfirst.protocol.commands import AcceptPush, OfferBlocks
from dfirst.protocol.effects import FAILED, RECEIVED, SENT, Report
from dfirst.protocol.messages import TransferKey
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole, supports_hma
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from .ranks import wait_until
from .vllm_scheduler import cache_config, vllm_config

KEY = TransferKey("t", 0)
LAYER = "model.layers.0.self_attn.attn"
TIMERS = {"hold_seconds": 0.5, "copy_timeout_seconds": 5.0, "quarantine_seconds": 1.0}
SLACK_SECONDS = 3.0
"""For a busy machine, and for the Mooncake engine's own end."""


def transfer_config(**changed: Any) -> KVTransferConfig:
    return KVTransferConfig(
        **{"kv_connector": "DFirstConnector", "kv_role": "kv_both", "engine_id": "E"} | changed
    )


def configured(settings: dict | None = None, **changed: Any) -> Any:
    """vLLM's configuration with this connector in it."""
    config = vllm_config()
    transfer = transfer_config(kv_connector_extra_config=settings or {}, **changed)
    names = ("model_config", "cache_config", "parallel_config", "scheduler_config")
    return SimpleNamespace(kv_transfer_config=transfer, **{name: getattr(config, name) for name in names})


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is alone; vLLM's process groups are not set up in a test."""
    group = SimpleNamespace(rank_in_group=0, world_size=1)
    monkeypatch.setattr(worker_side, "get_dcp_group", lambda: group)
    monkeypatch.setattr(worker_side, "get_pcp_group", lambda: group)
    monkeypatch.setattr(worker_side, "get_tp_group", lambda: group)
    monkeypatch.setattr(worker_side, "get_pp_group", lambda: group)
    monkeypatch.setattr(worker_side, "get_ip", lambda: "127.0.0.1")


def caches() -> dict[str, torch.Tensor]:
    return {LAYER: torch.zeros(40, 4, 16, 64)}


@pytest.fixture
def worker(one_rank: None) -> Iterator[DFirstConnector]:
    connector = DFirstConnector(configured(TIMERS), KVConnectorRole.WORKER, cache_config())
    connector.register_kv_caches(caches())
    yield connector
    connector.shutdown()


class FakeLoop:
    """A rank's control thread that only notes what it is given."""

    def __init__(self) -> None:
        self.posted: list[Any] = []
        self.reports: list[Report] = []
        self.patience_seconds = -1.0

    def post(self, item: Any) -> None:
        self.posted.append(item)

    def take_reports(self, patience_seconds: float) -> list[Report]:
        self.patience_seconds = patience_seconds
        return self.reports

    def stop(self, timeout_seconds: float) -> None:
        """Nothing runs."""


@pytest.fixture
def hooks(one_rank: None) -> tuple[DFirstConnector, FakeLoop]:
    """A worker's connector, and what its hooks hand on."""
    connector = DFirstConnector(configured(), KVConnectorRole.WORKER, cache_config())
    loop = FakeLoop()
    connector._worker._loop = loop
    connector._worker._layer_numbers = {LAYER: 0}
    return connector, loop


# Found


def test_vllm_finds_it_by_its_name_after_an_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(KVConnectorFactory._registry, "DFirstConnector", raising=False)
    (plugin,) = [one for one in entry_points(group="vllm.general_plugins") if one.name == "dfirst"]
    register = plugin.load()
    register()
    register()
    assert KVConnectorFactory.get_connector_class(transfer_config()) is DFirstConnector


def test_vllm_finds_it_by_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(KVConnectorFactory._registry, "DFirstConnector", raising=False)
    config = transfer_config(kv_connector_module_path="dfirst.connector")
    assert KVConnectorFactory.get_connector_class(config) is DFirstConnector


def test_it_works_with_the_hybrid_memory_allocator() -> None:
    assert supports_hma(DFirstConnector)


@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_an_unknown_setting_stops_the_start(role: KVConnectorRole) -> None:
    config = configured({"lease_second": 5}, kv_connector_module_path="dfirst.connector")
    with pytest.raises(ValueError, match=r"unknown field `lease_second`.*Known settings"):
        KVConnectorFactory.create_connector(config, role, cache_config())


def test_a_hook_of_the_other_side_is_a_mistake_that_is_said() -> None:
    scheduler = DFirstConnector(configured(), KVConnectorRole.SCHEDULER, cache_config())
    with pytest.raises(RuntimeError, match="a worker's hook"):
        scheduler.register_kv_caches({})
    worker = DFirstConnector(configured(), KVConnectorRole.WORKER, cache_config())
    with pytest.raises(RuntimeError, match="a scheduler's hook"):
        worker.on_new_request(SimpleNamespace())
    scheduler.shutdown()
    worker.shutdown()


# Asked before the start


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (None, None),
        (SimpleNamespace(), "LBHNC"),
        (SimpleNamespace(use_mla=False), "LBHNC"),
        (SimpleNamespace(use_mla=True), None),
    ],
)
def test_it_asks_for_heads_inside_blocks_where_a_model_has_several(model: Any, layout: str | None) -> None:
    config = SimpleNamespace(model_config=model, kv_transfer_config=transfer_config())
    assert DFirstConnector.get_required_kvcache_layout(config) == layout


@pytest.mark.parametrize(
    ("settings", "piecewise"),
    [({}, True), (None, True), ({"modes": ["layerwise"]}, True), ({"modes": ["blockwise"]}, False)],
)
def test_graphs_are_cut_between_layers_where_layers_are_pushed(settings: Any, piecewise: bool) -> None:
    assert DFirstConnector.requires_piecewise_for_cudagraph(settings) is piecewise


@pytest.mark.parametrize("settings", [{"lease_seconds": "5"}, {"curve_keys": "/nowhere"}, {"no_such": 1}])
def test_a_wrong_setting_shows_before_the_model_is_loaded(settings: dict) -> None:
    """Both are asked while vLLM makes its configuration, or before it measures memory."""
    with pytest.raises(ValueError, match=r"kv_connector_extra_config of DFirstConnector cannot be used: .+"):
        DFirstConnector.requires_piecewise_for_cudagraph(settings)
    config = SimpleNamespace(
        model_config=None, kv_transfer_config=transfer_config(kv_connector_extra_config=settings)
    )
    with pytest.raises(ValueError, match=r"kv_connector_extra_config of DFirstConnector cannot be used: .+"):
        DFirstConnector.get_required_kvcache_layout(config)


def test_a_missing_library_shows_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(RuntimeError, match=r"the Mooncake Transfer Engine cannot be loaded .*libibverbs1"):
        DFirstConnector.requires_piecewise_for_cudagraph({})


# Logging


@pytest.fixture
def loggers() -> Iterator[tuple[logging.Logger, logging.Logger]]:
    """dfirst's and vLLM's loggers as they are in a process of vLLM; restored afterwards."""
    both = logging.getLogger("dfirst"), logging.getLogger("vllm")
    before = [(list(one.handlers), one.level, one.propagate) for one in both]
    both[0].handlers, both[0].level, both[0].propagate = [], logging.NOTSET, True
    both[1].handlers, both[1].propagate = [logging.NullHandler()], False
    both[1].setLevel(logging.INFO)
    yield both
    for one, (handlers, level, propagate) in zip(both, before, strict=True):
        one.handlers, one.propagate = handlers, propagate
        one.setLevel(level)


def test_what_it_logs_goes_where_vllms_lines_go(loggers: tuple[logging.Logger, logging.Logger]) -> None:
    ours, theirs = loggers
    for _ in range(2):
        vllm_plugin.log_as_vllm_does()
    assert ours.handlers == theirs.handlers
    assert ours.level == theirs.level
    assert not ours.propagate
    assert logging.getLogger("dfirst.connector.rank_loop").isEnabledFor(logging.INFO)


def test_a_logger_that_the_user_has_set_up_stays(loggers: tuple[logging.Logger, logging.Logger]) -> None:
    ours, theirs = loggers
    ours.setLevel(logging.ERROR)
    vllm_plugin.log_as_vllm_does()
    assert (ours.handlers, ours.level) == ([], logging.ERROR)
    ours.setLevel(logging.NOTSET)
    theirs.handlers = []
    vllm_plugin.log_as_vllm_does()
    assert (ours.handlers, ours.propagate) == ([], True)


# A worker's steps


def metadata(*chunks: Chunk) -> StepMetadata:
    return StepMetadata(chunks=chunks)


CHUNK = Chunk(key=KEY, block_ids=(1,), end_token=16, last=True)


@pytest.mark.parametrize(
    "called",
    [["handle_preemptions"], ["bind_connector_metadata"], ["handle_preemptions", "bind_connector_metadata"]],
)
def test_a_step_begins_once_whichever_hook_a_runner_calls(
    hooks: tuple[DFirstConnector, FakeLoop], called: list[str]
) -> None:
    connector, loop = hooks
    for step in (metadata(), metadata()):
        for name in called:
            getattr(connector, name)(step)
    assert [type(item) for item in loop.posted] == [StepBegan, StepBegan]


def test_layers_are_handed_on_in_steps_that_push(hooks: tuple[DFirstConnector, FakeLoop]) -> None:
    connector, loop = hooks
    for step in (metadata(), metadata(CHUNK)):
        connector.bind_connector_metadata(step)
        connector.start_load_kv(None)
        connector.wait_for_layer_load(LAYER)
        connector.save_kv_layer(LAYER, torch.zeros(1), None)
        connector.save_kv_layer("a layer without a cache", torch.zeros(1), None)
        connector.wait_for_save()
        connector.clear_connector_metadata()
    kinds = [type(item).__name__ for item in loop.posted]
    assert kinds == ["StepBegan", "StepBegan", "Layer", "StepEnded"]
    assert isinstance(loop.posted[-1], StepEnded)


def test_metadata_of_another_connector_is_left_alone(hooks: tuple[DFirstConnector, FakeLoop]) -> None:
    connector, loop = hooks
    connector.bind_connector_metadata(KVConnectorMetadata())
    connector.handle_preemptions(KVConnectorMetadata())
    assert loop.posted == []


def test_outcomes_are_told_in_vllms_words(hooks: tuple[DFirstConnector, FakeLoop]) -> None:
    connector, loop = hooks
    loop.reports = [Report(KEY, outcome, outcome, "") for outcome in (SENT, RECEIVED, FAILED)]
    results = connector.get_transfer_results(set())
    assert results.finished_sending == {SENT}
    assert results.finished_recving == {RECEIVED, FAILED}
    assert results.failed_recving == {FAILED}
    assert connector.get_finished(set()) == ({SENT}, {RECEIVED, FAILED})


def test_only_a_step_that_may_wait_waits_for_outcomes(hooks: tuple[DFirstConnector, FakeLoop]) -> None:
    connector, loop = hooks
    connector.bind_connector_metadata(StepMetadata(may_wait=True))
    connector.get_transfer_results(set())
    assert LEAST_SECONDS <= loop.patience_seconds <= MOST_SECONDS
    connector.bind_connector_metadata(StepMetadata())
    connector.get_transfer_results(set())
    assert loop.patience_seconds == 0


def test_after_a_report_the_next_steps_wait_little_again(hooks: tuple[DFirstConnector, FakeLoop]) -> None:
    connector, loop = hooks
    now = [100.0]
    connector._on_worker._idle_wait = IdleWait(lambda: now[0])
    connector.bind_connector_metadata(StepMetadata(may_wait=True))
    waits = []
    for reports in ([], [Report(KEY, "one", RECEIVED, "")], []):
        now[0] += 0.06
        loop.reports = list(reports)
        connector.get_transfer_results(set())
        waits.append(loop.patience_seconds)
    assert waits[0] < waits[1] == MOST_SECONDS
    assert waits[2] < MOST_SECONDS


def test_before_the_caches_are_there_nothing_is_done() -> None:
    connector = DFirstConnector(configured(), KVConnectorRole.WORKER, cache_config())
    connector.bind_connector_metadata(metadata(CHUNK))
    connector.save_kv_layer(LAYER, torch.zeros(1), None)
    connector.wait_for_save()
    assert connector.get_handshake_metadata() is None
    assert connector.get_transfer_results(set()).finished_recving == set()
    connector.shutdown()


# A worker at work


def test_a_worker_says_where_it_is(worker: DFirstConnector) -> None:
    handshake = worker.get_handshake_metadata()
    assert isinstance(handshake, RankHandshake)
    assert handshake.entry.host == "127.0.0.1"
    assert handshake.entry.shard.layers == (0,)
    scheduler = DFirstConnector(configured(), KVConnectorRole.SCHEDULER, cache_config())
    scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): handshake})
    assert scheduler._scheduler._directory.ranks == (handshake.entry,)
    scheduler.shutdown()


def test_a_worker_says_whether_its_side_channel_is_open(
    one_rank: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[tuple[int, str]] = []
    logger = logging.getLogger("dfirst.connector.worker_side")
    monkeypatch.setattr(logger, "log", lambda level, text, *values: lines.append((level, text % values)))
    make_keys(tmp_path)
    for settings in ({}, {"curve_keys": str(tmp_path)}):
        connector = DFirstConnector(configured(TIMERS | settings), KVConnectorRole.WORKER, cache_config())
        connector.register_kv_caches(caches())
        port = connector.get_handshake_metadata().entry.port
        connector.shutdown()
        level, line = lines.pop()
        assert f"side channel on 127.0.0.1:{port}" in line
        if settings:
            assert (level, f"closed to all without a key of {tmp_path}" in line) == (logging.INFO, True)
        else:
            assert (level, "open to whoever reaches" in line) == (logging.WARNING, True)
    assert lines == []


def test_the_core_counts_with_the_engines_own_time_outs(worker: DFirstConnector) -> None:
    engine, core = worker._worker._engine, worker._worker._loop._core
    longest = engine.copy_timeout_seconds + engine.quarantine_seconds
    assert core.timing.copy_timeout_seconds == longest
    assert core.timing.hold_seconds == TIMERS["hold_seconds"]


def test_commands_reach_the_core_and_outcomes_come_back(worker: DFirstConnector) -> None:
    offer = OfferBlocks(key=KEY, request_id="r", block_ids=(1, 2), prompt_tokens=20)
    worker.bind_connector_metadata(StepMetadata(commands=(offer,)))
    wait_until(lambda: worker.get_transfer_results(set()).finished_sending == {"r"})


def test_a_command_that_fails_takes_no_other_one_with_it(
    worker: DFirstConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    logger = logging.getLogger("dfirst.connector.rank_loop")
    monkeypatch.setattr(logger, "exception", lambda text, *values: lines.append(text % values))
    broken: Any = AcceptPush(key=KEY, request_id="r", block_ids=None, prompt_tokens=None, cached_tokens=0)
    core = worker._worker._loop._core
    handle = core.handle
    monkeypatch.setattr(core, "handle", lambda event, now: 1 / 0 if event is broken else handle(event, now))
    offer = OfferBlocks(key=TransferKey("u", 0), request_id="q", block_ids=(1,), prompt_tokens=5)
    worker.bind_connector_metadata(StepMetadata(commands=(broken, offer)))
    wait_until(lambda: worker.get_transfer_results(set()).finished_sending == {"q"})
    assert lines == ["t.0: AcceptPush could not be carried out"]


def test_an_idle_rank_sleeps(worker: DFirstConnector, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = worker._worker._loop
    time.sleep(0.2)
    woken: list[float] = []
    tick = loop._core.tick
    monkeypatch.setattr(loop._core, "tick", lambda now: woken.append(now) or tick(now))
    time.sleep(1.0)
    assert woken == []


def test_an_end_is_quick_and_leaves_nothing(one_rank: None, tmp_path: Path) -> None:
    process = psutil.Process()
    connector = DFirstConnector(
        configured(TIMERS | {"trace_path": str(tmp_path)}), KVConnectorRole.WORKER, cache_config()
    )
    connector.register_kv_caches(caches())
    entry = connector.get_handshake_metadata().entry
    own = {entry.port, int(entry.data_address.rpartition(":")[2])}
    assert own <= listening(process)
    started = time.monotonic()
    connector.shutdown()
    connector.shutdown()
    assert time.monotonic() - started < SLACK_SECONDS
    assert not own & listening(process)
    assert not [one.name for one in threading.enumerate() if one.name.startswith("dfirst-rank")]
    assert not [one.path for one in process.open_files() if one.path.startswith(str(tmp_path))]
    connector.bind_connector_metadata(metadata(CHUNK))
    assert connector.get_transfer_results(set()).finished_recving == set()


def test_a_port_that_is_in_use_stops_the_start_and_leaves_nothing(
    worker: DFirstConnector, one_rank: None
) -> None:
    port = worker.get_handshake_metadata().entry.port
    second = DFirstConnector(
        configured(TIMERS | {"port_range": f"{port}"}), KVConnectorRole.WORKER, cache_config()
    )
    with pytest.raises(ValueError, match=f"all ports from {port} to {port} are in use"):
        second.register_kv_caches(caches())
    second.shutdown()


def listening(process: psutil.Process) -> set[int]:
    connections = process.net_connections("tcp")
    return {one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN}


def test_the_layout_that_is_asked_for_is_one_that_vllm_knows() -> None:
    from vllm.v1.kv_cache_layout import KVCacheLayout

    assert vllm_connector.WANTED_LAYOUT in KVCacheLayout.__members__
