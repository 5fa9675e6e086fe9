"""Two ranks at work in one process: real control threads, real sockets, the real Mooncake engine, real bytes.

The caches are numpy arrays instead of a model's tensors; vLLM's hooks are called by hand.
"""

import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from dfirst.connector.cost_model import CostModel
from dfirst.connector.curve import CurveKeys
from dfirst.connector.data_path import DataPath
from dfirst.connector.mooncake_engine import MooncakeEngine
from dfirst.connector.push_feed import Layer
from dfirst.connector.rank_loop import RankLoop, StepBegan, StepEnded
from dfirst.connector.side_channel import SideChannel
from dfirst.connector.staging import PLACES, open_staging
from dfirst.connector.step import Chunk, StepMetadata
from dfirst.connector.trace import Tracer
from dfirst.protocol.commands import Command, RemoteEngine, remote_of
from dfirst.protocol.effects import Report
from dfirst.protocol.messages import Sender, TransferKey
from dfirst.protocol.rank import RankCore
from dfirst.protocol.shards import Directory, RankEntry, Region, Shard
from dfirst.protocol.timing import Timing

HOST = "127.0.0.1"
BLOCK_SIZE = 4
LAYERS = 3
BLOCKS = 32
HEADS = 2
CONTENT = 16
BLOCK_BYTES = HEADS * BLOCK_SIZE * CONTENT
ALWAYS_STAGE = CostModel(descriptor=1.0, byte=0.0, copied_byte=0.0, part=-1.0)


@dataclass
class Rank:
    """A rank: its cache as (layer, block, head, token, content) bytes, and its control thread."""

    cache: np.ndarray
    core: RankCore
    loop: RankLoop
    engine: MooncakeEngine
    directory: Directory
    reports: list[Report]

    @property
    def remote(self) -> RemoteEngine:
        """The rank's engine as a router names it."""
        return remote_of(self.directory)

    def step(
        self, *commands: Command, chunks: tuple[Chunk, ...] = (), preempted: Iterable[TransferKey] = ()
    ) -> None:
        """Do what vLLM's worker does in one step."""
        self.loop.post(
            StepBegan(StepMetadata(commands=commands, chunks=chunks, preempted=frozenset(preempted)))
        )
        if chunks:
            for layer in range(LAYERS):
                self.loop.post(Layer(layer))
            self.loop.post(StepEnded())

    def outcomes(self, key: TransferKey | None = None) -> list[str]:
        """Take the reports that are there and return the outcomes of all so far, or of one transfer."""
        self.reports += self.loop.take_reports()
        return [report.outcome for report in self.reports if key in (None, report.key)]

    def stop(self) -> None:
        """End the rank in good order."""
        self.loop.stop(5.0)
        self.engine.close()


def start_rank(
    name: str,
    timing: Timing,
    fill: int | None = None,
    trace: str = "",
    keys: CurveKeys | None = None,
    staged: bool = False,
    model: str = "m",
) -> Rank:
    """Start a rank that is a whole engine; its cache holds random bytes, or ``fill`` everywhere. ``staged``
    has it stage every copy, in parts of one block.
    """
    shape = (LAYERS, BLOCKS, HEADS, BLOCK_SIZE, CONTENT)
    generator = np.random.default_rng(7)
    cache = generator.integers(0, 255, shape, dtype=np.uint8)
    if fill is not None:
        cache[:] = fill
    engine = MooncakeEngine(HOST, "tcp", timing.copy_timeout_seconds, timing.quarantine_seconds)
    base = cache.ctypes.data
    engine.register([(base, cache.nbytes)])
    staging = None
    if staged:
        size = 4 * PLACES * BLOCK_BYTES
        staging = open_staging(engine, [(base, cache.nbytes)], size, (), BLOCK_BYTES, ALWAYS_STAGE)
    channel = SideChannel(HOST, range(0), keys)
    shard = Shard(
        total_kv_heads=HEADS,
        first_kv_head=0,
        kv_head_count=HEADS,
        block_size=BLOCK_SIZE,
        regions=tuple(
            Region(layer, "kv", base + layer * cache.strides[0], BLOCKS, *cache.strides[1:4], CONTENT)
            for layer in range(LAYERS)
        ),
    )
    sender = Sender(name, 0, secrets.token_hex(8))
    entry = RankEntry(
        rank=0,
        host=HOST,
        port=channel.port,
        incarnation=sender.incarnation,
        data_address=engine.data_address,
        shard=shard,
    )
    directory = Directory(engine_id=name, model=model, layout=f"{HEADS} heads", ranks=(entry,))
    tracer = Tracer(trace, name, 0, "rank")
    core = RankCore(timing, sender, tracer, staging.slots if staging else ())
    loop = RankLoop(
        core,
        channel,
        shard,
        lambda loop: DataPath(engine, loop.post, staging=staging, want_part=loop.want_part),
        tracer,
        staging,
    )
    loop.start()
    loop.post(StepBegan(StepMetadata(directory=directory)))
    return Rank(cache, core, loop, engine, directory, [])


def wait_until(condition: Callable[[], bool], seconds: float = 15.0) -> None:
    """Wait for a condition; fail if it does not come true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)
