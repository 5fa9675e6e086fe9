"""``dfirst bench core``: the control plane alone: CPU, messages and memory of a transfer; the planner.

Messages arrive at once and copies end at once, so that nothing but the core is measured. Of several rounds
the fastest counts: others may use the CPU too.
"""

import gc
import statistics
import time
import tracemalloc
from collections.abc import Iterator

import msgspec
from dfirst.protocol import commands
from dfirst.protocol.commands import (
    Collected,
    CopyEnded,
    CoreEvent,
    MessageReceived,
    RemoteEngine,
    remote_of,
)
from dfirst.protocol.copies import copies
from dfirst.protocol.effects import Effect, Reply, Report, Send, StartCopies
from dfirst.protocol.messages import Sender, TransferKey
from dfirst.protocol.modes import BLOCKWISE, MODES
from dfirst.protocol.plan import plan_pair
from dfirst.protocol.rank import RankCore
from dfirst.protocol.shards import Directory, RankEntry, Shard
from dfirst.protocol.timing import Timing
from dfirst.spec import bench_plan

BLOCK_SIZE, LAYERS, CONTENT_BYTES = 16, 32, 512
TOKENS = 1_000
LEGS = (1, 2, 4, 8)
IN_FLIGHT, QUICK_IN_FLIGHT = (1, 100, 1_000, 10_000), (1, 100, 1_000)
PLANNED, QUICK_PLANNED = (1_000, 10_000, 100_000, 1_000_000), (1_000, 10_000, 100_000)
ROUNDS, QUICK_ROUNDS, TRANSFERS = 7, 3, 200
FEW_IN_FLIGHT = 100
FIRST_BLOCK = 1_000
MOST_TRANSFER_US, MOST_LEG_US, MOST_BYTES, MOST_TIMES = 300.0, 60.0, 4096.0, 1.2
MOVER, OWNER = "mover", "owner"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured, and the most that is asked for (0: no limit)."""

    name: str
    measured: float
    unit: str
    at_most: float = 0.0

    @property
    def ratio(self) -> float | None:
        """The share of what is allowed."""
        return self.measured / self.at_most if self.at_most else None


class _Silent:
    """Nobody listens."""

    def stepped(self, entity: object, row: object, source: str) -> None: ...
    def unheard(self, entity: object, event: str, expected: bool) -> None: ...


class _Engines:
    """A mover's engine of one rank, and an owner's of as many as there are legs."""

    def __init__(self, mode: str, legs: int) -> None:
        self.mode = mode
        self._mover, self._owner = ("D", "P") if mode == BLOCKWISE else ("P", "D")
        ranks = {self._mover: 1, self._owner: legs}
        self.directories = {name: engine(name, count, 8, 1 << 16) for name, count in ranks.items()}
        self._remotes = {name: remote_of(directory) for name, directory in self.directories.items()}
        self.cores: dict[str, RankCore] = {}
        for name, directory in self.directories.items():
            for entry in directory.ranks:
                core = RankCore(Timing(), Sender(name, entry.rank, entry.incarnation), _Silent())
                core.handle(commands.DirectoryKnown(directory), 1.0)
                core.peers.learn(self.directories["D" if name == "P" else "P"])
                self.cores[f"{name}{entry.rank}"] = core
        self.spent = dict.fromkeys(self.cores, 0.0)
        self.messages = 0
        self.bytes = 0
        self.now = 1.0
        self._encoder = msgspec.msgpack.Encoder()

    def mover(self) -> str:
        """Return the name of the rank with all legs."""
        return f"{self._mover}0"

    def owner(self) -> str:
        """Return the name of one of the others."""
        return f"{self._owner}0"

    def transfer(self, name: str, ends: bool = True) -> None:
        """Run a transfer from its commands to its reports; or leave it when its copies have started."""
        key = TransferKey(name, 0)
        remote = self._remotes[self._owner]
        for rank in self._ranks(self._owner):
            self._give(rank, self._lending(key), ends)
        for rank in self._ranks(self._mover):
            self._give(rank, self._moving(key, remote), ends)
            if ends and self.mode != BLOCKWISE:
                self._give(rank, commands.FinishPush(key), ends)

    def pass_time(self) -> None:
        """Let a moment pass: what a rank's loop asks of its core at every turn."""
        self.now += 1e-6
        for rank, core in self.cores.items():
            started = time.thread_time()
            core.tick(self.now)
            core.next_deadline()
            self.spent[rank] += time.thread_time() - started

    def _ranks(self, name: str) -> list[str]:
        return [rank for rank in self.cores if rank.startswith(name)]

    def _lending(self, key: TransferKey) -> CoreEvent:
        if self.mode == BLOCKWISE:
            return commands.OfferBlocks(key=key, request_id="p", block_ids=_blocks(), prompt_tokens=TOKENS)
        return commands.AcceptPush(
            key=key, request_id="d", block_ids=_blocks(), prompt_tokens=TOKENS, cached_tokens=0
        )

    def _moving(self, key: TransferKey, remote: RemoteEngine) -> CoreEvent:
        if self.mode == BLOCKWISE:
            return commands.StartPull(
                key=key,
                request_id="d",
                remote=remote,
                block_ids=_blocks(),
                prompt_tokens=TOKENS,
                cached_tokens=0,
            )
        return commands.StartPush(
            key=key, request_id="p", remote=remote, prompt_tokens=TOKENS, cached_tokens=0
        )

    def _give(self, rank: str, event: CoreEvent, ends: bool) -> None:
        started = time.thread_time()
        effects = self.cores[rank].handle(event, self.now)
        self.spent[rank] += time.thread_time() - started
        for effect in effects:
            self._carry_out(rank, effect, ends)

    def _carry_out(self, rank: str, effect: Effect, ends: bool) -> None:
        if isinstance(effect, Send | Reply):
            self.messages += 1
            sent = self._encoder.encode(effect.message)
            self.bytes += len(sent)
            target = f"{effect.host}{effect.port - 1}" if isinstance(effect, Send) else effect.route.decode()
            # As it would arrive: made anew, not shared with its sender.
            message = msgspec.msgpack.decode(sent, type=type(effect.message))
            self._give(target, MessageReceived(message, rank.encode()), ends)
        elif isinstance(effect, StartCopies) and ends:
            self._give(rank, CopyEnded(effect.leg, True, ""), ends)
        elif isinstance(effect, Report):
            self._give(rank, Collected(effect.key), ends)


