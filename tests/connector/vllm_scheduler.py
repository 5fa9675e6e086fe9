"""A real vLLM scheduler with the connector in it, and nothing behind: the test says what the ranks report.

The request's prompts are numbers, the model answers with one token for ever, and a step is one call.
"""

import copy
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from dfirst.connector.demo_model import make_model
from dfirst.connector.scheduler_side import SchedulerSide
from dfirst.connector.step import StepMetadata
from dfirst.connector.transfer_params import AnnouncedBlocks
from dfirst.connector.worker_side import RankHandshake
from dfirst.protocol.commands import Command
from dfirst.protocol.shards import RankEntry, Shard
from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_SIZE = 16
CHUNK_TOKENS = 64
BLOCKS = 40
ANSWER = 7
ENTRY = RankEntry(
    rank=0,
    host="10.0.0.7",
    port=4321,
    incarnation="i0",
    data_address="10.0.0.7:9",
    shard=Shard(total_kv_heads=1, first_kv_head=0, kv_head_count=1, block_size=BLOCK_SIZE, regions=()),
)


class FakeAnnouncer:
    """Notes what would be posted; the test says what failed."""

    def __init__(self) -> None:
        self.posted: list[tuple[str, AnnouncedBlocks]] = []
        self.failures: list[tuple[str, str]] = []

    def announce(self, url: str, blocks: AnnouncedBlocks, request_id: str) -> None:
        self.posted.append((url, blocks))

    def take_failures(self) -> list[tuple[str, str]]:
        failures, self.failures = self.failures, []
        return failures

    def close(self) -> None:
        """Nothing runs."""


class Engine:
    """The scheduler of one engine."""

    def __init__(
        self,
        role: str = "kv_both",
        policy: str = "recompute",
        ranks_known: bool = True,
        dcp: int = 1,
        dp: int = 1,
        **settings: Any,
    ) -> None:
        transfer = KVTransferConfig(
            kv_connector="DFirstConnector",
            kv_connector_module_path="dfirst.connector",
            kv_role=role,  # type: ignore[arg-type]
            engine_id="E",
            kv_load_failure_policy=policy,  # type: ignore[arg-type]
            kv_connector_extra_config=settings,
        )
        config = copy.copy(vllm_config())
        config.kv_transfer_config = transfer
        config.parallel_config = copy.copy(config.parallel_config)
        config.parallel_config.decode_context_parallel_size = dcp
        config.parallel_config.data_parallel_size = dp
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=cache_config(),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_SIZE * dcp,
        )
        connector = self.scheduler.connector
        if ranks_known:
            connector.set_xfer_handshake_metadata_pp_aware({(0, 0): RankHandshake("m", "one rank", ENTRY)})
        self.side: SchedulerSide = connector._scheduler
        self.announcer = FakeAnnouncer()
        self.side._announcer = self.announcer  # type: ignore[assignment]
        self.hasher = get_request_block_hasher(BLOCK_SIZE * dcp, sha256)
        self.chunks: list = []
        """Of the last step."""
        self.preempted: frozenset = frozenset()
        self.may_wait = False
        self.offered: dict[str, dict | None] = {}
        """What the router is told of each finished request."""
        self.free_at_start = self.free_blocks

    @property
    def free_blocks(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def add(
        self, name: str, prompt: Iterable[int], params: dict | None = None, max_tokens: int = 1
    ) -> Request:
        """A client asks."""
        sampling = SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=True,
            extra_args=None if params is None else {"kv_transfer_params": params},
        )
        request = Request(name, list(prompt), sampling, None, block_hasher=self.hasher)
        self.scheduler.add_request(request)
        return request

    def step(
        self, received: Iterable[str] = (), failed: Iterable[str] = (), sent: Iterable[str] = ()
    ) -> list[Command]:
        """Run a step at whose end the ranks report; return the commands that it brought to them."""
        output = self.scheduler.schedule()
        metadata = output.kv_connector_metadata
        assert isinstance(metadata, StepMetadata)
        self.chunks, self.preempted = list(metadata.chunks), metadata.preempted
        self.may_wait = metadata.may_wait
        reports = KVConnectorOutput(
            finished_recving={*received, *failed}, finished_sending=set(sent), failed_recving=set(failed)
        )
        outputs = self.scheduler.update_from_output(output, self._computed(output, reports))
        for one in (core_output for answer in outputs.values() for core_output in answer.outputs):
            if one.finish_reason is not None:
                self.offered[one.request_id] = one.kv_transfer_params
        return list(metadata.commands)

    def abort(self, name: str) -> None:
        """The client hangs up."""
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def blocks(self, name: str) -> tuple[int, ...]:
        """What vLLM has allocated for a request."""
        return tuple(self.scheduler.kv_cache_manager.get_block_ids(name)[0])

    def assert_nothing_is_left(self) -> None:
        """Every block is free, and neither vLLM nor the connector remembers a request."""
        self.step()
        assert self.free_blocks == self.free_at_start
        assert self.scheduler.requests == {}
        assert self.side._core.requests == {}

    def _computed(self, output: SchedulerOutput, reports: KVConnectorOutput) -> ModelRunnerOutput:
        names = list(output.num_scheduled_tokens)
        requests = [self.scheduler.requests[name] for name in names]
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[[] if one.is_prefill_chunk else [ANSWER] for one in requests],
            kv_connector_output=reports,
        )


@cache
def vllm_config() -> VllmConfig:
    """The configuration of a tiny model, without a connector. It takes most of the time, so it is shared."""
    init_none_hash(sha256)
    with tempfile.TemporaryDirectory() as directory:
        model = str(make_model(Path(directory) / "model", "gqa"))
        return VllmConfig(
            model_config=ModelConfig(
                model=model, tokenizer=model, dtype="float32", max_model_len=1024, skip_tokenizer_init=True
            ),
            cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True),
            scheduler_config=SchedulerConfig(
                max_num_seqs=8,
                max_num_batched_tokens=CHUNK_TOKENS,
                max_model_len=1024,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
                async_scheduling=False,
            ),
        )


def cache_config() -> KVCacheConfig:
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=4, head_size=32, dtype=torch.float32)
    names = ["model.layers.0.self_attn.attn"]
    page = spec.page_size_bytes
    vllm_config().cache_config.num_gpu_blocks = BLOCKS
    tensor = KVCacheTensor(size=page * BLOCKS, layers=names, layer_stride=page * BLOCKS, block_stride=page)
    return KVCacheConfig(BLOCKS, [tensor], [KVCacheGroupSpec(names, spec)])
