"""Whether the runs of a plan put every byte where it belongs: the plan's legs, carried out on small memories.

Every slab (layer, head, block) of the prefill side gets bytes of its own. After all legs were copied, each
decode rank must hold exactly the slabs of its own heads, each in its own place (rule S1).
"""

import numpy as np
import numpy.typing as npt
from dfirst.protocol import copies as runs
from dfirst.protocol.shards import Region, Shard

from .sites import BLOCK_SIZE, PROMPT_TOKENS, D, P, Sites
from .violation import Violation

PREFILL_BLOCKS, DECODE_BLOCKS = (3, 5), (2, 7)
"""The blocks of one prompt on each side."""
TOKENS = range(len(PREFILL_BLOCKS) * BLOCK_SIZE)
MEMORY_BYTES = 1 << 16
Memory = npt.NDArray[np.int64]


def check_bytes(sites: Sites) -> None:
    """Raise ``Violation`` if a byte lands in the wrong place, or does not arrive."""
    if sites.configuration.unfit:
        return
    prefill, decode = sites.directory(P, 0), sites.directory(D, 0)
    sources = {entry.rank: _filled(entry.shard, PREFILL_BLOCKS) for entry in prefill.ranks}
    targets = {entry.rank: np.zeros(MEMORY_BYTES, np.int64) for entry in decode.ranks}
    plan = sites.plan.request(sites.keys[0].transfer_id, PROMPT_TOKENS, 0)
    for leg in plan.legs:
        source, target = prefill.ranks[leg.prefill_rank].shard, decode.ranks[leg.decode_rank].shard
        moved = runs.copies(leg, source, target, PREFILL_BLOCKS, DECODE_BLOCKS, TOKENS)
        base_source, base_target = source.regions[0].base_address, target.regions[0].base_address
        for start, end, length in zip(
            moved.source_addresses.tolist(),
            moved.target_addresses.tolist(),
            moved.lengths.tolist(),
            strict=True,
        ):
            read = sources[leg.prefill_rank][start - base_source :][:length]
            targets[leg.decode_rank][end - base_target :][:length] = read
    for entry in decode.ranks:
        if not np.array_equal(targets[entry.rank], _filled(entry.shard, DECODE_BLOCKS)):
            raise Violation("S1", f"bytes of D{entry.rank} are missing, or are another head's or block's")


def _filled(shard: Shard, blocks: tuple[int, int]) -> Memory:
    memory = np.zeros(MEMORY_BYTES, np.int64)
    for region in shard.regions:
        for number, block in enumerate(blocks):
            for head in range(shard.kv_head_count):
                slab = _slab(region, shard, block, head)
                named = (region.layer, shard.first_kv_head + head, number)
                memory[slab] = np.arange(slab.stop - slab.start) + 1 + (hash(named) % 999_983) * 1_000
    return memory


def _slab(region: Region, shard: Shard, block: int, head: int) -> slice:
    start = block * region.block_stride_bytes + head * region.head_stride_bytes
    return slice(start, start + shard.block_size * region.content_bytes)
