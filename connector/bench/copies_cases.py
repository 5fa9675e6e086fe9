"""The memory layouts of ``dfirst bench copies``: how caches lie in memory, and how blocks are spread."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ...protocol.modes import BLOCKWISE, LAYERWISE
from ...protocol.shards import Region, Shard

KIB = 1024
LAYERS = 8
HEAD_BYTES = 256
"""Content of one head and token: K and V of 64 16-bit numbers."""
LATENT_BYTES = 1152
"""MLA: 576 16-bit numbers."""
SPREAD = 2
"""A rank has so many times the blocks that a prompt takes."""


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    name: str
    mode: str
    block_size: int
    heads: int
    """KV heads of the model."""
    content_bytes: int
    prefill_tp: int = 1
    decode_tp: int = 1
    heads_inside: bool = False
    """Whether a token's heads lie side by side; otherwise a head's tokens do."""
    scattered: bool = True
    target: float = 0.9
    """The least ratio that is asked for."""
    layers: int = LAYERS

    @property
    def block_bytes(self) -> int:
        """Bytes of a block and region on a prefill rank."""
        return self.block_size * self.content_bytes * self.heads_of(self.prefill_tp)

    def heads_of(self, tp: int) -> int:
        """KV heads on a rank."""
        return max(self.heads // tp, 1)

    def blocks(self, size: int) -> int:
        """Blocks of a prompt whose cache takes about ``size`` bytes, of all heads and layers that move."""
        return max(size // (self.layers * self.block_size * self.content_bytes * self.moved_heads), 1)

    @property
    def moved_heads(self) -> int:
        """Heads that the decode ranks of this bench hold between them."""
        return self.heads_of(self.decode_tp) * len(self.decode_ranks)

    def moved_bytes(self, blocks: int) -> int:
        """Bytes of a prompt of so many blocks that move in this bench."""
        return self.layers * blocks * self.block_size * self.content_bytes * self.moved_heads

    @property
    def prefill_ranks(self) -> range:
        """The prefill ranks that take part: those that the first decode ranks copy with."""
        return range(max(self.prefill_tp // self.decode_tp, 1))

    @property
    def decode_ranks(self) -> range:
        """The decode ranks that take part."""
        return range(max(self.decode_tp // self.prefill_tp, 1))

    def bytes_of_rank(self, tp: int, blocks: int) -> int:
        """Bytes of a rank's caches."""
        return self.layers * SPREAD * blocks * self.block_size * self.content_bytes * self.heads_of(tp)

    def shard(self, tp: int, rank: int, base: int, blocks: int) -> Shard:
        """Return a rank's shard, its caches one behind the other from ``base`` on."""
        heads, size, content = self.heads_of(tp), self.block_size, self.content_bytes
        block = size * heads * content
        head, token = (content, heads * content) if self.heads_inside else (size * content, content)
        count = SPREAD * blocks
        return Shard(
            total_kv_heads=self.heads,
            first_kv_head=rank * self.heads // tp,
            kv_head_count=heads,
            block_size=size,
            regions=tuple(
                Region(
                    layer,
                    "kv",
                    base + layer * count * block,
                    count,
                    block,
                    head,
                    token,
                    content,
                    tokens_sliceable=True,
                )
                for layer in range(self.layers)
            ),
        )

    def table(self, blocks: int, seed: int) -> tuple[int, ...]:
        """Return a prompt's blocks on one engine."""
        if not self.scattered:
            return tuple(range(blocks))
        return tuple(np.random.default_rng(seed).permutation(SPREAD * blocks)[:blocks].tolist())


def cases(quick: bool) -> Iterator[Case]:
    """Yield the rows; the quick ones are some of each kind."""
    for mode in (BLOCKWISE, LAYERWISE):
        yield from _equal(mode, quick)
        yield from _unequal(mode, quick)


def _equal(mode: str, quick: bool) -> Iterator[Case]:
    shapes = ((16, 4), (16, 16), (16, 64), (32, 32), (64, 64), (128, 128))
    for block_size, kib in shapes[::5] if quick else shapes:
        for scattered in (False, True):
            content = kib * KIB // block_size
            how = "scattered" if scattered else "contiguous"
            name = f"{mode} TP 1 to 1, {block_size} tokens, {kib} KiB, {how}"
            yield Case(name, mode, block_size, 1, content, scattered=scattered)
    yield Case(f"{mode} MLA, 16 tokens, 18 KiB, scattered", mode, 16, 1, LATENT_BYTES)


def _unequal(mode: str, quick: bool) -> Iterator[Case]:
    for prefill_tp, decode_tp in ((4, 2), (2, 4)):
        for inside in (False, True):
            for block_size in (16,) if quick else (16, 128):
                where = "heads inside" if inside else "heads outside"
                name = f"{mode} TP {prefill_tp} to {decode_tp}, {block_size} tokens, {where}"
                yield Case(
                    f"{name}, scattered",
                    mode,
                    block_size,
                    8,
                    HEAD_BYTES,
                    prefill_tp,
                    decode_tp,
                    inside,
                    target=0.7,
                )
    if not quick:
        for prefill_tp, decode_tp in ((4, 2), (2, 4)):
            name = f"{mode} TP {prefill_tp} to {decode_tp}, 16 tokens, heads inside, contiguous"
            yield Case(
                name, mode, 16, 8, HEAD_BYTES, prefill_tp, decode_tp, True, scattered=False, target=0.7
            )
