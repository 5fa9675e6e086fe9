"""Feeds the layers of pushed prompts to the data path as they are computed.

A push has legs, and a leg may be lent before or after the layers that it needs are computed; what is
computed early is kept here and sent when the leg opens. Only tokens of blocks that a chunk completes are
sent, on all ranks alike, and the rest when the prompt is complete, so nothing is sent twice unless a
preempted prompt is computed again.

A leg ends well only if every layer of every chunk was handed over. What cannot be handed over, or was not
computed where vLLM says it was, stops the leg: the decode side then computes the prompt itself.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from ..protocol.commands import LegKey
from ..protocol.copies import Copies, TokenCopies
from ..protocol.effects import StartCopies
from ..protocol.messages import TransferKey
from ..protocol.shards import Shard
from ..protocol.tokens import blocks_needed
from .own_memory import OwnMemory
from .step import Chunk

logger = logging.getLogger(__name__)

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
    def stop(self, key: str) -> None: ...


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
    """The request's, from its first token on."""
    tokens: range


@dataclass(frozen=True)
class _Planned:
    leg: StartCopies
    block_ids: tuple[int, ...]
    tokens: range
    copies: TokenCopies


@dataclass
class _Feed:
    """One prompt."""

    cached_tokens: int = 0
    """Tokens at its start that the decode side has."""
    sent_tokens: int = 0
    """Tokens at its start whose layers were all handed over."""
    pieces: list[_Piece] = field(default_factory=list)
    """What legs that open later still need."""
    legs: dict[LegKey, StartCopies] = field(default_factory=dict)
    planned: dict[LegKey, _Planned] = field(default_factory=dict)
    """Of each leg, what was pushed last: the next layer's runs are nearly the same."""
    complete: bool = False
    """All is handed over: no more pieces come."""
    broken: str = ""
    """Why its legs cannot end well."""


@dataclass(frozen=True)
class _Part:
    """What the present step computes of one prompt."""

    chunk: Chunk
    feed: _Feed
    tokens: range
    """What can be sent after it and was not sent before."""


class PushFeed:
    """All pushed prompts of a rank. Used by one thread."""

    def __init__(self, shard: Shard, pushes: Pushes, may_start: Callable[[str], bool]) -> None:
        self._shard = shard
        self._own_memory = OwnMemory(shard)
        self._layers = frozenset(shard.layers)
        self._pushes = pushes
        self._may_start = may_start
        self._feeds: dict[TransferKey, _Feed] = {}
        self._step: list[_Part] = []
        self._computed: set[int] = set()
        """Layers of this step that were written."""

    def started(self, key: TransferKey, cached_tokens: int) -> None:
        """A prompt will be pushed; the decode side has its first ``cached_tokens``."""
        self._feeds.setdefault(key, _Feed(cached_tokens=cached_tokens, sent_tokens=cached_tokens))

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
            feed.sent_tokens = feed.cached_tokens
            for leg in feed.legs:
                self._pushes.drop_queued(leg_name(leg))
            if feed.complete:
                # These legs are closed already and end as they are. Later ones get what is computed anew.
                feed.legs.clear()
                feed.complete = False

    def step_began(self, chunks: Iterable[Chunk]) -> None:
        """A forward pass begins that computes these chunks."""
        self._computed.clear()
        self._step = []
        for chunk in chunks:
            feed = self._feeds.get(chunk.key)
            if feed is not None and not feed.complete and not feed.broken:
                self._step.append(self._part(chunk, feed))

    def layer_computed(self, layer: Layer) -> None:
        """The pass has written this layer's cache, for all its chunks."""
        self._computed.add(layer.number)
        for part in self._step:
            if part.tokens:
                piece = _Piece(layer, part.chunk.block_ids, part.tokens)
                part.feed.pieces.append(piece)
                for leg in part.feed.legs.values():
                    self._push(part.feed, leg, piece)

    def step_ended(self) -> None:
        """The pass has written all layers."""
        missing = sorted(self._layers - self._computed)
        for part in self._step:
            feed = part.feed
            feed.sent_tokens = part.tokens.stop
            if missing:
                self._break(part, f"vLLM did not say that layers {missing} were computed")
            elif part.tokens and len(part.chunk.block_ids) < blocks_needed(self._shard, part.tokens.stop):
                self._break(
                    part, f"{len(part.chunk.block_ids)} blocks cannot hold {part.chunk.end_token} tokens"
                )
            elif part.chunk.last:
                feed.complete = True
                for leg in feed.legs:
                    self._pushes.close_push(leg_name(leg))
        self._step = []

    def leg_opened(self, started: StartCopies) -> None:
        """A leg's blocks are lent: send what is computed already, the rest as it comes.

        Raises ``ValueError``, before anything is sent, if the prompt cannot be pushed or if fewer blocks were
        lent than it has.
        """
        key, name = started.leg.key, leg_name(started.leg)
        feed = self._feeds.get(key)
        if feed is None or feed.broken:
            raise ValueError(feed.broken if feed else "no such prompt is pushed here")
        end = blocks_needed(started.peer.shard, started.prompt_tokens)
        if len(started.remote_blocks) < end:
            raise ValueError(f"{len(started.remote_blocks)} blocks were lent where the prompt has {end}")
        early = [(piece, self._copies(feed, started, piece)) for piece in feed.pieces]
        self._pushes.open_push(name, started.peer.data_address, self._may_start)
        feed.legs[started.leg] = started
        for piece, moved in early:
            self._pushes.push(name, moved, piece.layer.after, piece.layer.ready)
        if feed.complete:
            self._pushes.close_push(name)

    def _part(self, chunk: Chunk, feed: _Feed) -> _Part:
        # A block that is not full yet waits: it moves in fewer runs when it is, or must move whole.
        end = (
            chunk.end_token
            if chunk.last
            else chunk.end_token - chunk.end_token % self._shard.virtual_block_size
        )
        return _Part(chunk, feed, range(feed.sent_tokens, max(end, feed.sent_tokens)))

    def _break(self, part: _Part, reason: str) -> None:
        logger.error("%s: the push ends: %s", part.chunk.key.transfer_id, reason)
        part.feed.broken = reason
        part.feed.pieces.clear()
        for leg in part.feed.legs:
            self._pushes.stop(leg_name(leg))

    def _push(self, feed: _Feed, leg: StartCopies, piece: _Piece) -> None:
        name = leg_name(leg.leg)
        try:
            self._pushes.push(name, self._copies(feed, leg, piece), piece.layer.after, piece.layer.ready)
        except Exception:
            # A leg that misses a piece must not end well; the others go on.
            logger.exception("%s: layer %d cannot be pushed", name, piece.layer.number)
            self._pushes.stop(name)

    def _copies(self, feed: _Feed, leg: StartCopies, piece: _Piece) -> Copies:
        planned = feed.planned.get(leg.leg)
        wanted = (piece.block_ids, piece.tokens)
        if planned is None or planned.leg is not leg or (planned.block_ids, planned.tokens) != wanted:
            found = TokenCopies(
                leg.plan, self._shard, leg.peer.shard, piece.block_ids, leg.remote_blocks, piece.tokens
            )
            planned = feed.planned[leg.leg] = _Planned(leg, *wanted, found)
        moved = planned.copies.of([piece.layer.number])
        self._own_memory.check(moved.source_addresses, moved.lengths)
        return moved


def leg_name(leg: LegKey) -> str:
    """Return what the data path calls a leg."""
    key = leg.key
    return f"{key.transfer_id}.{key.attempt}>{leg.engine_id}/{leg.rank}/{leg.incarnation}"
