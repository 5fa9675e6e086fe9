"""Which addresses are this rank's KV cache: whatever a peer says of its layout, copies touch nothing else."""

import numpy as np

from ..protocol.copies import Int64Array
from ..protocol.shards import Region, Shard
from .stretches import Stretches


class OwnMemory:
    """The memory that a shard's regions take up."""

    def __init__(self, shard: Shard) -> None:
        regions = np.array([_stretch(shard, region) for region in shard.regions], dtype=np.int64)
        self._stretches = Stretches(*regions.reshape(-1, 2).T)

    def check(self, addresses: Int64Array, lengths: Int64Array) -> None:
        """Raise ``ValueError`` if a run of bytes is not wholly in this memory."""
        wrong = self._stretches.outside(addresses, lengths)
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
