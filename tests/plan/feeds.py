"""Prompts pushed by the connector's own feeds, whose pieces are copied at once in memory.

Chunks may end anywhere: what to send after each is the feed's business.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from dfirst.connector.push_feed import Layer, PushFeed, leg_name
from dfirst.connector.step import Chunk
from dfirst.protocol.commands import LegKey
from dfirst.protocol.copies import Copies
from dfirst.protocol.effects import StartCopies
from dfirst.protocol.messages import TransferKey
from dfirst.protocol.modes import LAYERWISE

from .definition import Parallel
from .judge import Move, Wrong, begin, check_arrived, check_words
from .memory import KnownValues, RankMemory
from .request import Engine, Request, Side, directory, mark_blocks, write_tokens


@dataclass
class MemoryPushes:
    """Stands where the data path is: copies each piece when it is handed over."""

    move: Move
    prefill_rank: int
    targets: dict[str, int] = field(default_factory=dict)
    """The decode rank of each leg."""
    open: set[str] = field(default_factory=set)
    carried: dict[str, int] = field(default_factory=dict)
    """Bytes of each leg."""

    def open_push(self, key: str, peer: str, may_start: Callable[[str], bool] | None = None) -> None:
        self.open.add(key)

    def push(
        self,
        key: str,
        copies: Copies,
        after: Callable[[], None] | None = None,
        ready: Callable[[], bool] | None = None,
    ) -> None:
        if key not in self.open:
            raise Wrong(f"{key} is written to after its end")
        moved = self.move.perform(copies, self.prefill_rank, self.targets[key])
        self.carried[key] = self.carried.get(key, 0) + moved

    def drop_queued(self, key: str) -> None:
        raise Wrong(f"{key}: nothing is preempted here")

    def close_push(self, key: str) -> None:
        self.open.remove(key)

    def stop(self, key: str) -> None:
        raise Wrong(f"{key} was stopped")


class PushingEngine:
    """A prefill engine that computes prompts in steps and pushes them."""

    def __init__(self, prefill: Side, decode: Side, request: Request, *more: Request) -> None:
        longest = max((request, *more), key=lambda one: one.tokens)
        self.move = begin(prefill, decode, request, computed=False)
        self.move.values = KnownValues(prefill.parallel.heads, longest.tokens, prefill.form.parts)
        for other in more:
            mark_blocks(self.move.prefill, other)
        self.pushes = [MemoryPushes(self.move, memory.rank) for memory in self.move.prefill.ranks]
        self.feeds = [
            PushFeed(self.move.prefill_shards[pushes.prefill_rank], pushes, lambda _: True)
            for pushes in self.pushes
        ]
        self._peers = {entry.rank: entry for entry in directory(self.move.decode, "D").ranks}

    def start(self, request: Request) -> None:
        """Make a prompt known; no leg is lent yet."""
        for feed in self.feeds:
            feed.started(TransferKey(request.transfer_id, 0), request.cached)

    def lend(self, request: Request) -> None:
        """Let every decode rank lend its blocks to those that write to it."""
        key = TransferKey(request.transfer_id, 0)
        plan = self.move.pair.request(request.transfer_id, request.tokens, request.cached)
        for leg in plan.legs:
            peer = self._peers[leg.decode_rank]
            named = LegKey(key, "D", leg.decode_rank, peer.incarnation)
            self.pushes[leg.prefill_rank].targets[leg_name(named)] = leg.decode_rank
            self.feeds[leg.prefill_rank].leg_opened(
                StartCopies(
                    leg=named,
                    mode=LAYERWISE,
                    plan=leg,
                    peer=peer,
                    local_blocks=(),
                    remote_blocks=request.decode_blocks[0],
                    prompt_tokens=request.tokens,
                    cached_tokens=request.cached,
                )
            )

    def step(self, parts: Iterable[tuple[Request, int, int]]) -> None:
        """Compute tokens [first, end) of each of these prompts, all layers, in one forward pass."""
        parts = list(parts)
        for memory, feed in zip(self.move.prefill.ranks, self.feeds, strict=True):
            parallel = self.move.prefill.side.parallel
            feed.step_began([_chunk(request, parallel, end) for request, _, end in parts])
            for layer in parallel.layers_of(memory.rank):
                for request, first, end in parts:
                    self._compute(memory, request, first, end, layer)
                feed.layer_computed(Layer(layer))
            feed.step_ended()

    def _compute(self, memory: RankMemory, request: Request, first: int, end: int, layer: int) -> None:
        rank, layers = Engine(self.move.prefill.side, (memory,)), frozenset({layer})
        write_tokens(rank, request.prefill_blocks, self.move.values, first, end, layers)

    def check(self, *requests: Request) -> None:
        """Everything has arrived, and every leg was closed."""
        for pushes in self.pushes:
            if pushes.open:
                raise Wrong(f"prefill rank {pushes.prefill_rank} did not end {pushes.open}")
        check_arrived(self.move, *(one for one in requests if one != self.move.request))


def _chunk(request: Request, parallel: Parallel, end: int) -> Chunk:
    blocks = -(-end // parallel.virtual_block(parallel.groups[0]))
    return Chunk(
        key=TransferKey(request.transfer_id, 0),
        block_ids=request.prefill_blocks[0][:blocks],
        end_token=end,
        last=end == request.tokens,
    )


def push_with_feeds(
    prefill: Side, decode: Side, request: Request, chunk_ends: Sequence[int], lent_before_chunk: int
) -> None:
    """Push a prompt chunk by chunk; its legs are lent before the chunk of that number, or after the last."""
    engine = PushingEngine(prefill, decode, request)
    engine.start(request)
    first = 0
    for number, end in enumerate(chunk_ends):
        if number == lent_before_chunk:
            engine.lend(request)
        engine.step([(request, first, end)])
        first = end
    if lent_before_chunk >= len(chunk_ends):
        engine.lend(request)
    engine.check(request)
    carried = {
        (pushes.prefill_rank, pushes.targets[name]): moved
        for pushes in engine.pushes
        for name, moved in pushes.carried.items()
    }
    check_words(engine.move, carried)


def with_id(request: Request, transfer_id: str, shift: int, block_count: int) -> Request:
    """Return another request of the same size in other blocks."""
    return replace(
        request,
        transfer_id=transfer_id,
        prefill_blocks=tuple(
            tuple((block + shift) % block_count for block in table) for table in request.prefill_blocks
        ),
        decode_blocks=tuple(
            tuple((block + shift) % block_count for block in table) for table in request.decode_blocks
        ),
    )
