"""The scheduler side of the connector: translates between vLLM's scheduler and the scheduler core."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from ..protocol.commands import remote_ranks_of
from ..protocol.effects import FAILED, RECEIVED, SENT
from ..protocol.messages import TransferKey
from ..protocol.scheduler import (
    Allocation,
    Announcement,
    Finish,
    PrefillRequest,
    SchedulerCore,
    TransferRequest,
)
from ..protocol.shards import Directory, RankEntry, layout_digest
from .announcer import Announcer
from .extra_config import ExtraConfig
from .layout import parallel_sizes
from .stats import Observed, SchedulerStats
from .step import Chunk, StepMetadata
from .trace import Tracer
from .transfer_params import AnnouncedBlocks, NamedBlocks, OfferedBlocks, read_params

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

Blocks = TypeVar("Blocks", bound=NamedBlocks)
SCHEDULER = -1
"""In a trace: the place in the engine of what is no rank."""
COMPLETE = (
    RequestStatus.FINISHED_STOPPED,
    RequestStatus.FINISHED_LENGTH_CAPPED,
    RequestStatus.FINISHED_REPETITION,
)
"""Ends that come after the whole prompt was computed."""


class SchedulerSide:
    """What the connector does in vLLM's scheduler process."""

    def __init__(self, vllm_config: "VllmConfig", config: ExtraConfig) -> None:
        transfer_config = vllm_config.kv_transfer_config
        if transfer_config is None or transfer_config.engine_id is None:
            raise ValueError("DFirstConnector needs a kv_transfer_config with an engine_id")
        self._config = config
        self._parallel = vllm_config.parallel_config
        self._in_lockstep = self._parallel.data_parallel_size > 1
        """Other replicas may wait for each of this one's steps."""
        self._block_size = vllm_config.cache_config.block_size
        self._virtual_block_size = self._block_size * parallel_sizes(vllm_config).cp_size
        """Tokens that one block id stands for: each rank holds its share of them."""
        self._engine_id = transfer_config.engine_id
        self._produces = transfer_config.is_kv_producer
        self._consumes = transfer_config.is_kv_consumer
        tracer = Tracer(config.trace_path, self._engine_id, SCHEDULER, "scheduler")
        tracer.started("")
        self._core = SchedulerCore(tracer)
        self._tracer = tracer
        self._announcer = Announcer(config.metaserver_timeout_seconds)
        self._directory: Directory | None = None
        self._digest = ""
        self._untold: Directory | None = None
        self._stats = SchedulerStats()

    def set_ranks(self, model: str, layout: str, entries: Sequence[RankEntry]) -> None:
        """Take what every rank said of itself at its start."""
        ranks = tuple(sorted(entries, key=lambda entry: entry.rank))
        self._directory = Directory(engine_id=self._engine_id, model=model, layout=layout, ranks=ranks)
        self._digest = layout_digest(self._directory)
        self._untold = self._directory

    # Hooks, in the order in which a request meets them

    def on_new_request(self, request: "Request") -> None:
        """Note a request that takes part in a transfer."""
        raw = request.kv_transfer_params
        if not raw:
            return
        try:
            transfer = read_params(raw, request.request_id, request.num_prompt_tokens)
        except ValueError as error:
            logger.warning("request %s is computed here: %s", request.request_id, error)
            return
        if transfer is None or not self._takes_part(transfer, bool(raw.get("do_remote_prefill"))):
            return
        self._core.seen(transfer, decodes=bool(raw.get("do_remote_prefill")))

    def external_tokens(self, request: "Request", computed_tokens: int) -> int:
        """Return how many tokens are to come from the other engine. Has no side effect."""
        return self._core.external_tokens(request.request_id, computed_tokens)

    def allocated(self, request: "Request", blocks: "KVCacheBlocks", external_tokens: int) -> None:
        """Blocks were allocated: tell the ranks what to do with them."""
        allocation = Allocation(
            block_ids=tuple(blocks.get_block_ids()[0][: self._prompt_blocks(request)]),
            cached_tokens=request.num_prompt_tokens - external_tokens,
            external_tokens=external_tokens,
        )
        self._core.allocated(request.request_id, allocation)

    def build_metadata(self, output: SchedulerOutput) -> StepMetadata:
        """Return what the ranks are told with this step."""
        self._announce()
        directory, self._untold = self._untold, None
        return StepMetadata(
            directory=directory,
            commands=self._core.take_commands(),
            chunks=tuple(self._chunks(output)),
            preempted=frozenset(self._preempted(output)),
            may_wait=output.total_num_scheduled_tokens == 0 and not self._in_lockstep,
        )

    def output_arrived(self, output: KVConnectorOutput) -> None:
        """All ranks have reported on these requests."""
        failed = output.failed_recving or set()
        for request_id in output.finished_recving or ():
            self._reported(request_id, FAILED if request_id in failed else RECEIVED)
        for request_id in output.finished_sending or ():
            self._reported(request_id, SENT)

    def take_stats(self) -> Observed | None:
        """Return what was counted since the last call; None if nothing was."""
        return self._stats.take()

    def finished(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return whether the ranks keep the blocks, and what the router is told."""
        transfer = self._core.transfer(request.request_id)
        prompt_blocks = self._prompt_blocks(request)
        blocks = tuple(block_ids[0][:prompt_blocks]) if block_ids else ()
        complete = (
            request.status in COMPLETE
            and request.num_computed_tokens >= request.num_prompt_tokens
            and len(blocks) == prompt_blocks
        )
        held = self._core.finished(request.request_id, Finish(block_ids=blocks, prompt_computed=complete))
        if transfer is None or not held or transfer.mode != "blockwise":
            return held, None
        return held, msgspec.to_builtins(self._offered(transfer, blocks))

    def shutdown(self) -> None:
        """End the threads and close the trace."""
        self._announcer.close()
        self._tracer.close()

    # Helpers

    def _reported(self, request_id: str, outcome: str) -> None:
        transfer = self._core.transfer(request_id)
        if transfer is not None:
            self._stats.ended(transfer.mode, outcome)
        self._core.reported(request_id, outcome)

    def _prompt_blocks(self, request: "Request") -> int:
        return -(-request.num_prompt_tokens // self._virtual_block_size)

    def _takes_part(self, transfer: TransferRequest, decodes: bool) -> bool:
        role = self._consumes if decodes else self._produces
        reason = ""
        if not role:
            side = "decodes for others" if decodes else "prefills for others"
            reason = f"this engine's kv_role says that it never {side}"
        elif transfer.mode not in self._config.modes:
            reason = f"it asks for {transfer.mode}, and modes is {', '.join(self._config.modes)}"
        elif self._directory is None:
            reason = "the ranks have not said where they are"
        elif not decodes and self._core.in_use(PrefillRequest(self._core, transfer)):
            # The ranks hold one request's blocks for a transfer; those of a second would never be reported.
            reason = f"another request takes part in transfer {transfer.key.transfer_id}"
        if reason:
            logger.warning("request %s is computed here: %s", transfer.request_id, reason)
        return not reason

    def _chunks(self, output: SchedulerOutput) -> list[Chunk]:
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        state = output.kv_connector_block_state
        chunks = []
        for request_id, scheduled in output.num_scheduled_tokens.items():
            transfer = self._core.pushing(request_id)
            before = computed.get(request_id, 0)
            if transfer is None or state is None or before >= transfer.prompt_tokens:
                continue
            end = min(before + scheduled, transfer.prompt_tokens)
            chunks.append(
                Chunk(
                    key=transfer.key,
                    block_ids=tuple(state.resolve_block_ids(request_id)[0]),
                    end_token=end,
                    last=end == transfer.prompt_tokens,
                )
            )
        return chunks

    def _preempted(self, output: SchedulerOutput) -> list[TransferKey]:
        # A request that is resumed has lost its blocks, whether or not its preemption was said before.
        lost = set(output.preempted_req_ids or ()) | set(output.scheduled_cached_reqs.resumed_req_ids)
        transfers = [self._core.pushing(request_id) for request_id in lost]
        return [transfer.key for transfer in transfers if transfer is not None]

    def _announce(self) -> None:
        for announcement in self._core.take_announcements():
            self._announcer.announce(
                announcement.request.metaserver,
                self._announced(announcement),
                announcement.request.request_id,
            )
        for request_id, reason in self._announcer.take_failures():
            self._core.announce_failed(request_id, reason)

    def _own(self) -> Directory:
        if self._directory is None:
            raise RuntimeError("the ranks have not said where they are")
        return self._directory

    def _named(self, kind: type[Blocks], key: TransferKey, blocks: tuple[int, ...], **own: Any) -> Blocks:
        ranks = remote_ranks_of(self._own())
        return kind(
            transfer_id=key.transfer_id,
            attempt=key.attempt,
            remote_engine_id=self._engine_id,
            remote_host=ranks[0].host,
            remote_port=ranks[0].port,
            remote_ranks=ranks,
            layout_digest=self._digest,
            remote_block_ids=(blocks,),
            **own,
        )

    def _offered(self, transfer: TransferRequest, blocks: tuple[int, ...]) -> OfferedBlocks:
        return self._named(
            OfferedBlocks,
            transfer.key,
            blocks,
            do_remote_prefill=True,
            do_remote_decode=False,
            remote_request_id=transfer.request_id,
            remote_num_tokens=transfer.prompt_tokens,
            tp_size=self._parallel.tensor_parallel_size,
            pp_size=self._parallel.pipeline_parallel_size,
            dcp_size=self._parallel.decode_context_parallel_size,
            transfer_mode="pull",
        )

    def _announced(self, announcement: Announcement) -> AnnouncedBlocks:
        request = announcement.request
        return self._named(
            AnnouncedBlocks,
            request.key,
            announcement.block_ids,
            do_remote_prefill=False,
            do_remote_decode=True,
            request_id=request.request_id,
            remote_block_size=self._block_size,
            remote_cached_tokens=announcement.cached_tokens,
            remote_tp_size=self._parallel.tensor_parallel_size,
            remote_pcp_size=self._parallel.prefill_context_parallel_size,
            remote_dcp_size=self._parallel.decode_context_parallel_size,
        )
