"""``DFirstConnector``: vLLM's connector interface, and nothing else. The two sides behind it do the work."""

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from ..protocol.effects import FAILED, RECEIVED, SENT
from .extra_config import ExtraConfig, decode_extra_config
from .mooncake_engine import check_library
from .scheduler_side import SchedulerSide
from .step import StepMetadata
from .vllm_plugin import log_as_vllm_does
from .vllm_stats import TransferMetrics, TransferStats
from .worker_side import RankHandshake, WorkerSide

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

# And not its subclass: what a rank is made of runs without vLLM too, which takes ten seconds to load.
KVConnectorMetadata.register(StepMetadata)

WANTED_LAYOUT = "LBHNC"
"""A layer's blocks outside its heads: a head's slab of a block is one run, so that unequal TP moves few
runs.
"""


def check_start(extra_config: Mapping[str, Any] | None) -> ExtraConfig:
    """Return the settings; raise with one sentence if they, or this host, would stop the start later on.

    vLLM asks for a connector's wishes early, as a rule before it loads the model: what is wrong shows there.
    """
    config = decode_extra_config(extra_config)
    check_library()
    return config


class DFirstConnector(KVConnectorBase_V1, SupportsHMA):
    """Moves the KV cache from prefill to decode engines, block-wise or layer-wise, as each request asks."""

    def __init__(
        self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ) -> None:
        log_as_vllm_does()
        super().__init__(vllm_config, role, kv_cache_config)
        config = decode_extra_config(self._kv_transfer_config.kv_connector_extra_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(vllm_config, config)
        else:
            self._worker = WorkerSide(vllm_config, kv_cache_config, config)

    @property
    def _on_scheduler(self) -> SchedulerSide:
        if self._scheduler is None:
            raise RuntimeError("a scheduler's hook was called on a worker's connector")
        return self._scheduler

    @property
    def _on_worker(self) -> WorkerSide:
        if self._worker is None:
            raise RuntimeError("a worker's hook was called on a scheduler's connector")
        return self._worker

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: "VllmConfig") -> str | None:
        """Ask for blocks outside heads; MLA has one head, and its backends choose."""
        if vllm_config.kv_transfer_config is not None:
            check_start(vllm_config.kv_transfer_config.kv_connector_extra_config)
        model = vllm_config.model_config
        return None if model is None or getattr(model, "use_mla", False) else WANTED_LAYOUT

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any] | None) -> bool:
        """A layer-wise push runs between the layers, which a whole captured graph has no room for."""
        return "layerwise" in check_start(extra_config).modes

    # Scheduler side

    def on_new_request(self, request: "Request") -> None:
        self._on_scheduler.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        tokens = self._on_scheduler.external_tokens(request, num_computed_tokens)
        return tokens, tokens > 0

    def get_loaded_kv_cache_group_ids(self, request: "Request") -> tuple[int, ...]:
        """A transfer brings the request's own blocks, of every group."""
        return tuple(self._kv_cache_config.transfer_group_ids)

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        self._on_scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        return self._on_scheduler.build_metadata(scheduler_output)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        self._on_scheduler.output_arrived(connector_output)

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._on_scheduler.finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._on_scheduler.finished(request, block_ids)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        handshakes = [one for one in metadata.values() if isinstance(one, RankHandshake)]
        if handshakes:
            entries = [one.entry for one in handshakes]
            self._on_scheduler.set_ranks(handshakes[0].model, handshakes[0].layout, entries)

    # Worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._on_worker.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._on_worker.handshake

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._begin_step(connector_metadata)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        self._begin_step(kv_connector_metadata)

    def _begin_step(self, metadata: KVConnectorMetadata) -> None:
        # Model runners call either hook or both, before the step's forward pass.
        if isinstance(metadata, StepMetadata):
            self._on_worker.begin_step(metadata)

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        """Loads run on their own from the step's beginning on; none is started here."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are between steps: no layer waits for one."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: "AttentionMetadata", **kwargs: Any
    ) -> None:
        self._on_worker.layer_computed(layer_name)

    def wait_for_save(self) -> None:
        """Say that all layers are written; nothing is waited for (rule L2)."""
        self._on_worker.end_step()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = KVConnectorTransferResults()
        reported: dict[str, Callable[[str], None]] = {
            SENT: results.finished_sending.add,
            RECEIVED: results.finished_recving.add,
            FAILED: results.finished_recving.add,
        }
        for report in self._on_worker.take_reports():
            reported[report.outcome](report.request_id)
            if report.outcome == FAILED:
                results.failed_recving.add(report.request_id)
        return results

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending, results.finished_recving

    # Both sides, and the process that serves /metrics

    def get_kv_connector_stats(self) -> TransferStats | None:
        side = self._on_scheduler if self._worker is None else self._worker
        observed = side.take_stats()
        return None if observed is None else TransferStats.of(observed)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TransferStats | None:
        return TransferStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> TransferMetrics:
        return TransferMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self._scheduler is not None:
            self._scheduler.shutdown()
        if self._worker is not None:
            self._worker.shutdown()
