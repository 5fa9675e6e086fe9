"""A large world at random: several engines of several ranks, hundreds of transfers at once, real cores.

Everything is drawn from one seed: when letters arrive or that they do not, how long copies take and how
they end, who aborts, which engine is restarted. Events wait in one queue in the order of their time. Each
engine's clock runs at a rate of its own. The rules are those of ``memory`` and ``requests``, kept here for
living cores.
"""

import heapq
import random
from collections import Counter
from collections.abc import Callable

from dfirst.protocol import commands
from dfirst.protocol.commands import CopyEnded, CoreEvent, LegKey, MessageReceived, RemoteEngine, remote_of
from dfirst.protocol.effects import (
    FAILED,
    RECEIVED,
    SENT,
    Effect,
    Reply,
    Report,
    Send,
    StartCopies,
    StopCopies,
)
from dfirst.protocol.messages import Message, Sender, TransferKey
from dfirst.protocol.modes import BLOCKWISE, LAYERWISE
from dfirst.protocol.rank import RankCore
from dfirst.protocol.scheduler import Finish, SchedulerCore
from dfirst.protocol.timing import Timing

from .simulation_parts import HEADS, LONGEST_DELAY_SECONDS, RANKS, TIMING, Engine, Job, Quiet, Rank
from .sites import directory
from .violation import Violation


