"""What a rank's caches hold of a prompt, as one array: to compare what arrived with what was sent."""

from typing import Any

import numpy as np

from ...protocol.shards import Region, Shard


def content(
    memory: "np.ndarray[Any, np.dtype[np.uint8]]", shard: Shard, table: tuple[int, ...], heads: range
) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    """Return (layer, block of the prompt, head, token, byte); ``heads`` count from the shard's first."""
    return np.stack([_of_region(memory, shard, region, table, heads) for region in shard.regions])


def _of_region(
    memory: "np.ndarray[Any, np.dtype[np.uint8]]",
    shard: Shard,
    region: Region,
    table: tuple[int, ...],
    heads: range,
) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    view = np.lib.stride_tricks.as_strided(
        memory[region.base_address - memory.ctypes.data :],
        (region.block_count, shard.kv_head_count, shard.block_size, region.content_bytes),
        (region.block_stride_bytes, region.head_stride_bytes, region.token_stride_bytes, 1),
    )
    return view[list(table)][:, heads.start : heads.stop]
