"""``dfirst simulate``: the stories of many transfers in a large random world, and what became of them."""

import time
from dataclasses import dataclass

from dfirst.protocol.messages import Cancel, Sender, TransferKey
from dfirst.protocol.modes import BLOCKWISE, LAYERWISE, MOVER, OWNER
from dfirst.protocol.scheduler import Allocation, Finish, TransferRequest
from rich.console import Console
from rich.progress import Progress

from .simulation import Simulation
from .simulation_parts import RANKS, Engine
from .violation import Violation

BLOCKS = (1,)
TOKENS = 4
ARRIVALS_PER_SECOND = 300.0
RESTART_EVERY_TRANSFERS = 400
ROUTER = Sender("router", -1, "r")


@dataclass(eq=False)
class Story:
    """One transfer, as its two requests live it."""

    simulation: Simulation
    key: TransferKey
    mode: str
    prefill: str
    decode: str

    def begin(self) -> None:
        """The request reaches the first engine."""
        draw, simulation = self.simulation.draw, self.simulation
        if self.mode == LAYERWISE:
            self._decode()
        else:
            self._prefill()
            if not simulation.chance(0.02):
                late = 3.0 if simulation.chance(0.05) else 0.05
                simulation.after(draw.uniform(0.01, late), self._decode)
        if simulation.chance(0.02):
            simulation.after(draw.uniform(0.0, 3.0), self._cancel)

    # P

    def _prefill(self) -> None:
        engine = self.simulation.engines[self.prefill]
        request_id = f"p{self.key.transfer_id}"
        engine.scheduler.seen(self._request(request_id, self.decode, self.mode == LAYERWISE), decodes=False)
        allocation = Allocation(block_ids=BLOCKS, cached_tokens=0, external_tokens=0)
        engine.scheduler.allocated(request_id, allocation)
        if self.mode == BLOCKWISE:
            self._finish_prefill(engine, request_id)
            return
        self.simulation.step(engine)
        seconds = self.simulation.draw.uniform(0.5, 8.0) if self.simulation.chance(0.03) else 0.3
        self.simulation.after(seconds, lambda: self._finish_prefill(engine, request_id))

    def _finish_prefill(self, engine: Engine, request_id: str) -> None:
        if engine is not self.simulation.engines[self.prefill]:
            return
        aborted = self.simulation.chance(0.03)
        finish = Finish(block_ids=BLOCKS, prompt_computed=not aborted)
        if engine.scheduler.finished(request_id, finish):
            self.simulation.hold(engine, self.key, request_id)
        self.simulation.step(engine)

    # D

    def _decode(self) -> None:
        engine = self.simulation.engines[self.decode]
        request_id = f"d{self.key.transfer_id}"
        engine.scheduler.seen(self._request(request_id, self.prefill, self.mode == BLOCKWISE), decodes=True)
        if self.simulation.chance(0.02):
            engine.scheduler.finished(request_id, Finish(block_ids=(), prompt_computed=False))
            self.simulation.step(engine)
            return
        tokens = engine.scheduler.external_tokens(request_id, 0)
        allocation = Allocation(block_ids=BLOCKS, cached_tokens=0, external_tokens=tokens)
        engine.scheduler.allocated(request_id, allocation)
        self.simulation.hold(engine, self.key, request_id)
        self.simulation.step(engine)
        for _ in engine.scheduler.take_announcements():
            if not self.simulation.chance(0.01):
                self.simulation.after(self.simulation.draw.uniform(0.001, 0.05), self._prefill)
        if self.simulation.chance(0.03):
            seconds = self.simulation.draw.uniform(0.0, 2.0)
            self.simulation.after(seconds, lambda: self._abort(engine, request_id))

    def _abort(self, engine: Engine, request_id: str) -> None:
        if engine is self.simulation.engines[self.decode] and request_id in engine.waiting:
            self.simulation.counts["aborted"] += 1
            engine.scheduler.finished(request_id, Finish(block_ids=(), prompt_computed=False))
            self.simulation.step(engine)

    # The router

    def _cancel(self) -> None:
        self.simulation.counts["cancelled"] += 1
        at_prefill = self.mode == BLOCKWISE or self.simulation.draw.random() < 0.5
        name = self.prefill if at_prefill else self.decode
        target = OWNER if at_prefill == (self.mode == BLOCKWISE) else MOVER
        for entry in self.simulation.engines[name].directory.ranks:
            message = Cancel(ROUTER, self.key, entry.incarnation, target, self.mode, "the client has gone")
            self.simulation.send(None, name, entry.rank, -1, message)

    def _request(self, request_id: str, other: str, names_remote: bool) -> TransferRequest:
        return TransferRequest(
            key=self.key,
            mode=self.mode,
            request_id=request_id,
            prompt_tokens=TOKENS,
            remote=self.simulation.remote(other) if names_remote else None,
            metaserver="router" if self.mode == LAYERWISE and not names_remote else "",
        )


