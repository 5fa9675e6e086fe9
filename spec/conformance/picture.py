"""What a rank looks like by the lines that it has written so far: its machines, its legs, its leases."""

from dataclasses import dataclass, field
from typing import NamedTuple

from dfirst.protocol.specification import TransitionSpec, load_timers
from dfirst.protocol.trace_lines import ExpectLine, MessageLine, StartLine, StepLine

QUIET = ("DONE_UNACKED", "FREED")
LAST_WORDS = {"say_done": "DONE", "say_stopped": "STOPPED", "say_cancel": "CANCEL"}
ENDS_PARKING = {"answer_parked", "refuse_parked", "entomb"}


class Key(NamedTuple):
    """A transfer."""

    transfer: str
    attempt: int


class PeerKey(NamedTuple):
    """A leg of a transfer: the rank at its other end."""

    key: Key
    peer: str


class Entity(NamedTuple):
    """What a machine moves."""

    machine: str
    key: Key
    peer: str


@dataclass
class Leg:
    """A mover's leg."""

    state: str = "NEW"
    lent: bool = False
    copied: bool = False
    failed: bool = False
    last_word: str = ""
    word_number: int = 0
    asked: dict[int, float] = field(default_factory=dict)
    """When each question was sent, by its number."""
    renewals: dict[int, float] = field(default_factory=dict)
    lease_until: float = 0.0
    in_flight: bool = False
    grant: int = 0
    parts: set[int] = field(default_factory=set)
    """Parts that were asked for and have not been handed on."""
    newest_part: int = 0

    def awaits(self, answer: MessageLine) -> bool:
        """Return whether an answer is to a question that had been asked by then, or an ACK to the word."""
        if answer.message == "ACK":
            return answer.sequence == self.word_number
        if answer.message == "STAGED":
            return answer.sequence in self.parts
        asked = self.renewals if answer.message == "RENEWED" else self.asked
        return asked.get(answer.sequence, answer.time + 1) <= answer.time


@dataclass
class Lease:
    """What an owner has lent to a mover."""

    state: str = "NEW"
    extended_at: float = 0.0
    at_work: int = 0
    """Parts that are being gathered or scattered for the mover."""
    grant: int = 0
    number: int = 0
    """The newest question's that was granted."""
    parts: set[int] = field(default_factory=set)
    """Parts that were taken, or refused."""


