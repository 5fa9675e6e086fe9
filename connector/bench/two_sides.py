"""What benchmarks of two processes have in common: memory laid out as caches, ranks, the engine alone."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import NamedTuple, Self

import numpy as np

from ...protocol.commands import AcceptPush
from ...protocol.messages import TransferKey
from ...protocol.shards import Directory
from ..extra_config import ExtraConfig
from ..rank_loop import StepBegan
from ..step import StepMetadata
from .copies_cases import Case
from .copies_content import content
from .copies_rank import BenchRank, directory_of, open_rank, wait_received
from .copies_reference import Reference
from .far import Far

STAGING_BYTES = ExtraConfig().staging_bytes
TRIES = 3


class Engines(NamedTuple):
    """Both engines of a row: the decode ranks are here, the prefill ranks in the other process."""

    prefill: Directory
    decode: Directory
    ranks: list[BenchRank]

    def accept(self, key: TransferKey, table: tuple[int, ...], tokens: int) -> None:
        """Have the decode ranks lend their blocks."""
        accept = AcceptPush(
            key=key,
            request_id=key.transfer_id,
            block_ids=table,
            prompt_tokens=tokens,
            cached_tokens=0,
        )
        for rank in self.ranks:
            rank.step(accept)

    def wait_received(self, key: TransferKey) -> None:
        """Wait until every decode rank has reported this transfer."""
        wait_received(self.ranks, key)


class TwoSides:
    """The prefill process, and this one, which is the decode side."""

    def __init__(self, serve: Callable[[Connection, int], None], size: int) -> None:
        """``size`` is how many bytes of memory each has."""
        self.far = Far(serve, size)
        self.memory = np.zeros(size, dtype=np.uint8)
        self.memory[:] = 1
        self._reference = Reference(self.memory)
        self._there, self._there_memory = self.far("reference_address")
        self._serial = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.far.end()

    @contextmanager
    def engines(self, case: Case, blocks: int) -> Iterator[Engines]:
        """Start the ranks of a row, their caches from the memory's beginning on, and end them."""
        prefill = self.far("open", case, blocks, STAGING_BYTES)
        base, stride = self.memory.ctypes.data, case.bytes_of_rank(case.decode_tp, blocks)
        ranks = [
            open_rank("D", case, case.decode_tp, number, base + number * stride, blocks, STAGING_BYTES)
            for number in case.decode_ranks
        ]
        try:
            decode = directory_of("D", case, case.decode_tp, ranks, blocks)
            for rank in ranks:
                rank.loop.post(StepBegan(StepMetadata(directory=decode)))
            yield Engines(prefill, decode, ranks)
        finally:
            for rank in ranks:
                rank.close()
            self.far("close")

    def check_arrived(self, case: Case, blocks: int, engines: Engines) -> None:
        """Compare every byte that should have come with what P has; raise ``RuntimeError`` if one differs."""
        for rank in engines.ranks:
            here = rank.entry.shard
            got = content(self.memory, here, case.table(blocks, 2), range(here.kv_head_count))
            wanted = self.far("content", case.table(blocks, 1), here.first_kv_head, here.kv_head_count)
            if not np.array_equal(got, wanted):
                raise RuntimeError(f"{case.name}: bytes on decode rank {rank.entry.rank} are not those of P")

    def engine_seconds(self, direction: str, size: int, piece: int) -> float:
        """Return what the engine alone takes for so many bytes in pieces of this length."""
        if direction == "read":
            return self._reference.seconds("read", self._there, self._there_memory, size, piece)
        here = (self._reference.data_address, self.memory.ctypes.data)
        taken: float = self.far("reference_write", *here, size, piece)
        return taken

    def least_engine_seconds(self, direction: str, size: int, piece: int) -> float:
        """Return the least of a few tries."""
        return min(self.engine_seconds(direction, size, piece) for _ in range(TRIES))

    def next_key(self) -> TransferKey:
        """Return a transfer that was not there yet."""
        self._serial += 1
        return TransferKey(f"bench-{self._serial}", 0)


def memory_needed(cases: Sequence[Case], size: int) -> int:
    """Return the bytes that each side needs for prompts of about ``size`` bytes."""
    prefill = max(
        case.bytes_of_rank(case.prefill_tp, case.blocks(size)) * len(case.prefill_ranks) for case in cases
    )
    decode = max(
        case.bytes_of_rank(case.decode_tp, case.blocks(size)) * len(case.decode_ranks) for case in cases
    )
    return max(prefill, decode, 2 * size)