def run_simulation(seed: int, transfers: int, console: Console) -> bool:
    """Run a simulation; return whether every rule held."""

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    started = time.monotonic()
    simulation = Simulation(seed)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(f"seed {seed}", total=transfers)
        try:
            for number in range(transfers):
                _start_one(simulation, number)
                simulation.run(simulation.now + simulation.draw.expovariate(ARRIVALS_PER_SECOND))
                if not number % 256:
                    progress.update(task, completed=number)
            _end_all(simulation)
        except Violation as violation:
            say(f"seed {seed}, {simulation.now:.3f} s of its time: {violation}")
            say(f"see it again with: dfirst simulate --seed {seed} --transfers {transfers}")
            return False
    seconds = time.monotonic() - started
    told = ", ".join(f"{count:,} {name}" for name, count in sorted(simulation.counts.items()))
    say(
        f"seed {seed}: {transfers:,} transfers over {4 * RANKS} ranks, {simulation.observer.steps:,} steps, "
        f"{simulation.now:.0f} s of their time in {seconds:.0f} s; every rule held"
    )
    say(told)
    return True


def _start_one(simulation: Simulation, number: int) -> None:
    draw = simulation.draw
    mode = draw.choice((BLOCKWISE, LAYERWISE))
    prefill, decode = draw.choice(("P-a", "P-b")), draw.choice(("D-a", "D-b"))
    Story(simulation, TransferKey(str(number), draw.choice((0, 0, 0, 1))), mode, prefill, decode).begin()
    if draw.random() < 1 / RESTART_EVERY_TRANSFERS:
        simulation.restart(draw.choice(list(simulation.engines)))


def _end_all(simulation: Simulation) -> None:
    """No more faults: everything ends within the bound that the timers give (rule L1), and is forgotten."""
    timing = simulation.timing
    simulation.faulty = False
    lease = timing.lease_seconds + timing.copy_timeout_seconds + timing.stall_allowance_seconds
    bound = max(timing.transfer_deadline_seconds, timing.hold_seconds) + lease
    simulation.run(simulation.now + 10.0 + bound)
    for engine in simulation.engines.values():
        if engine.waiting:
            raise Violation("L1", f"{engine.name} still waits for {sorted(engine.waiting)[:5]}")
        for rank in engine.ranks:
            for entity in (*rank.core.movers.values(), *rank.core.owners.values()):
                if entity.state != "FREED":
                    raise Violation("L1", f"{rank.core.sender} {entity.key} is still {entity.state}")
    simulation.run(simulation.now + 2 * timing.tombstone_seconds + bound)
    for engine in simulation.engines.values():
        for rank in engine.ranks:
            if rank.core.movers or rank.core.owners or rank.core.next_deadline() is not None:
                raise Violation("L1", f"{rank.core.sender} does not forget what has ended")
