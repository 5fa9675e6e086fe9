"""Which tokens of a request a shard holds, and where.

A rank holds the tokens with ``(token // interleave) % cp_size == cp_rank``. In order, they fill its blocks:
the j-th of them lies in the block that the request's block list names at ``j // block_size``, in slot
``j % block_size``. Block lists are the same on all ranks of an engine, so one block id stands for
``block_size * cp_size`` tokens of the request.
"""

from .shards import Shard


def blocks_needed(shard: Shard, tokens: int) -> int:
    """Return how many block ids a request of so many tokens has on each rank of the shard's engine."""
    return -(-tokens // shard.virtual_block_size)