class Simulation:
    """Engines, the network between them, the memory in them."""

    def __init__(self, seed: int, timing: Timing = TIMING) -> None:
        self.draw = random.Random(seed)
        self.timing = timing
        self.now = 0.0
        self.observer = Quiet()
        self.counts: Counter[str] = Counter()
        self.faulty = True
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = 0
        self.in_air: dict[TransferKey, list[Job]] = {}
        names = ("P-a", "P-b", "D-a", "D-b")
        self.engines = {name: self._started(name, 0) for name in names}

    # Time

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Let something happen later."""
        self._serial += 1
        heapq.heappush(self._queue, (self.now + seconds, self._serial, action))

    def run(self, until: float) -> None:
        """Let everything happen that is due before a point in time."""
        queue = self._queue
        while queue and queue[0][0] <= until:
            self.now, _, action = heapq.heappop(queue)
            action()
        self.now = until

    def chance(self, ratio: float) -> bool:
        """Return whether a fault comes, which happens so often."""
        return self.faulty and self.draw.random() < ratio

    # Engines

    def remote(self, name: str) -> RemoteEngine:
        """Return an engine as a router names it."""
        return remote_of(self.engines[name].directory)

    def restart(self, name: str) -> None:
        """An engine's processes end, and start again as another incarnation."""
        self.counts["restarts"] += 1
        old = self.engines[name]
        for rank in old.ranks:
            rank.alive = False
        for jobs in self.in_air.values():
            for job in jobs:
                if job.leg.engine_id == name:
                    job.over = True
        self.engines[name] = self._started(name, old.incarnation + 1)

    def _started(self, name: str, incarnation: int) -> Engine:
        made = directory(name, RANKS, HEADS, incarnation)
        ratio = self.timing.clock_drift_ratio / 2
        rate = 1.0 + self.draw.uniform(-ratio, ratio)
        engine = Engine(name, rate, incarnation, [], SchedulerCore(self.observer), made)
        for entry in made.ranks:
            core = RankCore(self.timing, Sender(name, entry.rank, entry.incarnation), self.observer)
            rank = Rank(engine, core)
            engine.ranks.append(rank)
            self.give(rank, commands.DirectoryKnown(made))
        return engine

    def step(self, engine: Engine) -> None:
        """Hand the scheduler's commands to the ranks with the next step, not to all at the same moment."""
        for command in engine.scheduler.take_commands():
            for rank in engine.ranks:
                self.after(self._step_seconds(rank), self._giver(rank, command))

    def _step_seconds(self, rank: Rank) -> float:
        # In order, as a queue would be: commands of one rank never overtake each other.
        at = self.now + self.draw.uniform(0.001, 1.0 if self.chance(0.002) else 0.02)
        rank.last_step = max(rank.last_step, at)
        return rank.last_step - self.now

    def _giver(self, rank: Rank, command: CoreEvent) -> Callable[[], None]:
        return lambda: self.give(rank, command)

    def give(self, rank: Rank, event: CoreEvent) -> None:
        """Hand an event to a rank that lives, and carry out what it asks for."""
        if rank.alive:
            self._perform(rank, rank.core.handle(event, self.now * rank.engine.rate))
            self._set_alarm(rank)

    def _set_alarm(self, rank: Rank) -> None:
        deadline = rank.core.next_deadline()
        if deadline is None:
            return
        at = max(deadline / rank.engine.rate, self.now)
        if at < rank.wake - 1e-9 or rank.wake <= self.now:
            rank.wake = at
            self.after(at - self.now + 1e-6, lambda: self._alarm(rank, at))

    def _alarm(self, rank: Rank, at: float) -> None:
        if not rank.alive or rank.wake != at:
            return
        rank.wake = float("inf")
        self._perform(rank, rank.core.tick(self.now * rank.engine.rate))
        self._set_alarm(rank)

    # Letters

    def _perform(self, rank: Rank, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self.send(rank, effect.host, effect.port, -1, effect.message)
            elif isinstance(effect, Reply):
                name, number, incarnation = effect.route.decode().rsplit(".", 2)
                if name != "router":
                    self.send(rank, name, int(number), int(incarnation), effect.message)
            elif isinstance(effect, StartCopies):
                self._start(rank, effect)
            elif isinstance(effect, StopCopies):
                self._stop(rank, effect.leg)
            elif isinstance(effect, Report):
                self._report(rank, effect)
            else:
                raise ValueError(f"nobody stages anything here, and a core asks for {type(effect).__name__}")

    def send(self, source: Rank | None, name: str, number: int, incarnation: int, message: Message) -> None:
        """Put a letter on its way: it may be lost, come twice, or come late."""
        if self.chance(0.02):
            self.counts["lost"] += 1
            return
        copies = 1
        if self.chance(0.02):
            self.counts["repeated"] += 1
            copies = 2
        for _ in range(copies):
            seconds = self.draw.uniform(0.001, 0.02)
            if self.chance(0.02):
                self.counts["late"] += 1
                seconds = self.draw.uniform(0.5, LONGEST_DELAY_SECONDS)
            self.after(seconds, lambda: self._arrive(source, name, number, incarnation, message))

    def _arrive(
        self, source: Rank | None, name: str, number: int, incarnation: int, message: Message
    ) -> None:
        engine = self.engines[name]
        if incarnation in (-1, engine.incarnation):
            route = "router.0.0"
            if source is not None:
                route = f"{source.engine.name}.{source.number}.{source.engine.incarnation}"
            self.counts["letters"] += 1
            self.give(engine.ranks[number], MessageReceived(message, route.encode()))

    # Copies

    def _start(self, rank: Rank, started: StartCopies) -> None:
        job = Job(started.leg, rank, started.mode, self.draw.randint(1, 3))
        rank.jobs[started.leg] = job
        seconds = 0.0 if started.mode == BLOCKWISE else self.draw.uniform(0.0, 0.5)
        self.after(seconds, lambda: self._begin(job))

    def _stop(self, rank: Rank, leg: LegKey) -> None:
        job = rank.jobs.get(leg)
        if job is not None and job.left:
            job.stopped = True
            if not job.in_air:
                self.after(0.001, lambda: self._end(job))

    def _begin(self, job: Job) -> None:
        rank, key = job.mover, job.leg.key
        if not rank.alive or rank.jobs.get(job.leg) is not job or job.in_air:
            return
        if job.stopped or not rank.core.lease_runs(job.leg, self.now * rank.engine.rate):
            job.stopped = True
            self._end(job)
            return
        if job.mode == BLOCKWISE and key not in rank.held:
            raise Violation("S2", f"{rank.core.sender} begins to read into blocks that it has handed back")
        owner = self._owner(job)
        if owner is None:
            job.over = True
        elif key not in owner.held:
            if job.mode == LAYERWISE:
                raise Violation(
                    "S2", f"{rank.core.sender} writes into blocks that {owner.core.sender} released"
                )
            job.spoilt = True
        job.in_air = True
        self.in_air.setdefault(key, []).append(job)
        self.after(self._copy_seconds(rank), lambda: self._land(job))

    def _copy_seconds(self, rank: Rank) -> float:
        if self.chance(0.05):
            self.counts["slow copies"] += 1
            most = self.timing.copy_timeout_seconds + self.timing.stall_allowance_seconds
            return self.draw.uniform(0.5, most / rank.engine.rate)
        return self.draw.uniform(0.001, 0.1)

    def _land(self, job: Job) -> None:
        jobs = self.in_air[job.leg.key]
        jobs.remove(job)
        if not jobs:
            del self.in_air[job.leg.key]
        job.in_air = False
        job.left -= 1
        if self.chance(0.02):
            self.counts["broken copies"] += 1
            job.over = True
        if job.over or job.stopped or not job.left:
            self._end(job)
        else:
            self.after(self.draw.uniform(0.0, 0.2), lambda: self._begin(job))

    def _end(self, job: Job) -> None:
        rank = job.mover
        if rank.alive and rank.jobs.get(job.leg) is job and not job.in_air:
            del rank.jobs[job.leg]
            ok = not (job.over or job.stopped)
            target = rank if job.mode == BLOCKWISE else self._owner(job)
            if ok and not job.spoilt and target is not None:
                prefill = job.leg.rank if job.mode == BLOCKWISE else rank.number
                target.good.add((job.leg.key, prefill))
            self.give(rank, CopyEnded(job.leg, ok, "" if ok else "it broke"))

    def _owner(self, job: Job) -> Rank | None:
        owner = self.engines[job.leg.engine_id].ranks[job.leg.rank]
        return owner if owner.core.sender.incarnation == job.leg.incarnation else None

    # Reports

    def hold(self, engine: Engine, key: TransferKey, request_id: str) -> None:
        """vLLM leaves a request's blocks to the ranks until all have reported."""
        engine.waiting.add(request_id)
        for rank in engine.ranks:
            rank.held[key] = request_id

    def _report(self, rank: Rank, report: Report) -> None:
        key, name = report.key, f"{rank.core.sender}: {report.outcome} of {report.key}"
        if rank.held.pop(key, "") != report.request_id:
            raise Violation("S3", f"{name}, whose blocks it does not hold")
        for job in self.in_air.get(key, ()):
            mine, lent = job.mover is rank, self._owner(job) is rank
            if mine or (lent and job.mode == LAYERWISE):
                raise Violation("S2", f"{name} while a copy is in flight")
            if lent:
                job.spoilt = True
        self.counts[report.outcome] += 1
        # As many heads as ranks on both sides: each D rank reads from the P rank of its own number.
        if report.outcome == RECEIVED and (key, rank.number) not in rank.good:
            raise Violation("S1", f"{name}, but what P rank {rank.number} has is not all there")
        rank.good = {entry for entry in rank.good if entry[0] != key}
        self.after(self.draw.uniform(0.001, 0.02), lambda: self._collect(rank, report))

    def _collect(self, rank: Rank, report: Report) -> None:
        if not rank.alive:
            return
        engine = rank.engine
        self.give(rank, commands.Collected(report.key))
        outcomes = engine.reported.setdefault(report.request_id, [])
        outcomes.append(report.outcome)
        if len(outcomes) < RANKS:
            return
        del engine.reported[report.request_id]
        outcome = FAILED if FAILED in outcomes else outcomes[0]
        if report.request_id not in engine.waiting:
            raise Violation("S6", f"{engine.name} hears {outcome} of {report.request_id} a second time")
        engine.waiting.remove(report.request_id)
        engine.scheduler.reported(report.request_id, outcome)
        if outcome != SENT:
            self.counts[f"requests {outcome}"] += 1
            self.after(0.01, lambda: self._finish(engine, report.request_id))

    def _finish(self, engine: Engine, request_id: str) -> None:
        if engine is self.engines[engine.name]:
            engine.scheduler.finished(request_id, Finish(block_ids=(), prompt_computed=True))
            self.step(engine)
