"""The caches of an engine as plain memory, with a known value for every byte of KV and a pattern elsewhere.

A cache is one array with the axes layer, part (K or V, or both in one), block, head and token in any order,
with padding along each. Only the arrays' own strides tell where things lie, as in what vLLM hands over.
"""

from dataclasses import dataclass, field
from functools import cache

import numpy as np
import numpy.typing as npt

from .definition import Group, Parallel

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]

UNTOUCHED = 255
"""Fills the decode side before anything is copied."""
FOREIGN = 254
"""Fills prefill blocks of other requests."""
BEHIND = 253
"""Fills the slots behind the prompt's end in prefill blocks of the request, and what is not computed yet."""
PADDING = 252
"""Fills what lies between the blocks, heads and tokens of the prefill side."""
VALUES = 251
"""Values of KV bytes lie below this."""


@dataclass(frozen=True)
class Part:
    """One tensor of a layer."""

    name: str
    key_bytes: int
    """Bytes of K of one (head, token)."""
    value_bytes: int = 0
    """Bytes of V behind them, where both share the tensor."""

    @property
    def content_bytes(self) -> int:
        return self.key_bytes + self.value_bytes


@dataclass(frozen=True)
class Form:
    """How an engine lays its caches out in memory."""

    parts: tuple[Part, ...] = (Part("kv", 2, 2),)
    order: str = "LPBHT"
    """Axes from outside in: layer, part, block, head, token."""
    padding: tuple[int, int, int, int, int, int] = (0, 0, 0, 0, 0, 0)
    """Extra entries along the axes of ``order``, and extra bytes behind the content."""
    block_count: int = 8
    sliceable: bool = True
    """False: K is stored dim-major inside a (block, head) slab, V token-major behind it."""
    shared: bool = False
    """The groups' layers share the same bytes; their block ids then differ."""


def value_of(layer: int, part: int, head: int, token: Ints, element: Ints) -> Bytes:
    """Return the known value of one byte: below ``VALUES``, and another one for any other place."""
    place = ((layer * 64 + part) * 64 + head + 1) * 0x9E3779B97F4A7C15 % 2**64
    mixed = (token.astype(np.uint64) + np.uint64(1)) * np.uint64(0xC2B2AE3D27D4EB4F) ^ np.uint64(place)
    mixed = mixed + (element.astype(np.uint64) + np.uint64(1)) * np.uint64(0xA0761D6478BD642F)
    mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0xE7037ED1A0B428DB)
    return ((mixed ^ (mixed >> np.uint64(29))) % np.uint64(VALUES)).astype(np.uint8)


class KnownValues:
    """The KV bytes of a prompt, computed once for all ranks of both engines."""

    def __init__(self, heads: int, tokens: int, parts: tuple[Part, ...]) -> None:
        self._heads, self._tokens, self._parts = heads, tokens, parts
        self._known: dict[tuple[int, int], Bytes] = {}

    def of(self, layer: int, part: int) -> Bytes:
        """Return (heads, tokens, content) bytes of one tensor of one layer."""
        found = self._known.get((layer, part))
        if found is None:
            token = np.arange(self._tokens, dtype=np.int64)[:, None]
            element = np.arange(self._parts[part].content_bytes, dtype=np.int64)[None, :]
            found = np.stack([value_of(layer, part, head, token, element) for head in range(self._heads)])
            self._known[layer, part] = found
        return found


@dataclass(frozen=True)
class Tensor:
    """One tensor of one layer of a rank: where it is, and how its tokens lie inside a block."""

    layer: int
    group: int
    part: int
    view: Bytes = field(repr=False)
    """(blocks, heads, tokens, content), strided."""
    form: Part
    sliceable: bool

    def put(self, blocks: Ints, slots: Ints, content: Bytes) -> None:
        """Write ``content`` (heads, tokens, content bytes) at these (block, slot) places."""
        if self.sliceable:
            self.view[blocks, :, slots, :] = content.transpose(1, 0, 2)
            return
        offsets = slab_offsets(self.view.shape[2], self.form.key_bytes, self.form.value_bytes)
        self._slabs[blocks[:, None], :, offsets[slots]] = content.transpose(1, 2, 0)

    def fill(self, blocks: Ints, slots: Ints, pattern: int) -> None:
        """Write one value over these places."""
        shape = (self.view.shape[1], len(blocks), self.form.content_bytes)
        self.put(blocks, slots, np.full(shape, pattern, dtype=np.uint8))

    @property
    def _slabs(self) -> Bytes:
        """(blocks, heads, bytes of a slab): a view, since a slab is contiguous."""
        count, heads, tokens, content = self.view.shape
        strides = (self.view.strides[0], self.view.strides[1], 1)
        return np.lib.stride_tricks.as_strided(self.view, (count, heads, tokens * content), strides)


@cache
def slab_offsets(tokens: int, keys: int, values: int) -> Ints:
    """Return where in a slab the bytes of each slot lie: (slots, content). K is dim-major, V token-major."""
    return np.array(
        [
            [dim * tokens + slot for dim in range(keys)]
            + [tokens * keys + slot * values + dim for dim in range(values)]
            for slot in range(tokens)
        ],
        dtype=np.int64,
    )


@dataclass(frozen=True)
class RankMemory:
    """Everything that one rank has."""

    rank: int
    arena: Bytes = field(repr=False)
    tensors: tuple[Tensor, ...]

    @property
    def base(self) -> int:
        """Address of the first byte."""
        return int(self.arena.ctypes.data)


def build_rank(parallel: Parallel, form: Form, rank: int, background: int) -> RankMemory:
    """Return the memory of a rank, ``background`` in all of it."""
    layers = parallel.layers_of(rank)
    held = [tuple(layer for layer in group.layers if layer in layers) for group in parallel.groups]
    shapes = [
        (max(map(len, held)) if form.shared else len(mine), group)
        for mine, group in zip(held, parallel.groups, strict=True)
    ]
    sizes = [_padded(parallel, form, rank, group, count) for count, group in shapes]
    if form.shared:
        sizes = sizes[:1]
    arena = np.full(sum(int(np.prod(size)) for size in sizes), background, dtype=np.uint8)
    tensors: list[Tensor] = []
    start = 0
    for number, (mine, group) in enumerate(zip(held, parallel.groups, strict=True)):
        size = sizes[0 if form.shared else number]
        whole = arena[0 if form.shared else start :][: int(np.prod(size))].reshape(size)
        start += int(np.prod(size))
        by_axis = whole.transpose(*[form.order.index(axis) for axis in "LPBHT"], 5)
        for place, layer in enumerate(mine):
            for index, part in enumerate(form.parts):
                view = by_axis[place, index, : form.block_count, : len(parallel.heads_of(rank))]
                view = view[:, :, : group.block_size, : part.content_bytes]
                tensors.append(Tensor(layer, number, index, view, part, form.sliceable))
    return RankMemory(rank, arena, tuple(tensors))


def _padded(parallel: Parallel, form: Form, rank: int, group: Group, layers: int) -> tuple[int, ...]:
    extent = {
        "L": layers,
        "P": len(form.parts),
        "B": form.block_count,
        "H": len(parallel.heads_of(rank)),
        "T": group.block_size,
    }
    content = max(part.content_bytes for part in form.parts)
    sizes = [extent[axis] + extra for axis, extra in zip(form.order, form.padding, strict=False)]
    return (*sizes, content + form.padding[5])
