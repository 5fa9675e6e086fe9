"""Two engines of rank processes, and transfers between them."""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from dfirst.connector.step import Chunk
from dfirst.protocol.commands import (
    AcceptPush,
    FinishPush,
    OfferBlocks,
    RemoteEngine,
    StartPull,
    StartPush,
    remote_of,
)
from dfirst.protocol.effects import RECEIVED, SENT
from dfirst.protocol.messages import TransferKey
from dfirst.protocol.shards import Directory

from ..judge import Wrong, check_memory
from ..memory import KnownValues
from ..request import Request, Side, blocks_needed, decode_engine
from .working_rank import serve

ANSWER_SECONDS = 60.0
REPORT_SECONDS = 40.0


class RankProcess:
    """One rank's process, from the side of the test."""

    def __init__(self, context: Any, name: str, side: Side, rank: int) -> None:
        self.name = f"{name}{rank}"
        self._pipe: Connection
        self._pipe, theirs = context.Pipe()
        self._process: BaseProcess = context.Process(
            target=serve, args=(theirs, name, side, rank), daemon=True
        )
        self._process.start()
        theirs.close()

    def send(self, method: str, *arguments: object) -> None:
        self._pipe.send((method, arguments))

    def answer(self) -> Any:
        """Return what the last call returned."""
        if not self._pipe.poll(ANSWER_SECONDS):
            raise TimeoutError(f"{self.name} did not answer within {ANSWER_SECONDS:g} s")
        value, error = self._pipe.recv()
        if error is not None:
            raise error
        return value

    def end(self) -> None:
        self._pipe.close()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


class EngineOfProcesses:
    """All ranks of one engine."""

    def __init__(self, context: Any, name: str, side: Side) -> None:
        self.side = side
        self.ranks = [RankProcess(context, name, side, rank) for rank in range(side.parallel.rank_count)]
        self._name = name
        self.directory: Directory

    def meet(self) -> None:
        """Tell every rank its engine."""
        entries = tuple(self.call("entry"))
        self.directory = Directory(
            engine_id=self._name, model="tiny", layout=self.side.parallel.describe(), ranks=entries
        )
        self.call("begin", self.directory)

    def call(self, method: str, *arguments: object) -> list[Any]:
        """Call a method on all ranks at once; return the answers in the order of the ranks."""
        for rank in self.ranks:
            rank.send(method, *arguments)
        return [rank.answer() for rank in self.ranks]

    @property
    def remote(self) -> RemoteEngine:
        """The engine as a router names it."""
        return remote_of(self.directory)

    def check_reports(self, key: TransferKey, outcome: str) -> None:
        """Every rank reports this outcome of this transfer, and nothing else."""
        for rank, reports in zip(self.ranks, self.call("report", REPORT_SECONDS), strict=True):
            said = [(report.key, report.outcome) for report in reports]
            if said != [(key, outcome)]:
                reasons = [report.reason for report in reports]
                raise Wrong(f"{rank.name} reports {said or 'nothing'} {reasons} instead of {outcome}")


class Fleet:
    """A prefill and a decode engine."""

    def __init__(self, context: Any, prefill: Side, decode: Side) -> None:
        self.prefill = EngineOfProcesses(context, "P", prefill)
        self.decode = EngineOfProcesses(context, "D", decode)
        for engine in (self.prefill, self.decode):
            engine.meet()

    def end(self) -> None:
        """End all processes. May be called again."""
        for engine in (self.prefill, self.decode):
            for rank in engine.ranks:
                rank.end()
            engine.ranks.clear()

    def pull(self, request: Request) -> None:
        """Move a prompt block-wise and check it."""
        key = TransferKey(request.transfer_id, 0)
        self._prepare(request)
        self.prefill.call("compute", request, 0, request.tokens, None)
        self.prefill.call(
            "command",
            OfferBlocks(
                key=key, request_id="p", block_ids=request.prefill_blocks[0], prompt_tokens=request.tokens
            ),
        )
        self.decode.call(
            "command",
            StartPull(
                key=key,
                request_id="d",
                remote=self.prefill.remote,
                block_ids=request.decode_blocks[0],
                prompt_tokens=request.tokens,
                cached_tokens=request.cached,
            ),
        )
        self._check(key, request)

    def push(self, request: Request, chunk_ends: list[int]) -> None:
        """Move a prompt layer-wise while it is computed in chunks, and check it."""
        key = TransferKey(request.transfer_id, 0)
        self._prepare(request)
        self.decode.call(
            "command",
            AcceptPush(
                key=key,
                request_id="d",
                block_ids=request.decode_blocks[0],
                prompt_tokens=request.tokens,
                cached_tokens=request.cached,
            ),
        )
        self.prefill.call(
            "command",
            StartPush(
                key=key,
                request_id="p",
                remote=self.decode.remote,
                prompt_tokens=request.tokens,
                cached_tokens=request.cached,
            ),
        )
        first = 0
        for end in chunk_ends:
            blocks = request.prefill_blocks[0][: blocks_needed(self.prefill.side.parallel, 0, end)]
            chunk = Chunk(key=key, block_ids=blocks, end_token=end, last=end == request.tokens)
            self.prefill.call("compute", request, first, end, chunk)
            first = end
        self.prefill.call("command", FinishPush(key))
        self._check(key, request)

    def _prepare(self, request: Request) -> None:
        self.prefill.call("hold", request)
        self.decode.call("blank")

    def _check(self, key: TransferKey, request: Request) -> None:
        self.decode.check_reports(key, RECEIVED)
        self.prefill.check_reports(key, SENT)
        arrived = decode_engine(self.decode.side)
        for memory, arena in zip(arrived.ranks, self.decode.call("arena"), strict=True):
            memory.arena[:] = arena
        form = self.prefill.side.form
        check_memory(
            arrived, KnownValues(self.prefill.side.parallel.heads, request.tokens, form.parts), request
        )


@contextmanager
def fleets() -> Iterator[Callable[[Side, Side], Fleet]]:
    """Give a way to start fleets; all end with it. Ranks are forked from a process that has all imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([serve.__module__])
    started: list[Fleet] = []

    def start(prefill: Side, decode: Side) -> Fleet:
        fleet = Fleet(context, prefill, decode)
        started.append(fleet)
        return fleet

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        yield start
    finally:
        for fleet in started:
            fleet.end()
