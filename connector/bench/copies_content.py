"""What a rank's caches hold of a prompt, as one array: to compare what arrived with what was sent."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from ...protocol.shards import Region, Shard
from .copies_cases import Case
from .far import Far


def content(
    memory: "np.ndarray[Any, np.dtype[np.uint8]]", shard: Shard, table: tuple[int, ...], heads: range
) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    """Return (layer, block of the prompt, head, token, byte); ``heads`` count from the shard's first."""
    return np.stack([_of_region(memory, shard, region, table, heads) for region in shard.regions])


def check_arrived(
    memory: "np.ndarray[Any, np.dtype[np.uint8]]", case: Case, blocks: int, shards: Iterable[Shard], far: Far
) -> None:
    """Compare every byte that should have come with what P has; raise ``RuntimeError`` if one differs."""
    for number, shard in enumerate(shards):
        got = content(memory, shard, case.table(blocks, 2), range(shard.kv_head_count))
        wanted = far("content", case.table(blocks, 1), shard.first_kv_head, shard.kv_head_count)
        if not np.array_equal(got, wanted):
            raise RuntimeError(f"{case.name}: bytes on decode rank {number} are not those of P")


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
