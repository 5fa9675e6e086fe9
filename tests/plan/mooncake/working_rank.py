"""One rank at work in a process of its own: control thread, sockets, Mooncake engine and a cache in memory.

The process obeys calls that come over a pipe, one after the other; it ends when the pipe does. Where vLLM
would compute a prompt, the known values are written.
"""

import os
import secrets
import time
from multiprocessing.connection import Connection

from dfirst.connector.data_path import DataPath
from dfirst.connector.mooncake_engine import MooncakeEngine
from dfirst.connector.push_feed import Layer
from dfirst.connector.rank_loop import RankLoop, StepBegan, StepEnded
from dfirst.connector.side_channel import SideChannel
from dfirst.connector.step import Chunk, StepMetadata
from dfirst.connector.trace import Tracer
from dfirst.protocol.commands import Command
from dfirst.protocol.effects import Report
from dfirst.protocol.messages import Sender
from dfirst.protocol.rank import RankCore
from dfirst.protocol.shards import Directory, RankEntry
from dfirst.protocol.timing import Timing

from ..memory import FOREIGN, PADDING, UNTOUCHED, Bytes, KnownValues, build_rank
from ..request import Engine, Request, Side, mark_blocks, shard_of, write_tokens

HOST = "127.0.0.1"
TIMING = Timing(lease_seconds=10.0, query_timeout_seconds=20.0, hold_seconds=30.0)
LOOK_SECONDS = 0.01


class WorkingRank:
    """What the process does; every method may be called over the pipe."""

    def __init__(self, name: str, side: Side, rank: int) -> None:
        self._memory = build_rank(side.parallel, side.form, rank, UNTOUCHED)
        self._as_engine = Engine(side, (self._memory,))
        self._engine = MooncakeEngine(HOST, "tcp", TIMING.copy_timeout_seconds, TIMING.quarantine_seconds)
        self._engine.register([(self._memory.base, self._memory.arena.nbytes)])
        self._channel = SideChannel(HOST, range(0))
        self._shard = shard_of(side, self._memory)
        self._sender = Sender(name, rank, secrets.token_hex(8))
        self._loop: RankLoop | None = None

    def entry(self) -> RankEntry:
        """Return what the rank publishes of itself."""
        return RankEntry(
            rank=self._memory.rank,
            host=HOST,
            port=self._channel.port,
            incarnation=self._sender.incarnation,
            data_address=self._engine.data_address,
            shard=self._shard,
        )

    def begin(self, directory: Directory) -> None:
        """Start, as a rank of this engine."""
        tracer = Tracer("", self._sender.engine_id, self._sender.rank, "rank")
        core = RankCore(TIMING, self._sender, tracer)
        self._loop = RankLoop(
            core, self._channel, self._shard, lambda loop: DataPath(self._engine, loop.post), tracer
        )
        self._loop.start()
        self._loop.post(StepBegan(StepMetadata(directory=directory)))

    def blank(self) -> None:
        """Fill the cache as a decode rank's before anything has arrived."""
        self._memory.arena[:] = UNTOUCHED

    def hold(self, request: Request) -> None:
        """Fill the cache as a prefill rank's that has other prompts, and blocks for this one."""
        self._memory.arena[:] = PADDING
        for tensor in self._memory.tensors:
            tensor.view[:] = FOREIGN
        mark_blocks(self._as_engine, request)

    def compute(self, request: Request, first: int, end: int, chunk: Chunk | None) -> None:
        """Compute tokens [first, end) of the prompt; with ``chunk`` in a step whose layers are pushed."""
        side = self._as_engine.side
        values = KnownValues(side.parallel.heads, request.tokens, side.form.parts)
        if chunk:
            self._running.post(StepBegan(StepMetadata(chunks=(chunk,))))
        for layer in side.parallel.layers_of(self._memory.rank):
            write_tokens(self._as_engine, request.prefill_blocks, values, first, end, frozenset({layer}))
            if chunk:
                self._running.post(Layer(layer))
        if chunk:
            self._running.post(StepEnded())

    def command(self, command: Command) -> None:
        """Do what the scheduler side asks for."""
        self._running.post(StepBegan(StepMetadata(commands=(command,))))

    def report(self, timeout_seconds: float) -> list[Report]:
        """Wait for reports and take them; an empty list if none came in time."""
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline:
            reports = self._running.take_reports()
            if reports:
                return reports
            time.sleep(LOOK_SECONDS)
        return []

    def arena(self) -> Bytes:
        """Return all bytes of the rank."""
        return self._memory.arena.copy()

    @property
    def _running(self) -> RankLoop:
        assert self._loop is not None, "the rank was not told its engine"
        return self._loop


def serve(calls: Connection, name: str, side: Side, rank: int) -> None:
    """Be a rank until the pipe ends. What a call raises is sent back, and ends nothing."""
    working = WorkingRank(name, side, rank)
    while True:
        try:
            method, arguments = calls.recv()
        except EOFError:
            # Not by the usual way: destroying dozens of engine objects takes a second each.
            os._exit(0)
        try:
            calls.send((getattr(working, method)(*arguments), None))
        except Exception as error:  # noqa: BLE001  # the caller raises it
            calls.send((None, error))
