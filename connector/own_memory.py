"""Which addresses are this rank's KV cache: whatever a peer says of its layout, copies touch nothing else."""

import numpy as np

from ..protocol.copies import Int64Array
from ..protocol.shards import Region, Shard


class OwnMemory:
    """The stretches that a shard's regions take up, ascending, with those that touch or overlap made one."""

    def __init__(self, shard: Shard) -> None:
        stretches = sorted(_stretch(shard, region) for region in shard.regions)
        merged: list[tuple[int, int]] = []
        for start, end in stretches:
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((start, end))
        self._starts = np.asarray([start for start, _ in merged], dtype=np.int64)
        self._ends = np.asarray([end for _, end in merged], dtype=np.int64)

    def check(self, addresses: Int64Array, lengths: Int64Array) -> None:
        """Raise ``ValueError`` if a run of bytes is not wholly in this memory."""
        if not len(addresses):
            return
        place = np.searchsorted(self._starts, addresses, side="right") - 1
        wrong = (place < 0) | (lengths < 0) | (lengths > self._ends[place] - addresses)
        if wrong.any():
            first = int(np.flatnonzero(wrong)[0])
            raise ValueError(
                f"{int(lengths[first])} bytes at {int(addresses[first]):#x} are not in this rank's KV cache: "
                "the two layouts contradict each other"
            )


def _stretch(shard: Shard, region: Region) -> tuple[int, int]:
    block_size = shard.group(region.group).block_size
    last = (
        (region.block_count - 1) * region.block_stride_bytes
        + (shard.kv_head_count - 1) * region.head_stride_bytes
        + (block_size - 1) * region.token_stride_bytes
    )
    return region.base_address, region.base_address + last + region.content_bytes