def engine(name: str, ranks: int, heads: int, blocks: int) -> Directory:
    """Return an engine of so many ranks that split the heads between them."""
    entries = []
    for rank in range(ranks):
        count = heads // ranks
        shard = Shard(
            total_kv_heads=heads,
            first_kv_head=rank * count,
            kv_head_count=count,
            block_size=BLOCK_SIZE,
            regions=bench_plan.regions(range(LAYERS), blocks, BLOCK_SIZE, count, CONTENT_BYTES),
        )
        entries.append(
            RankEntry(
                rank=rank,
                host=name,
                port=rank + 1,
                incarnation=f"{name}{rank}",
                data_address=f"{name}:{rank}",
                shard=shard,
            )
        )
    return Directory(engine_id=name, model="m", layout=f"TP {ranks}", ranks=tuple(entries))


def _blocks() -> tuple[int, ...]:
    """Made anew for each command, as they are where commands are read from a message."""
    return tuple(range(FIRST_BLOCK, FIRST_BLOCK + -(-TOKENS // BLOCK_SIZE)))


def rows(quick: bool) -> Iterator[Row]:
    """Yield every row."""
    rounds = QUICK_ROUNDS if quick else ROUNDS
    for mode in MODES:
        yield from _of_legs(mode, rounds)
        yield from _beside_others(mode, QUICK_IN_FLIGHT if quick else IN_FLIGHT, rounds)
        yield from _memory(mode, 300 if quick else 2_000)
    yield from _planner(QUICK_PLANNED if quick else PLANNED, rounds)
    for name, meeting, leg in bench_plan.measured():
        yield Row(name=f"planner: {name}: the engines meet", measured=meeting, unit="ms")
        yield Row(
            name=f"planner: {name}: a leg of {bench_plan.TOKENS:,} tokens, {bench_plan.LAYERS} layers",
            measured=leg,
            unit="ms",
            at_most=bench_plan.LARGEST_MILLISECONDS,
        )


def _of_legs(mode: str, rounds: int) -> Iterator[Row]:
    spent: dict[int, float] = {}
    for legs in LEGS:
        best = {MOVER: float("inf"), OWNER: float("inf")}
        for _ in range(rounds):
            engines = _Engines(mode, legs)
            for number in range(TRANSFERS):
                engines.transfer(str(number))
            for part, rank in ((MOVER, engines.mover()), (OWNER, engines.owner())):
                best[part] = min(best[part], engines.spent[rank] / TRANSFERS * 1e6)
        spent[legs] = best[MOVER]
        if legs == 1:
            for part, micros in best.items():
                yield Row(
                    name=f"{mode}: a transfer of one leg, {part}",
                    measured=micros,
                    unit="us of CPU",
                    at_most=MOST_TRANSFER_US,
                )
            yield Row(name=f"{mode}: messages", measured=engines.messages / TRANSFERS, unit="a transfer")
            yield Row(
                name=f"{mode}: bytes of messages", measured=engines.bytes / TRANSFERS, unit="a transfer"
            )
        else:
            more = (spent[legs] - spent[1]) / (legs - 1)
            name = f"{mode}: each further leg, of {legs}"
            yield Row(name=name, measured=more, unit="us of CPU", at_most=MOST_LEG_US)


def _beside_others(mode: str, counts: tuple[int, ...], rounds: int) -> Iterator[Row]:
    """Turn about, so that a noisy neighbour meets all alike."""
    beside = {count: _busy(mode, count) for count in counts}
    spent: dict[int, list[float]] = {count: [] for count in counts}
    for turn in range(rounds):
        for count, engines in beside.items():
            before = sum(engines.spent.values())
            for number in range(TRANSFERS):
                engines.transfer(f"{turn}-{number}")
                engines.pass_time()
            spent[count].append((sum(engines.spent.values()) - before) / TRANSFERS * 1e6)
    for count in counts:
        name = f"{mode}: a transfer beside {count:,} in flight, both sides"
        yield Row(name=name, measured=min(spent[count]), unit="us of CPU", at_most=2 * MOST_TRANSFER_US)
    many = counts[-1]
    more = statistics.median(
        of_many / of_few for of_many, of_few in zip(spent[many], spent[FEW_IN_FLIGHT], strict=True)
    )
    name = f"{mode}: beside {many:,} against beside {FEW_IN_FLIGHT:,}"
    yield Row(name=name, measured=more, unit="times", at_most=MOST_TIMES)


def _busy(mode: str, count: int) -> _Engines:
    engines = _Engines(mode, 1)
    for number in range(count):
        engines.transfer(f"other-{number}", ends=False)
    return engines


def _memory(mode: str, count: int) -> Iterator[Row]:
    """What both cores keep, and the commands and messages that they keep parts of."""
    engines = _Engines(mode, 1)
    engines.transfer("first")
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(count):
            engines.transfer(f"other-{number}", ends=False)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    name = f"{mode}: memory of a transfer of {TOKENS:,} tokens in flight, a side"
    yield Row(name=name, measured=(after - before) / count / 2, unit="bytes", at_most=MOST_BYTES)


def _planner(counts: tuple[int, ...], rounds: int) -> Iterator[Row]:
    """Blocks in a random order on both sides, so that none can be merged: the worst case."""
    for tokens in counts:
        blocks = -(-tokens // BLOCK_SIZE)
        prefill, decode = engine("P", 4, 8, blocks), engine("D", 2, 8, blocks)
        from_blocks, to_blocks = bench_plan.shuffled(blocks)
        pair = plan_pair(prefill, decode)
        best = float("inf")
        for _ in range(rounds if tokens < 1_000_000 else 2):
            started = time.thread_time()
            leg = pair.request("t", tokens, 0).legs_of_decode(0)[0]
            shards = prefill.ranks[leg.prefill_rank].shard, decode.ranks[leg.decode_rank].shard
            copies(leg, *shards, from_blocks, to_blocks, range(tokens))
            best = min(best, time.thread_time() - started)
        yield Row(
            name=f"planner: a leg of {tokens:,} tokens, {LAYERS} layers", measured=best * 1e3, unit="ms"
        )
