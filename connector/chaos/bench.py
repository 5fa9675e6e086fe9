"""A run while it goes on: clients, faults and what they come to, in one event loop."""

import asyncio
import contextlib
import os
import signal
import time
from collections import Counter, deque
from collections.abc import Sequence

import httpx
import msgspec

from ..demo_client import Answer
from ..engine_spec import Mode
from ..launch import Engine, Server, is_healthy
from ..local_set import LocalSet
from . import metrics
from .answers import Asked, Exchange, Verdict
from .deaf import DeafListener
from .follower import TraceFollower
from .load import Pool, Question, question
from .orders import FaultDesk
from .outages import GRACE_SECONDS, Outages
from .plan import (
    CROWD_SECONDS,
    MODES,
    Abort,
    Crowd,
    DeafPeer,
    EngineName,
    Event,
    HangUp,
    Kill,
    Pause,
    Plan,
    ServerName,
    Tamper,
)

TICK_SECONDS = 0.03
RESTART_SECONDS = 400.0
DRAIN_SECONDS = 150.0
"""For the requests under way at the end: longer than any of them may take."""
NO_PUSH_SECONDS = 40.0
"""For pushes to end before a worker is stopped for longer than their lease."""
LAST_QUESTIONS = 4
"""In each mode, when all faults are over."""
TRIES = 3
"""Requests that are sent out to be dropped in some state; not every one gets there."""
OUTAGE_PAUSE_SECONDS = 0.5
DURING_OUTAGE_REQUESTS = 2
"""Under way while an engine starts again: it needs the cores more."""


class Wish(msgspec.Struct):
    """A hang-up or an abort that waits for a request to happen to."""

    event: HangUp | Abort
    tries: int = 0


