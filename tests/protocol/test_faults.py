"""Whatever is lost, repeated, late, aborted or restarted: once faults stop, everything ends, once, safely.

Each seed is one run: three transfers in both modes between two engines, with faults drawn from the seed. At
every report the watcher looks whether a copy could still reach the blocks that it hands back (rules S1, S2
and R5). Afterwards every transfer must have reached FREED within the bound that the timers give (rule L1),
with one report on every rank that is alive (rules S3 and S6), and in the end nothing is left of it at all.
"""

import random
from collections import Counter
from dataclasses import dataclass

import pytest
from dfirst.protocol.commands import CopyEnded, MessageReceived
from dfirst.protocol.effects import RECEIVED, Report
from dfirst.protocol.messages import Sender, TransferKey
from dfirst.protocol.modes import BLOCKWISE, LAYERWISE, MOVER, OWNER
from dfirst.protocol.mover_leg import MoverLeg
from dfirst.protocol.timing import Timing

from .forge import cancel
from .world import ALL_CACHED, World

STEPS = 150
HASTY = Timing(lease_seconds=4.0, transfer_deadline_seconds=15.0, hold_seconds=20.0, copy_timeout_seconds=3.0)
SHAPES = ((1, 1, 2), (2, 1, 2), (1, 2, 2), (2, 2, 2), (2, 1, 1), (2, 2, 1))


@dataclass(frozen=True)
class Reach:
    """Until when a mover's copies may touch an owner's blocks."""

    key: TransferKey
    owner: Sender
    until: float


class WatchedWorld(World):
    """A world that fails at the first unsafe hand-back."""

    def __init__(self, *args, **kwargs) -> None:
        self.ghosts: list[Reach] = []
        self.told: list[tuple[str, TransferKey]] = []
        self.good: set[tuple[str, TransferKey, str]] = set()
        super().__init__(*args, **kwargs)

    def _take(self, rank, effects) -> None:
        for effect in effects:
            if isinstance(effect, Report):
                self._check_hand_back(rank, effect.key)
                if effect.outcome == RECEIVED:
                    self._check_whole(rank, effect.key)
                self.told.append((rank, effect.key))
        super()._take(rank, effects)

    def _check_hand_back(self, rank: str, key: TransferKey) -> None:
        own = [copy for copy in self.copies[rank] if copy.leg.key == key]
        assert not own, f"{rank} hands the blocks of {key} back with copies in flight"
        owner = self.sender(rank)
        for reach in self._reaches() + self.ghosts:
            if (reach.key, reach.owner) == (key, owner):
                assert reach.until <= self.now, f"{rank} hands back {key}, lent until {reach.until}"

    def give(self, rank, event) -> None:
        if isinstance(event, CopyEnded) and event.ok:
            self.good.add((rank, event.leg.key, f"{event.leg.engine_id}{event.leg.rank}"))
        super().give(rank, event)

    def _check_whole(self, rank: str, key: TransferKey) -> None:
        """What is reported as received was copied, all of it (rule S1)."""
        core = self.cores[rank]
        if key in core.movers:
            legs = [leg for leg in core.movers[key].legs.values() if leg.plan is not None]
            wanted = {(rank, key, f"P{leg.peer.rank}") for leg in legs}
        else:
            wanted = {(f"P{writer}", key, rank) for writer in core.owners[key].expected()}
            assert wanted
        assert wanted <= self.good, f"{rank} reports {key} as received, but {wanted - self.good} is missing"

    def _reaches(self) -> list[Reach]:
        legs = [
            leg
            for core in self.cores.values()
            for transfer in core.movers.values()
            for leg in transfer.legs.values()
        ]
        return [self._reach(leg) for leg in legs if leg.state in ("COPYING", "DRAINING")]

    def _reach(self, leg: MoverLeg) -> Reach:
        until = leg.lease_until
        if leg.transfer.mode == LAYERWISE:
            until += self.timing.copy_timeout_seconds + self.timing.stall_allowance_seconds
        elif leg.state == "DRAINING":
            until = 0.0  # What it reads now counts for nothing.
        return Reach(leg.key, Sender(leg.peer.engine_id, leg.peer.rank, leg.peer.incarnation), until)

    def restart(self, engine: str, incarnation: str) -> None:
        """Writes of a process that is gone may still be under way; its reads concern nobody."""
        mine = [core for name, core in self.cores.items() if name.startswith(engine)]
        for core in mine:
            for transfer in core.movers.values():
                legs = transfer.legs.values() if transfer.mode == LAYERWISE else ()
                self.ghosts += [self._reach(leg) for leg in legs if leg.state in ("COPYING", "DRAINING")]
        super().restart(engine, incarnation)


