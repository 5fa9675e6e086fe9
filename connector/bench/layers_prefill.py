"""The prefill side of ``dfirst bench layers``: a forward pass that computes, with a push and without one."""

import threading
import time
from multiprocessing.connection import Connection

import msgspec
import torch

from ...protocol.commands import FinishPush, RemoteEngine, StartPush
from ...protocol.messages import TransferKey
from ...protocol.shards import Directory
from ..mooncake_engine import Batch, MooncakeEngine
from ..push_feed import Layer
from ..rank_loop import StepBegan, StepEnded
from ..step import Chunk, StepMetadata
from .copies_cases import Case
from .copies_prefill import Prefill, answer_calls
from .copies_rank import directory_of, open_rank

_SIDE = 384
"""Of the square matrices that a layer multiplies: some milliseconds in one thread, outside of Python."""
_TRIES = 20


class CountingEngine(MooncakeEngine):
    """Also counts the bytes of its batches that arrived whole."""

    arrived_bytes = 0

    def finish(self, batch: Batch) -> bool:
        arrived = super().finish(batch)
        if arrived:
            # One peer's thread at a time in most rows, but not in all.
            with _counting:
                self.arrived_bytes += sum(batch.columns[2])
        return arrived


_counting = threading.Lock()


class Pushed(msgspec.Struct, frozen=True):
    """A prompt that a forward pass computes and pushes."""

    key: TransferKey
    remote: RemoteEngine
    table: tuple[int, ...]
    """Blocks here."""
    tokens: int


class Pass(msgspec.Struct, frozen=True):
    """What one forward pass took. Seconds; the CPU time is the forward thread's own."""

    wall: float
    cpu: float
    ended_at: float
    """``time.perf_counter`` when the last layer was computed, the same on all processes of a host."""
    sent_bytes: int
    """Of what is pushed, had arrived when the last layer was computed."""


class LayersPrefill(Prefill):
    """What the benchmark's process asks for, by name."""

    def __init__(self, size: int) -> None:
        torch.set_num_threads(1)
        super().__init__(size)
        self._left, self._right = torch.rand(2, _SIDE, _SIDE).unbind()
        self._products = 1

    def open(self, case: Case, blocks: int, staging_bytes: int) -> Directory:
        """Start the one rank of a row."""
        rank = open_rank("P", case, case.prefill_tp, 0, self.address(), blocks, staging_bytes, CountingEngine)
        self.ranks = [rank]
        directory = directory_of("P", case, case.prefill_tp, self.ranks, blocks)
        rank.loop.post(StepBegan(StepMetadata(directory=directory)))
        return directory

    def set_layer_seconds(self, seconds: float) -> None:
        """From now on a layer's computing takes about so long when nothing disturbs it."""
        took = []
        for _ in range(_TRIES):
            began = time.perf_counter()
            torch.mm(self._left, self._right)
            took.append(time.perf_counter() - began)
        self._products = max(1, round(seconds / min(took)))

    def forward(self, layers: int, chunks: int, pushed: Pushed | None) -> Pass:
        """Compute all layers of every chunk; a chunk is a step of the engine."""
        (rank,) = self.ranks
        assert isinstance(rank.engine, CountingEngine)
        before = rank.engine.arrived_bytes
        began, cpu = time.perf_counter(), time.thread_time()
        for chunk in range(chunks):
            if pushed is not None:
                rank.loop.post(StepBegan(_step(pushed, chunk, chunks)))
            for layer in range(layers):
                for _ in range(self._products):
                    torch.mm(self._left, self._right)
                if pushed is not None:
                    rank.loop.post(Layer(layer))
            if pushed is not None:
                rank.loop.post(StepEnded())
        ended, cpu = time.perf_counter(), time.thread_time() - cpu
        arrived = rank.engine.arrived_bytes - before
        if pushed is not None:
            rank.step(FinishPush(key=pushed.key))
        return Pass(ended - began, cpu, ended, arrived)


def _step(pushed: Pushed, chunk: int, chunks: int) -> StepMetadata:
    last = chunk + 1 == chunks
    end = pushed.tokens if last else pushed.tokens * (chunk + 1) // chunks
    start = StartPush(
        key=pushed.key,
        request_id=pushed.key.transfer_id,
        remote=pushed.remote,
        prompt_tokens=pushed.tokens,
        cached_tokens=0,
    )
    computed = Chunk(key=pushed.key, block_ids=pushed.table, end_token=end, last=last)
    return StepMetadata(commands=() if chunk else (start,), chunks=(computed,))


def serve(connection: Connection, size: int) -> None:
    """Answer calls until the other side is gone."""
    answer_calls(LayersPrefill(size), connection)