class Picture:
    """Everything that a rank's trace has shown."""

    def __init__(self, start: StartLine) -> None:
        self.name = f"{start.engine}/{start.rank}/{start.incarnation}"
        self.timers = {timer.name: timer.default for timer in load_timers().timers} | start.timers
        self.states: dict[Entity, str] = {}
        self._legs: dict[Key, dict[str, Leg]] = {}
        self._leases: dict[Key, dict[str, Lease]] = {}
        self.expected: dict[Key, tuple[str, ...]] = {}
        self.held_at: dict[Key, float] = {}
        self.parked: dict[Key, set[str]] = {}
        self.reporting: dict[Key, str] = {}
        """Outcomes that a row has decided and vLLM has not taken yet."""
        self.reported: dict[Key, str] = {}
        """Outcomes that vLLM has taken."""
        self.sequences: set[int] = set()
        self.last_sequence = 0

    @property
    def tolerance_seconds(self) -> float:
        """A line is written a little after what it tells of."""
        return self.timers["clock_step_seconds"]

    def state(self, entity: Entity, initial: str) -> str:
        """Return the state that a machine is in."""
        return self.states.get(entity, initial)

    def leg(self, at: PeerKey) -> Leg:
        """Return a mover's leg."""
        return self._legs.setdefault(at.key, {}).setdefault(at.peer, Leg())

    def lease(self, at: PeerKey) -> Lease:
        """Return an owner's lease."""
        return self._leases.setdefault(at.key, {}).setdefault(at.peer, Lease())

    def legs_of(self, key: Key) -> dict[str, Leg]:
        """Return the legs of a transfer by their owners."""
        return self._legs.get(key, {})

    def leases_of(self, key: Key) -> dict[str, Lease]:
        """Return the leases of a transfer by their movers."""
        return self._leases.get(key, {})

    def lent_to(self, key: Key) -> list[str]:
        """Return the movers whose copies, or what is done for them, may still reach a transfer's blocks."""
        leases = self.leases_of(key).items()
        return [peer for peer, lease in leases if lease.state == "LENT" or lease.at_work]

    def pushes(self, key: Key) -> bool:
        """Return whether a transfer's blocks are written by others."""
        return Entity("decode_layerwise", key, "") in self.states

    def reads(self, key: Key) -> bool:
        """Return whether this rank reads for a transfer."""
        return Entity("decode_blockwise", key, "") in self.states

    # What lines change

    def expects(self, line: ExpectLine) -> None:
        """Take whom an owner expects."""
        self.expected[Key(line.transfer, line.attempt)] = tuple(line.peers)

    def step(self, line: StepLine, row: TransitionSpec, cause: MessageLine | None) -> None:
        """Take what a row changed."""
        key = Key(line.transfer, line.attempt)
        self.states[Entity(line.machine, key, line.peer)] = line.target
        if line.machine == "mover_leg":
            self._leg_step(self.leg(PeerKey(key, line.peer)), line, row, cause)
        elif line.machine == "owner_leg":
            lease = self.lease(PeerKey(key, line.peer))
            lease.state = line.target
            lease.at_work += ("start_staging" in row.effects) - ("note_staged" in row.effects)
            if "extend" in row.effects:
                lease.extended_at = line.time
            if "new_part" in row.guards and cause is not None:
                lease.parts.add(cause.sequence)
        else:
            self._transfer_step(key, line, row, cause)

    def _leg_step(self, leg: Leg, line: StepLine, row: TransitionSpec, cause: MessageLine | None) -> None:
        leg.state = line.target
        if line.event in ("release", "renounce"):
            leg.lent = leg.copied = True
        if "take_lease" in row.effects and cause is not None:
            leg.lent = True
            leg.grant = cause.grant
            leg.lease_until = max(leg.lease_until, leg.asked[cause.sequence] + cause.lease_seconds)
        if "extend_lease" in row.effects and cause is not None:
            # An answer is taken once.
            asked_at = leg.renewals.pop(cause.sequence)
            leg.lease_until = max(leg.lease_until, asked_at + cause.lease_seconds)
        if "fail_leg" in row.effects:
            leg.failed = True
        if "hand_on_part" in row.effects and cause is not None:
            leg.parts.discard(cause.sequence)
        if leg.state != "COPYING":
            leg.parts.clear()
        for effect in row.effects:
            leg.last_word = LAST_WORDS.get(effect, leg.last_word)
        if "say_done" in row.effects:
            leg.copied = True

    def _transfer_step(
        self, key: Key, line: StepLine, row: TransitionSpec, cause: MessageLine | None
    ) -> None:
        if "hold" in row.effects:
            self.held_at[key] = line.time
        if "park" in row.effects:
            parked = self.parked.setdefault(key, set())
            # A parked question that is judged again and parked again is of a mover that no line names.
            parked.add(cause.sender if cause is not None else str(len(parked)))
        for effect in row.effects:
            if effect.startswith("report_"):
                self.reporting[key] = effect.removeprefix("report_")
                self.reported.pop(key, None)
        if ENDS_PARKING & set(row.effects):
            self.parked.pop(key, None)
        if "forget" in row.effects:
            self._forget(key, line.machine)

    def _forget(self, key: Key, machine: str) -> None:
        del self.states[Entity(machine, key, "")]
        mover = machine in ("decode_blockwise", "prefill_layerwise")
        legs = self._legs.pop(key, {}) if mover else self._leases.pop(key, {})
        for peer in legs:
            self.states.pop(Entity("mover_leg" if mover else "owner_leg", key, peer), None)
        for memory in (self.expected, self.held_at, self.parked, self.reporting, self.reported):
            memory.pop(key, None)
