"""An engine's ranks, put together by what they hold: layers, KV heads, a share of the tokens.

Ranks with the same layers, heads and share are replicas and form one holding. The holdings of an engine have
nothing in common and together are the whole cache: ``pairing.py`` refuses an engine for which that is not so.
"""

from collections import defaultdict
from typing import NamedTuple

from .shards import Directory, Shard


class HeadRange(NamedTuple):
    """KV heads of the model, by their numbers."""

    first: int
    end: int
    """The head behind the last one."""

    def __str__(self) -> str:
        last = self.end - 1
        return f"KV head {last}" if last == self.first else f"KV heads {self.first} to {last}"


class Holding(NamedTuple):
    """What some ranks hold alike."""

    layers: tuple[int, ...]
    """Numbers in the whole model, ascending."""
    heads: HeadRange
    cp_rank: int
    ranks: tuple[int, ...]
    """Ascending. More than one: replicas."""


def heads_of(shard: Shard) -> HeadRange:
    """Return the heads that a shard holds."""
    return HeadRange(shard.first_kv_head, shard.first_kv_head + shard.kv_head_count)


def holdings_of(directory: Directory) -> tuple[Holding, ...]:
    """Return an engine's holdings, by layers, heads and share."""
    found: dict[tuple[tuple[int, ...], HeadRange, int], list[int]] = defaultdict(list)
    for entry in directory.ranks:
        shard = entry.shard
        found[shard.layers, heads_of(shard), shard.cp_rank].append(entry.rank)
    return tuple(Holding(*held, tuple(sorted(ranks))) for held, ranks in sorted(found.items()))
