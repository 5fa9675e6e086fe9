"""What a rank holds of the KV cache, and what an engine says of its ranks when two engines first meet.

A shard is layers x KV heads x tokens. Its bytes are reached through regions: one region is one tensor of one
layer, addressed as ``base + block * block_stride + head * head_stride + slot * token_stride``. Which token of
a request lies in which block and slot is ``tokens.py``.
"""

import hashlib
from typing import Annotated

import msgspec

from .limits import Extent, Many, Name, Number, Port, Rank, Ranks, Sentence
from .parallel import CONVENTION_B


class Region(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of one layer as the device sees it. All strides are bytes."""

    layer: Number
    """The layer's number in the whole model, the same on every engine."""
    part: Name
    """Which tensor of the layer: ``kv`` where K and V share one; names must agree between the engines."""
    base_address: Number
    """Address of block 0, head 0, token 0."""
    block_count: Number
    block_stride_bytes: Number
    head_stride_bytes: Number
    token_stride_bytes: Number
    content_bytes: Number
    """Bytes of one (head, token): K and V together where they share a tensor."""
    tokens_sliceable: bool = False
    """False where K is stored dim-major: then only whole (block, head) slabs mean anything."""
    group: Number = 0
    """The KV cache group that the layer belongs to: a request has one list of block ids for each."""


class CacheGroup(msgspec.Struct, frozen=True, array_like=True):
    """Layers whose blocks are handed out together: a request has one list of block ids for them."""

    block_size: Extent
    """Tokens in a block."""
    window: Number = 0
    """How many tokens before the next one its layers still need; 0: all. Blocks out of the window have the
    id 0 in a request's list, which is no block of the request: it is never read or written.
    """


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank holds."""

    total_kv_heads: Extent
    """KV heads of the model (1 for MLA)."""
    first_kv_head: Number
    kv_head_count: Extent
    block_size: Extent
    """Tokens in a block of this rank."""
    regions: Annotated[tuple[Region, ...], Many]
    cp_size: Extent = 1
    """Ranks that split the tokens between them (1: every rank holds all tokens)."""
    cp_rank: Number = 0
    interleave: Extent = 1
    """``(token // interleave) % cp_size == cp_rank`` says who holds a token; it divides the block size."""
    convention: Name = CONVENTION_B
    """By which rule ``cp_size`` and ``cp_rank`` follow from the parallel sizes: see ``parallel.py``."""
    groups: Annotated[tuple[CacheGroup, ...], Many] = ()
    """The KV cache groups that regions name by their numbers; empty: one, of ``block_size`` tokens."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Numbers of the layers held, ascending, each once."""
        return tuple(sorted({region.layer for region in self.regions}))

    def group(self, number: int) -> CacheGroup:
        """Return a KV cache group. Raises ``ValueError`` if there is none of this number."""
        if not self.groups and number == 0:
            return CacheGroup(self.block_size)
        if not 0 <= number < len(self.groups):
            raise ValueError(f"there is no KV cache group {number}, but {max(len(self.groups), 1)}")
        return self.groups[number]

    @property
    def virtual_block_size(self) -> int:
        """Tokens that one block id of a request stands for: all ranks of an engine have the same ids."""
        return self.block_size * self.cp_size


class RankEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One rank in its engine's directory."""

    rank: Rank
    """Place in the engine: ``(pp_rank * pcp_size + pcp_rank) * tp_size + tp_rank``."""
    host: Name
    port: Port
    """The rank's side channel."""
    incarnation: Name
    """Drawn at random at each start of the rank."""
    data_address: Name
    """``host:port`` by which the Mooncake engine of this rank is reached."""
    shard: Shard


class Directory(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's answer to "who are you": every rank, its addresses and its shard."""

    engine_id: Name
    model: Sentence
    """Fingerprint of what must be equal for the caches to mean the same: model, dtype, layers."""
    layout: Sentence
    """The layout in words, for messages to people: ``TP 2, GQA with 4 KV heads, block size 32``."""
    ranks: Annotated[tuple[RankEntry, ...], Ranks]


def layout_digest(directory: Directory) -> str:
    """Return the name under which a directory is known: a hash of its encoded form."""
    return hashlib.blake2b(msgspec.msgpack.encode(directory), digest_size=16).hexdigest()
