"""The ranks of one side of ``dfirst bench copies``: real threads, sockets and engines, plain memory."""

import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass

from ...protocol.commands import Command
from ...protocol.effects import RECEIVED, Report
from ...protocol.messages import Sender, TransferKey
from ...protocol.rank import RankCore
from ...protocol.shards import Directory, RankEntry
from ...protocol.timing import Timing
from ..data_path import DataPath
from ..mooncake_engine import MooncakeEngine
from ..push_feed import Layer
from ..rank_loop import RankLoop, StepBegan, StepEnded
from ..side_channel import SideChannel
from ..staging import open_staging
from ..step import Chunk, StepMetadata
from ..trace import Tracer
from .copies_cases import Case

HOST = "127.0.0.1"
TRANSFER_SECONDS = 120.0


@dataclass
class BenchRank:
    """A rank at work."""

    entry: RankEntry
    loop: RankLoop
    engine: MooncakeEngine
    reports: list[Report]

    def step(self, *commands: Command, chunks: tuple[Chunk, ...] = ()) -> None:
        """Do what vLLM's worker does in a step; a chunk's layers are computed at once."""
        self.loop.post(StepBegan(StepMetadata(commands=commands, chunks=chunks)))
        if chunks:
            for layer in sorted(self.entry.shard.layers):
                self.loop.post(Layer(layer))
            self.loop.post(StepEnded())

    def close(self) -> None:
        """End in good order."""
        self.loop.stop(5.0)
        self.engine.close()


def open_rank(
    name: str,
    case: Case,
    tp: int,
    number: int,
    address: int,
    blocks: int,
    staging_bytes: int,
    engine_class: type[MooncakeEngine] = MooncakeEngine,
) -> BenchRank:
    """Start a rank whose caches lie at ``address``."""
    timing = Timing()
    engine = engine_class(HOST, "tcp", timing.copy_timeout_seconds, timing.quarantine_seconds)
    ranges = [(address, case.bytes_of_rank(tp, blocks))]
    engine.register(ranges)
    staging = open_staging(engine, ranges, staging_bytes)
    channel = SideChannel(HOST, range(0))
    sender = Sender(name, number, secrets.token_hex(8))
    tracer = Tracer("", name, number, "rank")
    core = RankCore(timing, sender, tracer, staging.slots if staging else ())
    shard = case.shard(tp, number, address, blocks)
    loop = RankLoop(
        core,
        channel,
        shard,
        lambda loop: DataPath(engine, loop.post, staging=staging, want_part=loop.want_part),
        tracer,
        staging,
    )
    loop.start()
    entry = RankEntry(
        rank=number,
        host=HOST,
        port=channel.port,
        incarnation=sender.incarnation,
        data_address=engine.data_address,
        shard=shard,
    )
    return BenchRank(entry, loop, engine, [])


def directory_of(name: str, case: Case, tp: int, ranks: Iterable[BenchRank], blocks: int) -> Directory:
    """Return the engine's directory; of ranks that take no part only the shards are true."""
    entries = [rank.entry for rank in ranks]
    for number in range(len(entries), tp):
        shard = case.shard(tp, number, 1 << 40, blocks)
        absent = RankEntry(
            rank=number,
            host=HOST,
            port=9,
            incarnation=f"absent-{number}",
            data_address=f"{HOST}:9",
            shard=shard,
        )
        entries.append(absent)
    return Directory(
        engine_id=name, model="bench", layout=f"TP {tp}, {case.heads} heads", ranks=tuple(entries)
    )


def wait_received(ranks: Iterable[BenchRank], key: TransferKey) -> None:
    """Wait until every rank has reported this transfer; raise ``RuntimeError`` if one has not received it."""
    deadline = time.monotonic() + TRANSFER_SECONDS
    for rank in ranks:
        while not any(report.key == key for report in rank.reports):
            if time.monotonic() > deadline:
                raise RuntimeError(f"{key.transfer_id} was not there after {TRANSFER_SECONDS:g} s")
            rank.reports += rank.loop.take_reports(max(deadline - time.monotonic(), 0.0))
        report = next(report for report in rank.reports if report.key == key)
        if report.outcome != RECEIVED:
            raise RuntimeError(f"{key.transfer_id}: {report.outcome}: {report.reason}")
