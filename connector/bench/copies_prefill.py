"""The prefill side of ``dfirst bench copies``: a process that holds full caches and does as it is told."""

import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import numpy as np

from ...protocol.commands import FinishPush, OfferBlocks, RemoteEngine, StartPush
from ...protocol.messages import TransferKey
from ...protocol.shards import Directory
from ..rank_loop import StepBegan
from ..step import Chunk, StepMetadata
from .copies_cases import Case
from .copies_content import content
from .copies_rank import BenchRank, directory_of, open_rank
from .copies_reference import Reference


class Prefill:
    """What the bench's process asks for, by name; every call is answered."""

    def __init__(self, size: int) -> None:
        generator = np.random.default_rng(3)
        self.memory = generator.integers(0, 256, size, dtype=np.uint8)
        self.ranks: list[BenchRank] = []
        self.reference = Reference(self.memory)

    def reference_address(self) -> tuple[str, int]:
        """Return where the engine alone reaches the memory."""
        return self.reference.data_address, self.address()

    def reference_write(self, peer: str, address: int, size: int, piece: int) -> float:
        """Return the seconds that the engine takes to write so much in pieces of a size."""
        return self.reference.seconds("write", peer, address, size, piece)

    def address(self) -> int:
        """Return where the memory is."""
        return self.memory.ctypes.data

    def cpu(self) -> float:
        """Return the CPU seconds that this process has taken."""
        return time.process_time()

    def open(self, case: Case, blocks: int, staging_bytes: int) -> Directory:
        """Start the ranks of a row."""
        size = case.bytes_of_rank(case.prefill_tp, blocks)
        self.ranks = [
            open_rank(
                "P", case, case.prefill_tp, number, self.address() + number * size, blocks, staging_bytes
            )
            for number in case.prefill_ranks
        ]
        directory = directory_of("P", case, case.prefill_tp, self.ranks, blocks)
        for rank in self.ranks:
            rank.loop.post(StepBegan(StepMetadata(directory=directory)))
        return directory

    def offer(self, key: TransferKey, table: tuple[int, ...], tokens: int) -> None:
        """A prompt is computed: decode ranks may pull."""
        for rank in self.ranks:
            rank.step(OfferBlocks(key=key, request_id=key.transfer_id, block_ids=table, prompt_tokens=tokens))

    def push(self, key: TransferKey, remote: RemoteEngine, table: tuple[int, ...], tokens: int) -> None:
        """A prompt is computed, all its layers at once, and pushed."""
        chunk = Chunk(key=key, block_ids=table, end_token=tokens, last=True)
        for rank in self.ranks:
            start = StartPush(
                key=key, request_id=key.transfer_id, remote=remote, prompt_tokens=tokens, cached_tokens=0
            )
            rank.step(start, chunks=(chunk,))
            rank.step(FinishPush(key=key))

    def content(self, table: tuple[int, ...], first_head: int, head_count: int) -> Any:
        """Return what the ranks hold of a prompt for some heads; of replicas the first one's."""
        parts, wanted = [], first_head
        for rank in self.ranks:
            shard = rank.entry.shard
            end = min(shard.first_kv_head + shard.kv_head_count, first_head + head_count)
            if shard.first_kv_head <= wanted < end:
                heads = range(wanted - shard.first_kv_head, end - shard.first_kv_head)
                parts.append(content(self.memory, shard, table, heads))
                wanted = end
        return np.concatenate(parts, axis=2)

    def close(self) -> None:
        """End the ranks."""
        for rank in self.ranks:
            rank.close()
        self.ranks = []


def serve(connection: Connection, size: int) -> None:
    """Answer calls until the other side is gone."""
    answer_calls(Prefill(size), connection)


def answer_calls(prefill: Prefill, connection: Connection) -> NoReturn:
    """Call what the other side names, until it is gone."""
    while True:
        try:
            name, arguments = connection.recv()
        except EOFError:
            sys.exit(0)
        method: Callable[..., Any] = getattr(prefill, name)
        connection.send(method(*arguments))
