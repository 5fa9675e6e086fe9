"""What a run of chaos does, and when: all of it follows from the seed and the length of the run alone."""

import random
from collections.abc import Iterator
from typing import Literal

import msgspec
from dfirst.protocol.specification import load_machine

from ..engine_spec import Mode
from .orders import COPY_FAULTS, MESSAGE_FAULTS, CopyFault, MessageFault

EngineName = Literal["prefill", "decode"]
ServerName = Literal["prefill", "decode", "router"]

ENGINES: tuple[EngineName, ...] = ("prefill", "decode")
MODES: tuple[Mode, ...] = ("blockwise", "blockwise-d-first", "layerwise")

MESSAGES_A_SECOND = 2.4
COPIES_A_SECOND = 0.16
HANG_UPS_A_SECOND = 0.14
ABORTS_A_SECOND = 0.07
PAUSE_EVERY_SECONDS = 20.0
DEAF_EVERY_SECONDS = 30.0
CROWD_EVERY_SECONDS = 60.0
LOAD_CHANGES_EVERY_SECONDS = 12.0
CROWD_SECONDS = 8.0
MOST_REQUESTS = 32
USUAL_REQUESTS = 10
KILLS_FROM_MINUTES = 3.0
"""A shorter run kills no engine: starting one again would take most of it."""

USUAL_MESSAGES = ("QUERY", "METADATA", "DONE", "ACK")
"""Both engines send all of these, each in its mode."""
RARE_MESSAGES = ("WAIT", "RENEW", "RENEWED", "STOPPED", "CANCEL", "GONE", "LAYOUT_QUERY", "LAYOUT", "")
"""The last stands for any."""
USUAL_SHARE = 0.8

HANG_UP_MACHINES: dict[Mode, tuple[str, ...]] = {
    "blockwise": ("prefill_blockwise", "decode_blockwise", "prefill_request", "decode_request"),
    "blockwise-d-first": ("prefill_blockwise", "decode_blockwise", "prefill_request", "decode_request"),
    "layerwise": ("prefill_layerwise", "decode_layerwise", "prefill_request", "decode_request"),
}
NOT_WAITED_FOR = ("NEW", "CANCELLING", "FAILED", "DUPLICATE", "ABORTING", "LOAD_FAILED", "LOCAL")
"""States that a transfer leaves at once, or reaches only after something went wrong."""
AFTER_SECONDS = (0.0, 0.02, 0.1, 0.5, 1.5)
"""How long after a state was entered: before the next one, inside it, and behind it."""


