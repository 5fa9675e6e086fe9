"""Which bytes of this rank are lent: a mover names addresses, and only those of lent blocks are touched."""

import numpy as np

from ..protocol.copies import Int64Array
from ..protocol.shards import Region, Shard
from .kv_memory import Runs
from .stretches import Stretches


class LentMemory:
    """The memory of some blocks."""

    def __init__(self, shard: Shard, block_ids: tuple[int, ...]) -> None:
        self.block_ids = block_ids
        blocks = np.asarray(block_ids, dtype=np.int64)
        pieces = [_stretches(shard, region, blocks) for region in shard.regions]
        starts = np.concatenate([piece[0] for piece in pieces])
        ends = starts + np.concatenate([np.full(len(piece[0]), piece[1], dtype=np.int64) for piece in pieces])
        self._stretches = Stretches(starts, ends)

    def check(self, runs: Runs) -> None:
        """Raise ``ValueError`` if a run is not wholly lent."""
        wrong = (runs.lengths == 0) | self._stretches.outside(runs.starts, runs.lengths)
        if wrong.any():
            first = int(np.flatnonzero(wrong)[0])
            start, length = int(runs.starts[first]), int(runs.lengths[first])
            raise ValueError(f"{length} bytes at {start:#x} are not in the blocks that are lent")


def _stretches(shard: Shard, region: Region, blocks: Int64Array) -> tuple[Int64Array, int]:
    """Return the first addresses and the length of the stretches that blocks take up in a region."""
    block_size = shard.group(region.group).block_size
    tokens = (block_size - 1) * region.token_stride_bytes + region.content_bytes
    starts = region.base_address + blocks * region.block_stride_bytes
    if region.head_stride_bytes <= region.block_stride_bytes:
        return starts, (shard.kv_head_count - 1) * region.head_stride_bytes + tokens
    # Each head has all blocks side by side.
    heads = np.arange(shard.kv_head_count, dtype=np.int64) * region.head_stride_bytes
    return (starts[:, None] + heads).ravel(), tokens
