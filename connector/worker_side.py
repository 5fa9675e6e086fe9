"""The worker side of the connector: a rank's caches, its engine, its side channel, its control thread."""

import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.distributed.parallel_state import get_dcp_group, get_pcp_group, get_pp_group, get_tp_group
from vllm.model_executor.models.utils import extract_layer_index
from vllm.utils.network_utils import get_ip

from ..protocol.effects import Report
from ..protocol.messages import Sender
from ..protocol.rank import RankCore
from ..protocol.shards import RankEntry, Shard
from .chaos.switch import ordered_faults
from .data_path import DataPath
from .extra_config import ExtraConfig
from .idle_wait import IdleWait
from .layout import (
    check_share,
    describe_layout,
    flat_tensors,
    memory_ranges,
    model_fingerprint,
    shard_of,
)
from .mooncake_engine import MooncakeEngine, default_protocol
from .push_feed import Layer
from .rank_loop import RankLoop, StepBegan, StepEnded
from .side_channel import SideChannel
from .staging import open_staging
from .stats import Observed
from .step import StepMetadata
from .trace import Tracer

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)

_OPEN = "open to whoever reaches that address (curve_keys closes it)"


@dataclass
class RankHandshake(KVConnectorHandshakeMetadata):
    """What a rank says of itself at its start; the scheduler side makes the engine's directory from all of
    them.
    """

    model: str
    layout: str
    entry: RankEntry


class WorkerSide:
    """What the connector does in a worker process."""

    def __init__(
        self, vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", config: ExtraConfig
    ) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._config = config
        self._engine: MooncakeEngine | None = None
        self._loop: RankLoop | None = None
        self._layer_numbers: dict[str, int] = {}
        self._device = torch.device("cpu")
        self._metadata: StepMetadata | None = None
        self._idle_wait = IdleWait()
        self.handshake: RankHandshake | None = None

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Take the caches, open the engine and the side channel, and start the rank's control thread."""
        tp, pcp, pp, dcp = get_tp_group(), get_pcp_group(), get_pp_group(), get_dcp_group()
        tp_rank, pcp_rank = tp.rank_in_group, pcp.rank_in_group
        shard = shard_of(kv_caches, self._vllm_config, self._kv_cache_config, tp_rank, pcp_rank)
        check_share(shard, dcp.world_size, dcp.rank_in_group, pcp.world_size, pcp_rank)
        self._layer_numbers = {name: extract_layer_index(name) for name in kv_caches}
        self._device = next(iter(kv_caches.values())).device
        rank = (pp.rank_in_group * pcp.world_size + pcp_rank) * tp.world_size + tp_rank
        entry = self._open(kv_caches, shard, rank)
        self.handshake = RankHandshake(
            model=model_fingerprint(self._vllm_config, self._kv_cache_config),
            layout=describe_layout(self._vllm_config, self._kv_cache_config),
            entry=entry,
        )

    def begin_step(self, metadata: StepMetadata) -> None:
        """A step begins: hand its commands on. Called by more than one hook, so the second call does
        nothing.
        """
        if self._loop is not None and metadata is not self._metadata:
            self._metadata = metadata
            self._loop.post(StepBegan(metadata))

    def layer_computed(self, layer_name: str) -> None:
        """This layer's cache is written, or will be once the device has come that far."""
        if self._loop is None or self._metadata is None or not self._metadata.chunks:
            return
        number = self._layer_numbers.get(layer_name)
        if number is None:
            return  # a layer without a cache of its own
        if self._device.type == "cpu":
            self._loop.post(Layer(number))
            return
        event: Any = torch.Event(self._device.type)
        event.record()
        self._loop.post(Layer(number, event.synchronize, event.query))

    def end_step(self) -> None:
        """All layers of the step are written."""
        if self._loop is not None and self._metadata is not None and self._metadata.chunks:
            self._loop.post(StepEnded())

    def take_reports(self) -> list[Report]:
        """Return what vLLM is to be told, once. A step that computes nothing waits for it a little."""
        if self._loop is None:
            return []
        reports = self._loop.take_reports(self._idle_wait.seconds(self._metadata))
        if reports:
            self._idle_wait.happened()
        return reports

    def take_stats(self) -> Observed | None:
        """Return what was counted since the last call; None if nothing was."""
        return None if self._loop is None else self._loop.take_stats()

    def shutdown(self) -> None:
        """End the copies, the thread, the sockets and the engine."""
        loop, self._loop = self._loop, None
        engine, self._engine = self._engine, None
        if loop is not None:
            loop.stop(self._config.shutdown_seconds)
        if engine is not None:
            engine.close()

    def _open(self, kv_caches: Mapping[str, torch.Tensor], shard: Shard, rank: int) -> RankEntry:
        config = self._config
        host = config.host or get_ip()
        engine = self._engine = MooncakeEngine(
            host,
            config.mooncake_protocol or default_protocol(),
            config.copy_timeout_seconds,
            config.quarantine_seconds,
            config.lease_seconds + config.stall_allowance_seconds,
        )
        # The engine rounds the copy time-out up, and the environment may set another one.
        timing = config.core_timing(engine.copy_timeout_seconds, engine.quarantine_seconds)
        ranges = memory_ranges(kv_caches)
        engine.register(ranges)
        tensors = () if self._device.type == "cpu" else flat_tensors(kv_caches)
        staging = open_staging(engine, ranges, config.staging_bytes, tensors)
        transfer_config = self._vllm_config.kv_transfer_config
        engine_id = (transfer_config and transfer_config.engine_id) or ""
        faults = ordered_faults(engine_id, rank)
        channel = (faults.channel if faults else SideChannel)(host, config.ports, config.keys())
        copier = faults.engine(engine) if faults else engine
        sender = Sender(engine_id, rank, secrets.token_hex(8))
        tracer = Tracer(config.trace_path, engine_id, rank, "rank")
        core = RankCore(timing, sender, tracer, staging.slots if staging else ())
        self._loop = RankLoop(
            core,
            channel,
            shard,
            lambda loop: DataPath(copier, loop.post, staging=staging, want_part=loop.want_part),
            tracer,
            staging,
        )
        self._loop.start()
        logger.log(
            logging.INFO if config.curve_keys else logging.WARNING,
            "rank %d of %s: data port %s, side channel on %s:%d, %s",
            rank,
            engine_id,
            engine.data_address,
            host,
            channel.port,
            f"closed to all without a key of {config.curve_keys}" if config.curve_keys else _OPEN,
        )
        return RankEntry(
            rank=rank,
            host=host,
            port=channel.port,
            incarnation=sender.incarnation,
            data_address=engine.data_address,
            shard=shard,
        )
