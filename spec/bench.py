"""``make bench-core``: what the core costs, in microseconds of one CPU, without any network or copy.

Two numbers are measured. One whole transfer of one leg, on each side, from the scheduler's command to the
report that vLLM takes; and one event of a transfer while many others are in flight, which must cost about the
same with 10,000 of them as with 100. The fastest of several rounds counts: others may use the CPU too. What a
plan costs is measured in ``bench_plan.py``.
"""

import sys
import time
from collections.abc import Callable

from dfirst.protocol import commands
from dfirst.protocol.commands import (
    Collected,
    CopyEnded,
    CoreEvent,
    MessageReceived,
    RemoteEngine,
    RemoteRank,
)
from dfirst.protocol.effects import Effect, Reply, Report, Send, StartCopies
from dfirst.protocol.messages import Sender, TransferKey
from dfirst.protocol.modes import BLOCKWISE, LAYERWISE
from dfirst.protocol.rank import RankCore
from dfirst.protocol.shards import Directory, layout_digest
from dfirst.protocol.timing import Timing
from dfirst.spec import bench_plan
from dfirst.spec.explore.sites import directory

FEW, MANY = 100, 10_000
TRANSFERS, ROUNDS = 300, 7
LARGEST_RATIO = 1.2
BLOCKS = (1, 2, 3)
TOKENS = 12


class Silent:
    """Nobody listens."""

    def stepped(self, entity: object, row: object, source: str) -> None: ...
    def unheard(self, entity: object, event: str, expected: bool) -> None: ...


class Pair:
    """One rank on each side; messages arrive at once, and the time that each core takes is added up."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.engines = {name: directory(name, 1, 1, 0) for name in ("P", "D")}
        self.cores = {name: self._core(name) for name in self.engines}
        self.spent = {"P": 0.0, "D": 0.0}
        self.now = 1.0
        self.introduce()

    def _core(self, name: str) -> RankCore:
        entry = self.engines[name].ranks[0]
        core = RankCore(Timing(), Sender(name, 0, entry.incarnation), Silent())
        core.handle(commands.DirectoryKnown(self.engines[name]), 1.0)
        return core

    def introduce(self) -> None:
        """Let both engines know each other."""
        for name, other in (("P", "D"), ("D", "P")):
            self.cores[name].peers.learn(self.engines[other])

    def give(self, name: str, event: CoreEvent, copying: bool = True) -> None:
        """Hand an event to a core and carry out what it asks for, at once."""
        started = time.thread_time()
        effects = self.cores[name].handle(event, self.now)
        self.spent[name] += time.thread_time() - started
        for effect in effects:
            self._carry_out(name, effect, copying)

    def _carry_out(self, name: str, effect: Effect, copying: bool) -> None:
        if isinstance(effect, Send | Reply):
            other = "D" if name == "P" else "P"
            self.give(other, MessageReceived(effect.message, name.encode()), copying)
        elif isinstance(effect, StartCopies) and copying:
            self.give(name, CopyEnded(effect.leg, True, ""))
        elif isinstance(effect, Report):
            self.give(name, Collected(effect.key))

    def transfer(self, number: int, copying: bool = True) -> None:
        """Run one transfer; without ``copying`` it stays in flight."""
        key = TransferKey(str(number), 0)
        if self.mode == BLOCKWISE:
            offer = commands.OfferBlocks(key=key, request_id="p", block_ids=BLOCKS, prompt_tokens=TOKENS)
            self.give("P", offer, copying)
            self.give("D", _pull(key, self.engines["P"]), copying)
            return
        accept = commands.AcceptPush(
            key=key, request_id="d", block_ids=BLOCKS, prompt_tokens=TOKENS, cached_tokens=0
        )
        self.give("D", accept, copying)
        self.give("P", _push(key, self.engines["D"]), copying)
        if copying:
            self.give("P", commands.FinishPush(key))


def _remote(engine: Directory) -> RemoteEngine:
    ranks = tuple(RemoteRank(entry.host, entry.port, entry.incarnation) for entry in engine.ranks)
    return RemoteEngine(engine.engine_id, layout_digest(engine), ranks)


_remotes: dict[str, RemoteEngine] = {}


def _cached_remote(engine: Directory) -> RemoteEngine:
    return _remotes.setdefault(engine.engine_id, _remote(engine))


def _pull(key: TransferKey, engine: Directory) -> commands.StartPull:
    return commands.StartPull(
        key=key,
        request_id="d",
        remote=_cached_remote(engine),
        block_ids=BLOCKS,
        prompt_tokens=TOKENS,
        cached_tokens=0,
    )


def _push(key: TransferKey, engine: Directory) -> commands.StartPush:
    return commands.StartPush(
        key=key, request_id="p", remote=_cached_remote(engine), prompt_tokens=TOKENS, cached_tokens=0
    )


def whole_transfer(mode: str) -> dict[str, float]:
    """Return the microseconds that one transfer takes on each side."""
    best = {"P": float("inf"), "D": float("inf")}
    for _ in range(ROUNDS):
        pair = Pair(mode)
        for number in range(TRANSFERS):
            pair.transfer(number)
        best = {name: min(best[name], spent / TRANSFERS * 1e6) for name, spent in pair.spent.items()}
    return best


def per_event(mode: str, in_flight: int) -> Callable[[], float]:
    """Return a function that measures one transfer's microseconds, events and timers, beside many others."""
    pair = Pair(mode)
    for number in range(in_flight):
        pair.transfer(-1 - number, copying=False)
    numbers = iter(range(1 << 30))

    def measure() -> float:
        started = time.thread_time()
        pair.introduce()
        for _ in range(TRANSFERS):
            pair.transfer(next(numbers))
            pair.now += 1e-6
            for core in pair.cores.values():
                core.tick(pair.now)
                core.next_deadline()
                core.lease_runs(commands.LegKey(TransferKey("-1", 0), "P", 0, "P0.0"), pair.now)
        return (time.thread_time() - started) / TRANSFERS * 1e6

    return measure


def main() -> int:
    """Print the numbers; 1 if many transfers in flight, or a plan, cost more than allowed."""
    worst = 0.0
    for mode in (BLOCKWISE, LAYERWISE):
        sides = whole_transfer(mode)
        print(f"{mode}: one transfer takes {sides['P']:.0f} us on P and {sides['D']:.0f} us on D")
        few, many = per_event(mode, FEW), per_event(mode, MANY)
        # Turn about, so that a noisy neighbour meets both.
        pairs = [(few(), many()) for _ in range(ROUNDS)]
        least_few, least_many = min(pair[0] for pair in pairs), min(pair[1] for pair in pairs)
        ratio = least_many / least_few
        worst = max(worst, ratio)
        print(
            f"{mode}: a transfer's events take {least_few:.0f} us beside {FEW} others and "
            f"{least_many:.0f} us beside {MANY:,}: {ratio:.2f} times as much"
        )
    print(f"at most {LARGEST_RATIO} times is allowed")
    return int(bench_plan.main() > bench_plan.LARGEST_MILLISECONDS or worst > LARGEST_RATIO)


if __name__ == "__main__":
    sys.exit(main())