class Bench:
    """Clients and faults of one run against one running set."""

    def __init__(
        self,
        running: LocalSet,
        plan: Plan,
        pool: Pool,
        references: Sequence[Answer],
        desk: FaultDesk,
        follower: TraceFollower,
        client: httpx.AsyncClient,
    ) -> None:
        self.answers: list[Asked] = []
        self.outages = Outages()
        self.injected: Counter[str] = Counter()
        """Faults that this side made itself."""
        self.abort_allowed: set[int] = set()
        self.preemptions = 0
        self._running = running
        self._plan = plan
        self._pool = pool
        self._references = references
        self._desk = desk
        self._follower = follower
        self._client = client
        self._deaf = DeafListener(running.spec.host)
        self._lease_seconds = float(running.spec.connector_config["lease_seconds"])
        self._stall_seconds = float(running.spec.connector_config["stall_allowance_seconds"])
        self._numbers = 0
        self._requests: set[asyncio.Task[None]] = set()
        self._faults: set[asyncio.Task[None]] = set()
        self._wishes: deque[Wish] = deque()
        self._no_pushes = False
        """No layer-wise request may begin."""
        self._layerwise = 0
        self._upheaval = asyncio.Lock()
        self._crowded_until = 0.0
        self._over = False
        self._next_at = 0.0
        """When the next request may be sent, in seconds after the start."""

    async def run(self) -> None:
        """Carry out the plan and wait for everything that it set going."""
        with self._deaf:
            await self._drive()
            self._over = True
            await self._gather(self._faults, RESTART_SECONDS)
            await self._gather(self._requests, DRAIN_SECONDS)
            await self._ask_once_more()
            await self._count_preemptions()

    async def _drive(self) -> None:
        waiting = deque(self._plan.events)
        started = time.monotonic()
        while (passed := time.monotonic() - started) < self._plan.seconds:
            self._follower.poll()
            while waiting and waiting[0].at <= passed:
                self._begin(waiting.popleft())
            for tasks in (self._faults, self._requests):
                self._take_ended(tasks)
            self._check_servers()
            if not self._outage_stops_load():
                wanted = self._plan.requests_at(passed)
                if self.outages.away("prefill", "decode"):
                    wanted = min(wanted, DURING_OUTAGE_REQUESTS)
                while len(self._requests) < wanted and passed >= self._next_at:
                    self._next_request(passed)
            await asyncio.sleep(TICK_SECONDS)

    def _outage_stops_load(self) -> bool:
        # Nobody could say anything to these clients.
        return self.outages.away("router")

    async def _ask_once_more(self) -> None:
        """All servers are there, and nobody breaks anything: nothing excuses an error now."""
        await asyncio.sleep(GRACE_SECONDS)
        for mode in MODES:
            for _ in range(LAST_QUESTIONS):
                self._numbers += 1
                self._send(question(self._pool, self._plan.seed, self._numbers, mode=mode, long=True))
        await self._gather(self._requests, DRAIN_SECONDS)

    # Requests

    def _next_request(self, passed: float) -> None:
        self._numbers += 1
        if self.outages.away("prefill", "decode"):
            # An error comes at once: asking again at once would only keep the cores from the engine.
            self._next_at = passed + OUTAGE_PAUSE_SECONDS
        wish = self._take_wish()
        crowd = passed < self._crowded_until
        asked = question(
            self._pool,
            self._plan.seed,
            self._numbers,
            mode=wish.event.mode if wish else None,
            long=wish is not None,
            crowd=crowd,
        )
        if asked.mode == "layerwise" and self._no_pushes:
            asked = msgspec.structs.replace(asked, mode="blockwise")
        self._send(asked, wish)

    def _send(self, asked: Question, wish: Wish | None = None) -> None:
        self._requests.add(asyncio.create_task(self._request(asked, wish), name=asked.client_id))

    def _take_wish(self) -> Wish | None:
        if not self._wishes or self.outages.away("prefill", "decode"):
            return None
        if self._no_pushes and self._wishes[0].event.mode == "layerwise":
            return None
        return self._wishes.popleft()

    async def _request(self, asked: Question, wish: Wish | None) -> None:
        exchange = self._exchange(asked)
        pushes = asked.mode == "layerwise"
        self._layerwise += pushes
        sent = time.time()
        asking = asyncio.create_task(
            exchange.run(self._client, self._running.router.url, self._running.spec.served_model_name)
        )
        try:
            if wish is not None:
                verdict, detail = await self._disturbed(asked, exchange, asking, wish)
            else:
                verdict, detail = await asking
        finally:
            asking.cancel()
            self._layerwise -= pushes
        self._note(asked, sent, verdict, detail)

    def _exchange(self, asked: Question) -> Exchange:
        return Exchange(asked, self._pool.prompts[asked.prompt], self._references[asked.prompt])

    def _note(
        self, asked: Question, sent: float, verdict: Verdict, detail: str, server: ServerName = "router"
    ) -> None:
        self.answers.append(
            Asked(
                question=asked,
                server=server,
                sent=sent,
                ended=time.time(),
                verdict=verdict,
                detail=detail,
            )
        )

    async def _disturbed(
        self, asked: Question, exchange: Exchange, asking: "asyncio.Task[tuple[Verdict, str]]", wish: Wish
    ) -> tuple[Verdict, str]:
        """Let the request go on until its transfer is where it is to be dropped."""
        event = wish.event
        reached = False
        while not asking.done() and not reached:
            await asyncio.wait([asking], timeout=TICK_SECONDS)
            reached = self._follower.entered(asked.client_id, event.machine, event.state)
        if reached:
            await asyncio.wait([asking], timeout=event.after)
        if asking.done():
            # An answer that came first: another request is tried. A transfer ends behind its answer.
            wish.tries += 1
            if wish.tries < TRIES:
                self._wishes.append(wish)
        elif isinstance(event, HangUp):
            asking.cancel()
            await asyncio.wait([asking])
            self.injected[f"client hung up {event.mode}"] += 1
            return exchange.broken_off()
        else:
            await self._abort(asked, exchange, event)
        return await asking

    async def _abort(self, asked: Question, exchange: Exchange, event: Abort) -> None:
        name = self._follower.engine_request(asked.client_id, event.engine)
        if name is None:
            return
        # What vLLM calls a request outside has no random end.
        body = {"request_ids": [name.rpartition("-")[0]]}
        if event.engine == "decode":
            exchange.abort_ordered = True
            self.abort_allowed.add(asked.number)
        try:
            response = await self._client.post(
                f"{self._engine(event.engine).url}/inference/v1/abort_requests", json=body, timeout=30.0
            )
        except httpx.TransportError:
            if self.outages.away(event.engine):
                return  # killed meanwhile
            raise
        response.raise_for_status()
        self.injected[f"aborted on {event.engine}"] += 1

    # Faults

    def _begin(self, event: Event) -> None:
        if isinstance(event, Tamper):
            self._desk.order(event.engine, event.fault, event.of, seconds=event.seconds)
        elif isinstance(event, HangUp | Abort):
            self._wishes.append(Wish(event))
        elif isinstance(event, Crowd):
            self._crowded_until = event.at + CROWD_SECONDS
        else:
            self._faults.add(asyncio.create_task(self._carry_out(event), name=repr(event)))

    async def _carry_out(self, event: Pause | Kill | DeafPeer) -> None:
        if isinstance(event, DeafPeer):
            await self._send_to_deaf_peer(event)
            return
        if self._upheaval.locked() and isinstance(event, Pause) and not event.past_lease:
            return  # there are many of these
        async with self._upheaval:
            if self._over:
                return
            if isinstance(event, Kill):
                await self._kill(event.server)
            elif event.past_lease:
                await self._pause_past_lease(event.engine)
            else:
                await self._pause(event.engine, event.share * self._stall_seconds)
                self.injected[f"worker of {event.engine} stopped"] += 1

    async def _pause(self, engine: EngineName, seconds: float) -> None:
        self._follower.poll()
        workers = self._follower.workers(engine)
        if not workers:
            raise RuntimeError(f"{engine} has no worker that can be stopped")
        try:
            for worker in workers:
                os.kill(worker, signal.SIGSTOP)
            await asyncio.sleep(seconds)
        finally:
            for worker in workers:
                with contextlib.suppress(ProcessLookupError):  # it died, and `_check_servers` says so
                    os.kill(worker, signal.SIGCONT)

    async def _pause_past_lease(self, engine: EngineName) -> None:
        """Stop a worker for longer than its leases. With a push in flight that would break the assumption
        on which leases on pushes rest (rule R3), so pushes end first.
        """
        self._no_pushes = True
        try:
            deadline = time.monotonic() + NO_PUSH_SECONDS
            while self._layerwise or self._follower.pushes():
                self._follower.poll()
                if time.monotonic() > deadline:
                    return
                await asyncio.sleep(TICK_SECONDS)
            await self._pause(engine, 1.5 * self._lease_seconds)
            self.injected[f"worker of {engine} stopped past its leases"] += 1
        finally:
            self._no_pushes = False

    async def _kill(self, name: ServerName) -> None:
        server = self._server(name)
        if isinstance(server, Engine):
            self.preemptions += await metrics.preemptions(self._client, server.url)
        outage = self.outages.begin(name)
        server.kill()
        self.injected[f"{name} killed"] += 1
        server.start()
        deadline = time.monotonic() + RESTART_SECONDS
        while not await asyncio.to_thread(is_healthy, server.url):
            server.check()
            if time.monotonic() > deadline:
                raise RuntimeError(f"{name} did not come back within {RESTART_SECONDS:g} s")
            await asyncio.sleep(0.25)
        outage.until = time.time()
        self.injected[f"{name} restarted on the same port"] += 1

    async def _send_to_deaf_peer(self, event: DeafPeer) -> None:
        """Ask an engine directly, as a router would that names a peer which takes everything and says
        nothing.
        """
        if self.outages.away(event.engine):
            return
        self._numbers += 1
        mode: Mode = "blockwise" if event.engine == "decode" else "layerwise"
        asked = msgspec.structs.replace(
            question(self._pool, self._plan.seed, self._numbers, mode=mode), stream=False
        )
        decodes = event.engine == "decode"
        params = self._deaf.params(f"deaf-{self._plan.seed}-{asked.number}", decodes=decodes)
        prompt, reference = self._pool.prompts[asked.prompt], self._references[asked.prompt]
        if not decodes:
            # A prefill engine is asked for one token.
            prompt = msgspec.structs.replace(prompt, output_tokens=1)
            reference = msgspec.structs.replace(reference, token_ids=(reference.token_ids or ())[:1])
        sent = time.time()
        verdict, detail = await Exchange(asked, prompt, reference).run(
            self._client,
            self._engine(event.engine).url,
            self._running.spec.served_model_name,
            kv_transfer_params=params,
        )
        self._note(asked, sent, verdict, detail, event.engine)
        self.injected[f"{event.engine} sent to a deaf peer"] += 1

    # Helpers

    def _check_servers(self) -> None:
        """Raise `LaunchError` if a server has ended that nobody killed."""
        names: tuple[ServerName, ...] = ("prefill", "decode", "router")
        for name in names:
            if not self.outages.away(name):
                self._server(name).check()

    def _engine(self, name: EngineName) -> Engine:
        return self._running.prefill[0] if name == "prefill" else self._running.decode[0]

    def _server(self, name: ServerName) -> Server:
        return self._running.router if name == "router" else self._engine(name)

    def _take_ended(self, tasks: set["asyncio.Task[None]"]) -> None:
        """Forget the tasks that have ended; raise what one of them raised."""
        for task in [task for task in tasks if task.done()]:
            tasks.discard(task)
            task.result()

    async def _gather(self, tasks: set["asyncio.Task[None]"], seconds: float) -> None:
        if not tasks:
            return
        _, late = await asyncio.wait(tasks, timeout=seconds)
        for task in late:
            task.cancel()
        self._take_ended(tasks)
        if late:
            raise RuntimeError(f"{next(iter(late)).get_name()} did not end within {seconds:g} s")

    async def _count_preemptions(self) -> None:
        for engine in self._running.engines:
            self.preemptions += await metrics.preemptions(self._client, engine.url)
