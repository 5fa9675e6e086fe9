"""What a rank holds of the KV cache, and what an engine says of its ranks when two engines first meet.

A shard is layers x KV heads x tokens. Its bytes are reached through regions: one region is one tensor of one
layer, addressed as ``base + block * block_stride + head * head_stride + slot * token_stride``. Which token of
a request lies in which block and slot is ``tokens.py``.
"""

import hashlib

import msgspec

from .parallel import CONVENTION_B


class Region(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of one layer as the device sees it. All strides are bytes."""

    layer: int
    """The layer's number in the whole model, the same on every engine."""
    part: str
    """Which tensor of the layer: ``kv`` where K and V share one; names must agree between the engines."""
    base_address: int
    """Address of block 0, head 0, token 0."""
    block_count: int
    block_stride_bytes: int
    head_stride_bytes: int
    token_stride_bytes: int
    content_bytes: int
    """Bytes of one (head, token): K and V together where they share a tensor."""
    tokens_sliceable: bool = False
    """False where K is stored dim-major: then only whole (block, head) slabs mean anything."""
    group: int = 0
    """The KV cache group that the layer belongs to: a request has one list of block ids for each."""


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank holds."""

    total_kv_heads: int
    """KV heads of the model (1 for MLA)."""
    first_kv_head: int
    kv_head_count: int
    block_size: int
    """Tokens in a block of this rank."""
    regions: tuple[Region, ...]
    cp_size: int = 1
    """Ranks that split the tokens between them (1: every rank holds all tokens)."""
    cp_rank: int = 0
    interleave: int = 1
    """``(token // interleave) % cp_size == cp_rank`` says who holds a token; it divides the block size."""
    convention: str = CONVENTION_B
    """By which rule ``cp_size`` and ``cp_rank`` follow from the parallel sizes: see ``parallel.py``."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Numbers of the layers held, ascending, each once."""
        return tuple(sorted({region.layer for region in self.regions}))

    @property
    def virtual_block_size(self) -> int:
        """Tokens that one block id of a request stands for: all ranks of an engine have the same ids."""
        return self.block_size * self.cp_size


class RankEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One rank in its engine's directory."""

    rank: int
    """Place in the engine: ``(pp_rank * pcp_size + pcp_rank) * tp_size + tp_rank``."""
    host: str
    port: int
    """The rank's side channel."""
    incarnation: str
    """Drawn at random at each start of the rank."""
    data_address: str
    """``host:port`` by which the Mooncake engine of this rank is reached."""
    shard: Shard


class Directory(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's answer to "who are you": every rank, its addresses and its shard."""

    engine_id: str
    model: str
    """Fingerprint of what must be equal for the caches to mean the same: model, dtype, layers."""
    layout: str
    """The layout in words, for messages to people: ``TP 2, GQA with 4 KV heads, block size 32``."""
    ranks: tuple[RankEntry, ...]


def layout_digest(directory: Directory) -> str:
    """Return the name under which a directory is known: a hash of its encoded form."""
    return hashlib.blake2b(msgspec.msgpack.encode(directory), digest_size=16).hexdigest()
