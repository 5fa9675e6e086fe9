"""Feeds the layers of pushed prompts to the data path as they are computed.

A push has legs, and a leg may be lent before or after the layers that it needs are computed; what is
computed early is kept here and sent when the leg opens. Only blocks that a chunk completes are sent, and
the last one of the prompt, so nothing is sent twice unless a preempted prompt is computed again.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ..protocol.commands import LegKey
from ..protocol.copies import Copies, copies
from ..protocol.effects import StartCopies
from ..protocol.messages import TransferKey
from ..protocol.shards import Shard
from .step import Chunk

Wait = Callable[[], None]


class Pushes(Protocol):
    """The part of the data path that a feed uses."""

    def open_push(self, key: str, peer: str, may_start: Callable[[str], bool] | None = None) -> None: ...
    def push(
        self,
        key: str,
        copies: Copies,
        after: Wait | None = None,
        ready: Callable[[], bool] | None = None,
    ) -> None: ...
    def drop_queued(self, key: str) -> None: ...
    def close_push(self, key: str) -> None: ...


@dataclass(frozen=True)
class Layer:
    """A layer that a step has computed, and how to wait for the device to have written it."""

    number: int
    after: Wait | None = None
    ready: Callable[[], bool] | None = None


@dataclass
class _Piece:
    layer: Layer
    block_ids: tuple[int, ...]
    first_block: int


@dataclass
class _Feed:
    """One prompt."""

    cached_blocks: int = 0
    """Blocks at its start that the decode side has."""
    sent_blocks: int = 0
    """Blocks at its start whose layers were all handed over."""
    pieces: list[_Piece] = field(default_factory=list)
    """What legs that open later still need."""
    legs: dict[LegKey, StartCopies] = field(default_factory=dict)
    complete: bool = False


class PushFeed:
    """All pushed prompts of a rank. Used by one thread."""

    def __init__(self, shard: Shard, pushes: Pushes, may_start: Callable[[str], bool]) -> None:
        self._shard = shard
        self._pushes = pushes
        self._may_start = may_start
        self._feeds: dict[TransferKey, _Feed] = {}
        self._step: list[tuple[Chunk, _Feed, int]] = []

    def started(self, key: TransferKey, cached_tokens: int) -> None:
        """A prompt will be pushed; the decode side has its first ``cached_tokens``."""
        cached_blocks = cached_tokens // self._shard.block_size
        self._feeds.setdefault(key, _Feed(cached_blocks=cached_blocks, sent_blocks=cached_blocks))

    def ended(self, key: TransferKey) -> None:
        """The prompt's pushes are over, well or not."""
        self._feeds.pop(key, None)

    def preempted(self, keys: Iterable[TransferKey]) -> None:
        """These prompts' blocks belong to others now: forget what was not sent, and begin anew."""
        for key in keys:
            feed = self._feeds.get(key)
            if feed is None:
                continue
            feed.pieces.clear()
            feed.sent_blocks = feed.cached_blocks
            for leg in feed.legs:
                self._pushes.drop_queued(leg_name(leg))

    def step_began(self, chunks: Iterable[Chunk]) -> None:
        """A forward pass begins that computes these chunks."""
        self._step = []
        for chunk in chunks:
            feed = self._feeds.get(chunk.key)
            if feed is None or feed.complete:
                continue
            whole, rest = divmod(chunk.end_token, self._shard.block_size)
            end_block = whole + (1 if rest and chunk.last else 0)
            self._step.append((chunk, feed, max(end_block, feed.sent_blocks)))

    def layer_computed(self, layer: Layer) -> None:
        """The pass has written this layer's cache, for all its chunks."""
        for chunk, feed, end_block in self._step:
            blocks = chunk.block_ids[feed.sent_blocks : end_block]
            if blocks:
                piece = _Piece(layer, blocks, feed.sent_blocks)
                feed.pieces.append(piece)
                for leg in feed.legs.values():
                    self._push(leg, piece)

    def step_ended(self) -> None:
        """The pass has written all layers."""
        for chunk, feed, end_block in self._step:
            feed.sent_blocks = end_block
            if chunk.last:
                feed.complete = True
                for leg in feed.legs:
                    self._pushes.close_push(leg_name(leg))
        self._step = []

    def leg_opened(self, started: StartCopies) -> None:
        """A leg's blocks are lent: send what is computed already, the rest as it comes."""
        feed = self._feeds.setdefault(started.leg.key, _Feed())
        feed.legs[started.leg] = started
        self._pushes.open_push(leg_name(started.leg), started.peer.data_address, self._may_start)
        for piece in feed.pieces:
            self._push(started, piece)
        if feed.complete:
            self._pushes.close_push(leg_name(started.leg))

    def _push(self, leg: StartCopies, piece: _Piece) -> None:
        if piece.layer.number not in leg.plan.layers:
            return
        end = piece.first_block + len(piece.block_ids)
        moved = copies(
            leg.plan,
            self._shard,
            leg.peer.shard,
            np.asarray(piece.block_ids, dtype=np.int64),
            np.asarray(leg.remote_blocks[piece.first_block : end], dtype=np.int64),
            [piece.layer.number],
        )
        self._pushes.push(leg_name(leg.leg), moved, piece.layer.after, piece.layer.ready)


def leg_name(leg: LegKey) -> str:
    """Return what the data path calls a leg."""
    key = leg.key
    return f"{key.transfer_id}.{key.attempt}>{leg.engine_id}/{leg.rank}/{leg.incarnation}"
