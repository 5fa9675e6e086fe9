"""What a rank makes of a message or a command, held against the rules that speak of a single answer.

Some rules say what a rank must never do later (lend after CANCEL, grant after the release). Where such a
rule begins to hold, the rank is asked on the side what it would answer now; the world does not see it.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from dfirst.protocol.commands import AbortTransfer, AcceptPush, Command, OfferBlocks
from dfirst.protocol.effects import Effect, Reply, Report, Send
from dfirst.protocol.messages import (
    Cancel,
    Done,
    Gone,
    Message,
    Metadata,
    Query,
    Renew,
    Renewed,
    Sender,
    Stage,
    Staged,
    Stopped,
    TransferKey,
    Wait,
)
from dfirst.protocol.modes import OWNER

from .codec import LEASE_PARTS, LEASE_SLOT, LEASES, MOVERS, OWNERS, PARKED, TIMERS, TRANSFER_STATE, Code
from .sites import Sites
from .violation import Violation

KEY, LEGS = 1, -1
"""Places in the tuple of a transfer."""
PEER, LEG_STATE, LEASE_UNTIL, ASKED, LENT, LEG_FAILED = 0, 3, 4, 5, 6, 8
"""Places in the tuple of a leg."""
PENDING = ("PULLS_PENDING", "PUSHES_PENDING")
LAST_WORDS = ("DONE", "STOPPED")
HIGH = 39
"""The number of questions on the side: newer than any that a world has."""

Ask = Callable[[int, Message], list[Message]]


class Reaction(NamedTuple):
    """What an event made of a rank."""

    core: int
    became: int
    before: Code
    after: Code
    effects: list[Effect]

    @property
    def messages(self) -> list[Message]:
        """Return what the rank says."""
        return [each.message for each in self.effects if isinstance(each, Send | Reply)]

    @property
    def said(self) -> set[str]:
        """Return the kinds of messages that it says."""
        return {type(message).__name__ for message in self.messages}


class Answers:
    """The checks, for one world."""

    def __init__(self, sites: Sites, ask: Ask) -> None:
        self.sites = sites
        self.ask = ask
        self.timing = sites.configuration.timing

    def check_heard(self, site: int, sender: Sender, reaction: Reaction, message: Message) -> None:
        """Hold the reaction to a message against the rules."""
        name = self.sites.names[site]
        meant = getattr(message, "target_incarnation", None)
        if meant is not None and meant != sender.incarnation:
            _check_stranger(name, reaction, message)
            return
        before, after = lease_ends(reaction.before), lease_ends(reaction.after)
        if any(after.get(leg, until) < until for leg, until in before.items()):
            raise Violation("R1", f"{type(message).__name__} moves the end of a lease back at {name}")
        if isinstance(message, Query):
            _check_question(name, reaction, message)
        elif isinstance(message, Renew):
            _check_renewal(name, reaction, message)
        elif isinstance(message, Metadata):
            _check_grant(name, reaction, message)
        elif isinstance(message, Stage):
            _check_staging(name, reaction, message)
        elif isinstance(message, Wait):
            self._check_patience(site, reaction, message)
        elif isinstance(message, Done | Stopped | Cancel):
            if "Ack" not in reaction.said:
                raise Violation("R8", f"{name} does not acknowledge {type(message).__name__}")
            if isinstance(message, Cancel):
                self._check_cancelled(site, sender, reaction, message)
        self.check_released(site, sender, reaction)

    def check_told(self, site: int, sender: Sender, reaction: Reaction, command: Command) -> None:
        """Hold the reaction to a command against the rules."""
        if isinstance(command, OfferBlocks | AcceptPush) and not _reports(reaction):
            self._check_hold(site, reaction, command.key)
        elif isinstance(command, AbortTransfer):
            _check_stops(self.sites.names[site], reaction, command.key, "an abort")
            # PARKED: forgotten long ago, and a question that came late; it hears GONE after the hold time.
            known = [owner for owner in reaction.after[OWNERS] if owner[TRANSFER_STATE] != "PARKED"]
            if any(owner[KEY] == command.key for owner in known):
                self._check_refuses(site, sender, reaction.became, command.key, "an abort")
        self.check_released(site, sender, reaction)

    def check_released(self, site: int, sender: Sender, reaction: Reaction) -> None:
        """After the release a question and a renewal are refused (rule R8)."""
        owned = {owner[KEY] for owner in reaction.after[OWNERS]}
        for key in _reports(reaction) & owned:
            self._check_refuses(site, sender, reaction.became, key, "the release")

    def check_collected(self, site: int, sender: Sender, reaction: Reaction, key: TransferKey) -> None:
        """And so they are when vLLM has taken the report."""
        if any(owner[KEY] == key for owner in reaction.after[OWNERS]):
            self._check_refuses(site, sender, reaction.became, key, "the release")

    def _check_patience(self, site: int, reaction: Reaction, answer: Wait) -> None:
        """Who hears WAIT asks again within half a lease (rule R9)."""
        rate = self.sites.rate_of[site]
        half = -(-self.timing.lease_seconds / 2 // rate) * rate
        place = -1
        for mover in reaction.after[MOVERS]:
            place += 1
            for leg in mover[LEGS]:
                place += 1
                mine = mover[KEY] == answer.key and leg[PEER].incarnation == answer.sender.incarnation
                if not mine or answer.sequence not in dict(leg[ASKED]):
                    continue
                due = [
                    at
                    for at, which, timer in reaction.after[TIMERS]
                    if (which, timer) == (place, "query_retry")
                ]
                if not due or due[0] > half:
                    name = self.sites.names[site]
                    raise Violation("R9", f"{name} heard WAIT and does not ask again within half a lease")

    def _check_hold(self, site: int, reaction: Reaction, key: TransferKey) -> None:
        """Blocks that nobody asks for are held for the hold time, and no longer than the deadline (R9)."""
        name = self.sites.names[site]
        for place, transfer in _places(reaction.after):
            if transfer[KEY] != key:
                continue
            timers = {timer: at for at, which, timer in reaction.after[TIMERS] if which == place}
            if timers.get("hold_end", 0.0) < self.timing.hold_seconds:
                raise Violation("R9", f"{name} holds its blocks for less than the hold time")
            if "deadline" not in timers:
                raise Violation("R9", f"{name} waits without a deadline")

    def _check_cancelled(self, site: int, sender: Sender, reaction: Reaction, message: Cancel) -> None:
        """CANCEL: an owner lends no more and refuses renewals; a mover issues no more copies (rule R8)."""
        if message.target == OWNER:
            if any(owner[KEY] == message.key for owner in reaction.after[OWNERS]):
                self._check_refuses(site, sender, reaction.became, message.key, "CANCEL")
            return
        if self.sites.configuration.layerwise:
            _check_stops(self.sites.names[site], reaction, message.key, "CANCEL")

    def _check_refuses(self, site: int, sender: Sender, core: int, key: TransferKey, after: str) -> None:
        name = self.sites.names[site]
        for mover in self.sites.of_engine[self.sites.mover]:
            question = self.sites.question(mover, 0, sender, key, HIGH)
            answers = self.ask(core, question)
            if {type(answer).__name__ for answer in answers} != {"Gone"}:
                raise Violation("R8", f"{name} does not refuse a question after {after}")
            renewal = Renew(question.sender, HIGH, sender.incarnation, question.mode, [key])
            granted = [
                each for each in self.ask(core, renewal) if isinstance(each, Renewed) and each.extended
            ]
            if granted:
                raise Violation("R8", f"{name} grants a renewal after {after}")


def _check_stops(name: str, reaction: Reaction, key: TransferKey, after: str) -> None:
    """A mover that gives a transfer up asks no more and issues no more copies (rule R8)."""
    legs = (leg for mover in reaction.after[MOVERS] if mover[KEY] == key for leg in mover[LEGS])
    if any(leg[LEG_STATE] in ("METADATA_QUERY", "COPYING") for leg in legs):
        raise Violation("R8", f"{name} goes on with questions or copies after {after}")


def check_times(name: str, reaction: Reaction) -> None:
    """The hold time and the deadline end the waiting that they are there for (rule R9)."""
    waiting = {transfer[KEY]: transfer[TRANSFER_STATE] for transfer in _transfers(reaction.after)}
    for place, transfer in _places(reaction.before):
        rang = {timer for at, which, timer in reaction.before[TIMERS] if which == place and at <= 0}
        state = waiting.get(transfer[KEY], "")
        if "deadline" in rang and state in ("METADATA_QUERY", *PENDING):
            raise Violation("R9", f"{name} waits in {state} beyond its deadline")
        if "hold_end" in rang and state in ("PARKED", "METADATA_QUERY"):
            raise Violation("R9", f"{name} waits in {state} beyond the hold time")


def _check_stranger(name: str, reaction: Reaction, message: Message) -> None:
    """What was meant for another incarnation changes nothing, and is told so."""
    meant = message.target_incarnation  # type: ignore[union-attr]
    if reaction.became != reaction.core:
        raise Violation("S5", f"{type(message).__name__} for {meant} changes something at {name}")
    if isinstance(message, Query | Renew) and not reaction.said & {"Gone", "Renewed"}:
        raise Violation("R6", f"{name} does not say that {meant} is gone")
    if isinstance(message, Done | Stopped | Cancel) and "Ack" not in reaction.said:
        raise Violation("R8", f"{name} does not acknowledge {type(message).__name__}")


def _check_question(name: str, reaction: Reaction, question: Query) -> None:
    """A question is answered: WAIT for an id that is not known yet, and then the newest one is kept (R9)."""
    known = {owner[KEY]: owner for owner in reaction.before[OWNERS]}
    if question.key not in known and "Wait" not in reaction.said:
        raise Violation("R9", f"{name} does not answer WAIT for a transfer that it does not know yet")
    leases = known[question.key][LEASES] if question.key in known else ()
    over = any(lease[0] == question.sender and lease[1] in LAST_WORDS for lease in leases)
    if not over and not reaction.said & {"Metadata", "Wait", "Gone"}:
        raise Violation("R9", f"{name} does not answer a question")
    if "Wait" in reaction.said:
        before, kept = (_parked(code, question) for code in (reaction.before, reaction.after))
        if kept < max(before, question.sequence):
            raise Violation("R9", f"{name} answers WAIT and does not keep the newest question")


def _check_renewal(name: str, reaction: Reaction, renewal: Renew) -> None:
    """A renewal is answered for each transfer (rule R1)."""
    told = [message for message in reaction.messages if isinstance(message, Renewed)]
    if len(told) != 1 or _sorted([*told[0].extended, *told[0].gone]) != _sorted(renewal.keys):
        raise Violation("R1", f"{name} does not answer a renewal for each of its transfers")
    for owner in reaction.before[OWNERS]:
        lent = any(lease[0] == renewal.sender and lease[1] == "LENT" for lease in owner[LEASES])
        if lent and owner[KEY] in told[0].gone and owner[TRANSFER_STATE] in PENDING:
            raise Violation("R1", f"{name} refuses to renew a lease that runs")


def _check_grant(name: str, reaction: Reaction, grant: Metadata) -> None:
    """A grant that is too short is asked for again at once (rule R9)."""
    if grant.sequence not in _asked(reaction.before, grant):
        return
    if _asked(reaction.after, grant) and "Query" not in reaction.said:
        raise Violation("R9", f"{name} does not ask again at once for a grant that was too short")


def _check_staging(name: str, reaction: Reaction, stage: Stage) -> None:
    """A part is refused only if no slot is left, or if it was refused before."""
    leases = [lease for owner in reaction.before[OWNERS] for lease in owner[LEASES]]
    known = {sequence for lease in leases for _, (sequence, _) in lease[LEASE_PARTS]}
    room = stage.sequence not in known and not any(lease[LEASE_SLOT] for lease in leases)
    refused = [each for each in reaction.messages if isinstance(each, Staged) and not each.slot_places]
    if refused and room:
        raise Violation("R9", f"{name} has a slot and does not lend it")


def check_states(name: str, code: Code) -> None:
    """The state that people look at says what is so: pending copies are all lent for, and none is asked for
    or made any more where a leg has failed, so that the prompt cannot be whole.
    """
    for mover in code[MOVERS]:
        if mover[TRANSFER_STATE] in PENDING and not all(leg[LENT] for leg in mover[LEGS]):
            text = f"{name} is in {mover[TRANSFER_STATE]}, and not every rank has lent its blocks"
            raise Violation("F2", text)
        if mover[TRANSFER_STATE] in ("METADATA_QUERY", *PENDING) and any(
            leg[LEG_FAILED] for leg in mover[LEGS]
        ):
            text = f"{name} is in {mover[TRANSFER_STATE]} and copies on, though a leg has failed"
            raise Violation("F2", text)


def check_forgotten(name: str, reaction: Reaction) -> None:
    """A mover forgets a transfer only after its last words are said for good (rule R9)."""
    kept = {mover[KEY] for mover in reaction.after[MOVERS]}
    place = -1
    for mover in reaction.before[MOVERS]:
        place += 1
        for leg in mover[LEGS]:
            place += 1
            if mover[KEY] in kept or leg[LEG_STATE] != "DONE_UNACKED":
                continue
            ends = [
                at
                for at, which, timer in reaction.before[TIMERS]
                if (which, timer) == (place, "farewell_end")
            ]
            if not ends or ends[0] > 0:
                raise Violation("L1", f"{name} forgets a transfer whose last word it says for ever")


def check_parked(name: str, reaction: Reaction) -> None:
    """Who was told to wait for blocks that will not come hears it at once (rule R9)."""
    answers = sum(isinstance(message, Gone) for message in reaction.messages)
    over = {owner[KEY] for owner in reaction.after[OWNERS] if owner[TRANSFER_STATE] == "FREED"}
    waited = [owner for owner in reaction.before[OWNERS] if owner[TRANSFER_STATE] == "PARKED"]
    if sum(len(owner[PARKED]) for owner in waited if owner[KEY] in over) > answers:
        raise Violation("R9", f"{name} forgets a question that it has parked")


def lease_ends(code: Code) -> dict[Any, float]:
    """Return the end of each lease under which a mover copies."""
    legs = ((mover[KEY], leg) for mover in code[MOVERS] for leg in mover[LEGS])
    return {(key, leg[PEER]): leg[LEASE_UNTIL] for key, leg in legs if leg[LEG_STATE] == "COPYING"}


def _transfers(code: Code) -> Iterator[Code]:
    yield from code[MOVERS]
    yield from code[OWNERS]


def _places(code: Code) -> Iterator[tuple[int, Code]]:
    """Yield each transfer with its place among all that have timers."""
    place = 0
    for mover in code[MOVERS]:
        yield place, mover
        place += 1 + len(mover[LEGS])
    for owner in code[OWNERS]:
        yield place, owner
        place += 1 + len(owner[LEASES])


def _reports(reaction: Reaction) -> set[TransferKey]:
    return {effect.key for effect in reaction.effects if isinstance(effect, Report)}


def _asked(code: Code, answer: Metadata) -> list[int]:
    """Return the numbers of the questions that this answer's owner has not answered."""
    legs = (leg for mover in code[MOVERS] if mover[KEY] == answer.key for leg in mover[LEGS])
    return [
        number
        for leg in legs
        if leg[PEER].incarnation == answer.sender.incarnation
        for number, _ in leg[ASKED]
    ]


def _parked(code: Code, question: Query) -> int:
    """Return the number of the question that is kept for a mover; 0 if there is none."""
    parked = [dict(owner[PARKED]) for owner in code[OWNERS] if owner[KEY] == question.key]
    kept = parked[0].get(question.sender) if parked else None
    return kept.sequence if kept else 0


def _sorted(keys: list[TransferKey]) -> list[tuple[str, int]]:
    return sorted((key.transfer_id, key.attempt) for key in keys)