class Tamper(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The next message, or copy, of this engine goes wrong."""

    at: float
    engine: EngineName
    fault: MessageFault | CopyFault
    of: str
    seconds: float = 0.0


class HangUp(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A client leaves, a while after its transfer has entered a state."""

    at: float
    mode: Mode
    machine: str
    state: str
    after: float


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One of the two engines is told to drop a request; its client waits on."""

    at: float
    mode: Mode
    engine: EngineName
    machine: str
    state: str
    after: float


class Pause(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """SIGSTOP to a worker, and SIGCONT: by the share of the stall allowance, or for longer than a lease."""

    at: float
    engine: EngineName
    past_lease: bool
    share: float = 0.0


class Kill(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """SIGKILL, and a new start on the same ports."""

    at: float
    server: ServerName


class DeafPeer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An engine is sent to a peer that accepts connections and never answers."""

    at: float
    engine: EngineName


class Crowd(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """So many long answers at once that they do not fit into the KV cache."""

    at: float


Event = Tamper | HangUp | Abort | Pause | Kill | DeafPeer | Crowd


class Phase(msgspec.Struct, frozen=True):
    """From `at` on, so many requests are under way."""

    at: float
    requests: int


class Plan(msgspec.Struct, frozen=True):
    """A whole run; times are seconds after its start."""

    seed: int
    seconds: float
    events: tuple[Event, ...]
    phases: tuple[Phase, ...]

    def requests_at(self, seconds: float) -> int:
        """Return how many requests should be under way."""
        crowds = (event.at for event in self.events if isinstance(event, Crowd))
        if any(at <= seconds < at + CROWD_SECONDS for at in crowds):
            return MOST_REQUESTS
        return [phase.requests for phase in self.phases if phase.at <= seconds][-1]


def make_plan(seed: int, minutes: float) -> Plan:
    """Return the plan of a run."""
    seconds = minutes * 60
    chance = random.Random(f"chaos {seed} {minutes}")
    events: list[Event] = [
        *_messages(chance, seconds),
        *_copies(chance, seconds),
        *_hang_ups(chance, seconds),
        *_aborts(chance, seconds),
        *_upheavals(chance, seconds),
        *(Crowd(at=at) for at in _spread(chance, seconds, CROWD_EVERY_SECONDS)),
    ]
    deaf = _spread(chance, seconds, DEAF_EVERY_SECONDS)
    events += [DeafPeer(at=at, engine=ENGINES[number % 2]) for number, at in enumerate(deaf)]
    count = max(1, int(seconds // LOAD_CHANGES_EVERY_SECONDS))
    phases = [
        Phase(number * LOAD_CHANGES_EVERY_SECONDS, chance.randint(1, USUAL_REQUESTS))
        for number in range(count)
    ]
    return Plan(seed, seconds, tuple(sorted(events, key=lambda event: event.at)), tuple(phases))


def _messages(chance: random.Random, seconds: float) -> Iterator[Tamper]:
    for number in range(int(seconds * MESSAGES_A_SECOND)):
        usual = chance.random() < USUAL_SHARE
        yield Tamper(
            at=chance.uniform(0, seconds),
            engine=chance.choice(ENGINES),
            fault=MESSAGE_FAULTS[number % len(MESSAGE_FAULTS)],
            of=chance.choice(USUAL_MESSAGES if usual else RARE_MESSAGES),
            seconds=round(chance.uniform(0.05, 3.0), 2),
        )


def _copies(chance: random.Random, seconds: float) -> Iterator[Tamper]:
    for number in range(int(seconds * COPIES_A_SECOND)):
        engine = ENGINES[number % 2]
        yield Tamper(
            at=chance.uniform(0, seconds),
            engine=engine,
            fault=COPY_FAULTS[number // 2 % len(COPY_FAULTS)],
            of="write" if engine == "prefill" else "read",
            seconds=round(chance.uniform(0.1, 1.0), 2),
        )


def _hang_ups(chance: random.Random, seconds: float) -> Iterator[HangUp]:
    moments = list(_moments())
    chance.shuffle(moments)
    for number in range(int(seconds * HANG_UPS_A_SECOND)):
        mode, machine, state = moments[number % len(moments)]
        yield HangUp(
            at=chance.uniform(0, seconds),
            mode=mode,
            machine=machine,
            state=state,
            after=chance.choice(AFTER_SECONDS),
        )


def _aborts(chance: random.Random, seconds: float) -> Iterator[Abort]:
    for number in range(int(seconds * ABORTS_A_SECOND)):
        engine = ENGINES[number % 2]
        # An engine can drop a request from the moment at which its scheduler has heard of it.
        moments = [moment for moment in _moments() if moment[1].startswith(engine) and moment[2] != "FREED"]
        mode, machine, state = chance.choice(moments)
        yield Abort(
            at=chance.uniform(0, seconds),
            mode=mode,
            engine=engine,
            machine=machine,
            state=state,
            after=chance.choice(AFTER_SECONDS[:3]),
        )


def _moments() -> Iterator[tuple[Mode, str, str]]:
    for mode, machines in HANG_UP_MACHINES.items():
        for machine in machines:
            for state in load_machine(machine).states:
                if state.name not in NOT_WAITED_FOR:
                    yield mode, machine, state.name


def _upheavals(chance: random.Random, seconds: float) -> Iterator[Pause | Kill]:
    """Whole processes stop or die; one at a time, and the last one early enough to see what comes of it."""
    pauses = _spread(chance, seconds, PAUSE_EVERY_SECONDS)
    for number, at in enumerate(pauses):
        share = round(chance.uniform(0.2, 0.7), 2)
        yield Pause(at=at, engine=ENGINES[number % 2], past_lease=False, share=share)
    first: EngineName = chance.choice(ENGINES)
    second: EngineName = "decode" if first == "prefill" else "prefill"
    if seconds < KILLS_FROM_MINUTES * 60:
        yield Kill(at=0.25 * seconds, server="router")
        yield Pause(at=0.55 * seconds, engine=first, past_lease=True)
        return
    yield Pause(at=0.06 * seconds, engine=first, past_lease=True)
    yield Kill(at=0.12 * seconds, server="router")
    yield Kill(at=0.16 * seconds, server=first)
    yield Pause(at=0.44 * seconds, engine=second, past_lease=True)
    yield Kill(at=0.50 * seconds, server=second)
    yield Kill(at=0.80 * seconds, server="router")
    yield Pause(at=0.90 * seconds, engine=first, past_lease=True)


def _spread(chance: random.Random, seconds: float, every: float) -> list[float]:
    """Return one moment in each stretch of this length, and at least one."""
    count = max(1, int(seconds // every))
    width = seconds / count
    return [(number + chance.uniform(0.1, 0.9)) * width for number in range(count)]