class Run:
    """One seed's story."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        prefill_tp, decode_tp, heads = self.random.choice(SHAPES)
        timing = self.random.choice((Timing(), HASTY))
        self.world = WatchedWorld(prefill_tp, decode_tp, heads, timing, met=self.random.random() < 0.5)
        self.harshness = self.random.choice((0.0, 0.1, 1.0))
        self.restarts = 0
        self.expected: Counter[tuple[str, TransferKey]] = Counter()
        self.plan = sorted(
            [step for number in range(3) for step in self._story(TransferKey(f"t-{number}", 0))],
            key=lambda step: step[0],
        )

    def _story(self, key: TransferKey):
        """Return the commands of one transfer, each with the step at which it is given."""
        draw, world = self.random, self.world
        first, second, third = (draw.randrange(STEPS // 2) for _ in range(3))
        if draw.random() < 0.5:
            cached = draw.choice((0, 4, ALL_CACHED))
            yield first, "P", key, lambda: world.offer(key)
            if draw.random() < 0.9:
                yield second, "D", key, lambda: world.pull(cached, key)
            else:
                yield second, "", key, lambda: world.renounce(key)
            mode = BLOCKWISE
        else:
            first, third = sorted((first, third))
            yield first, "P", key, lambda: world.push(key)
            yield third, "", key, lambda: world.finish(key)
            yield second, "D", key, lambda: world.accept(key)
            if draw.random() < 0.2:
                yield draw.randrange(first, third + 1), "", key, lambda: world.abort("P", key)
            mode = LAYERWISE
        if draw.random() < 0.3 * self.harshness:
            yield draw.randrange(second, STEPS), "", key, lambda: world.abort("D", key)
        if draw.random() < 0.3 * self.harshness:
            rank = draw.choice(list(world.cores))
            part = OWNER if (rank[0] == "P") == (mode == BLOCKWISE) else MOVER
            yield draw.randrange(STEPS), "", key, lambda: cancel(world, rank, part, mode, key)

    def chaos(self) -> None:
        for step in range(STEPS):
            while self.plan and self.plan[0][0] <= step:
                _, engine, key, action = self.plan.pop(0)
                if engine:
                    self.expected.update((rank, key) for rank in self.world.ranks(engine))
                action()
            self._fault()

    def _fault(self) -> None:
        draw, world = self.random, self.world
        chance = draw.random()
        if chance < 0.6:
            self._move_packet()
        elif chance < 0.8:
            slow = draw.random() < 0.2 * self.harshness
            self._pass(draw.choice((5.0, 25.0)) if slow else draw.choice((0.05, 1.0)))
        elif chance < 0.9:
            self._end_copy(draw.random() > 0.2 * self.harshness)
        elif chance < 0.9 + 0.01 * self.harshness:
            self._restart(draw.choice("PD"))
        elif chance < 0.9 + 0.02 * self.harshness:
            world.network.clear()

    def _move_packet(self) -> None:
        draw, network = self.random, self.world.network
        if not network:
            return
        packet = network.pop(draw.randrange(len(network)))
        if draw.random() < 0.2 * self.harshness:
            network.append(packet)
        if draw.random() > 0.15 * self.harshness and packet.target in self.world.cores:
            self.world.give(packet.target, MessageReceived(packet.message, packet.source.encode()))

    def _end_copy(self, ok: bool) -> None:
        busy = [rank for rank, copies in self.world.copies.items() if copies]
        if busy:
            rank = self.random.choice(busy)
            copy = self.world.copies[rank].pop(self.random.randrange(len(self.world.copies[rank])))
            self.world.give(rank, CopyEnded(copy.leg, ok, "" if ok else "it broke"))

    def _restart(self, engine: str) -> None:
        self.restarts += 1
        for rank in self.world.ranks(engine):
            for held in [held for held in self.expected if held[0] == rank]:
                del self.expected[held]
            self.world.told = [told for told in self.world.told if told[0] != rank]
        self.world.restart(engine, f"again{self.restarts}")

    def _pass(self, seconds: float) -> None:
        """Let time pass; no copy lasts longer than the configuration allows."""
        world = self.world
        allowed = world.timing.copy_timeout_seconds
        for rank, copies in world.copies.items():
            for copy in list(copies):
                leg = world.cores[rank].movers[copy.leg.key].legs[copy.leg]
                if leg.lease_until + allowed <= world.now + seconds:
                    copies.remove(copy)
                    world.give(rank, CopyEnded(copy.leg, False, "it timed out"))
        for _ in range(5):
            self._tick(seconds / 5)

    def _tick(self, seconds: float) -> None:
        world = self.world
        world.now += seconds
        for rank, core in list(world.cores.items()):
            world._take(rank, core.tick(world.now))

    def settle(self, seconds: float) -> None:
        """No more faults: messages arrive, copies end, timers fire when they are due."""
        world = self.world
        end = world.now + seconds
        while world.now < end:
            world.deliver()
            for rank in list(world.copies):
                world.finish_copies(rank)
            world.deliver()
            deadlines = [core.next_deadline() for core in world.cores.values()]
            due = min([end, *(at for at in deadlines if at is not None)])
            self._tick(max(due - world.now, 0.0))

    def check_ended(self) -> None:
        for rank, core in self.world.cores.items():
            for entity in (*core.movers.values(), *core.owners.values()):
                assert entity.state == "FREED", f"{rank} {entity.key} is still {entity.state}"
        assert Counter(self.world.told) == self.expected

    def check_forgotten(self) -> None:
        for rank, core in self.world.cores.items():
            assert not core.movers, rank
            assert not core.owners, rank
            assert core.next_deadline() is None, rank
            assert not core._renewals, rank


def bound_seconds(run: Run) -> float:
    """Return how long a transfer can take at most: all waiting, then the longest lease."""
    timing = run.world.timing
    lease = timing.lease_seconds + timing.copy_timeout_seconds + timing.stall_allowance_seconds
    return max(timing.transfer_deadline_seconds, timing.hold_seconds) + lease


@pytest.mark.parametrize("block", range(10))
def test_once_faults_stop_every_transfer_ends_once_and_safely(block):
    for seed in range(block * 30, block * 30 + 30):
        run = Run(seed)
        try:
            run.chaos()
            run.settle(bound_seconds(run))
            run.check_ended()
            run.settle(2 * run.world.timing.tombstone_seconds + bound_seconds(run))
            run.check_forgotten()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
