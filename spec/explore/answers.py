"""What a rank makes of a message or a command, held against the rules that speak of a single answer.

Some rules say what a rank must never do later (lend after CANCEL, grant after the release). Where such a
rule begins to hold, the rank is asked on the side what it would answer now; the world does not see it.
"""

from collections.abc import Callable
from math import inf
from typing import NamedTuple

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
from dfirst.protocol.mover_leg import Peer

from .codes import CoreCode, leg_places, places
from .sites import Sites
from .violation import Violation

PENDING = ("PULLS_PENDING", "PUSHES_PENDING")
LAST_WORDS = ("DONE", "STOPPED")
HIGH = 39
"""The number of questions on the side: newer than any that a world has."""

Ask = Callable[[int, Message], list[Message]]


class Reaction(NamedTuple):
    """What an event made of a rank."""

    core: int
    became: int
    before: CoreCode
    after: CoreCode
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
            known = [owner for owner in reaction.after.owners if owner.state != "PARKED"]
            if any(owner.key == command.key for owner in known):
                self._check_refuses(site, sender, reaction.became, command.key, "an abort")
        self.check_released(site, sender, reaction)

    def check_released(self, site: int, sender: Sender, reaction: Reaction) -> None:
        """After the release a question and a renewal are refused (rule R8)."""
        owned = {owner.key for owner in reaction.after.owners}
        for key in _reports(reaction) & owned:
            self._check_refuses(site, sender, reaction.became, key, "the release")

    def check_collected(self, site: int, sender: Sender, reaction: Reaction, key: TransferKey) -> None:
        """And so they are when vLLM has taken the report."""
        if any(owner.key == key for owner in reaction.after.owners):
            self._check_refuses(site, sender, reaction.became, key, "the release")

    def _check_patience(self, site: int, reaction: Reaction, answer: Wait) -> None:
        """Who hears WAIT asks again within half a lease (rule R9)."""
        rate = self.sites.rate_of[site]
        half = -(-self.timing.lease_seconds / 2 // rate) * rate
        for place, mover, leg in leg_places(reaction.after):
            mine = mover.key == answer.key and leg.peer.incarnation == answer.sender.incarnation
            if not mine or answer.sequence not in dict(leg.asked):
                continue
            if reaction.after.timers_of(place).get("query_retry", inf) > half:
                name = self.sites.names[site]
                raise Violation("R9", f"{name} heard WAIT and does not ask again within half a lease")

    def _check_hold(self, site: int, reaction: Reaction, key: TransferKey) -> None:
        """Blocks that nobody asks for are held for the hold time, and no longer than the deadline (R9)."""
        name = self.sites.names[site]
        for place, transfer in places(reaction.after):
            if transfer.key != key:
                continue
            timers = reaction.after.timers_of(place)
            if timers.get("hold_end", 0.0) < self.timing.hold_seconds:
                raise Violation("R9", f"{name} holds its blocks for less than the hold time")
            if "deadline" not in timers:
                raise Violation("R9", f"{name} waits without a deadline")

    def _check_cancelled(self, site: int, sender: Sender, reaction: Reaction, message: Cancel) -> None:
        """CANCEL: an owner lends no more and refuses renewals; a mover issues no more copies (rule R8)."""
        if message.target == OWNER:
            if any(owner.key == message.key for owner in reaction.after.owners):
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
    legs = (leg for mover in reaction.after.movers if mover.key == key for leg in mover.legs)
    if any(leg.state in ("METADATA_QUERY", "COPYING") for leg in legs):
        raise Violation("R8", f"{name} goes on with questions or copies after {after}")


def check_times(name: str, reaction: Reaction) -> None:
    """The hold time and the deadline end the waiting that they are there for (rule R9)."""
    waiting = {transfer.key: transfer.state for transfer in reaction.after.transfers}
    for place, transfer in places(reaction.before):
        rang = {timer for timer, at in reaction.before.timers_of(place).items() if at <= 0}
        state = waiting.get(transfer.key, "")
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
    known = {owner.key: owner for owner in reaction.before.owners}
    if question.key not in known and "Wait" not in reaction.said:
        raise Violation("R9", f"{name} does not answer WAIT for a transfer that it does not know yet")
    leases = known[question.key].leases if question.key in known else ()
    over = any(lease.mover == question.sender and lease.state in LAST_WORDS for lease in leases)
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
    for owner in reaction.before.owners:
        lent = any(lease.mover == renewal.sender and lease.state == "LENT" for lease in owner.leases)
        if lent and owner.key in told[0].gone and owner.state in PENDING:
            raise Violation("R1", f"{name} refuses to renew a lease that runs")


def _check_grant(name: str, reaction: Reaction, grant: Metadata) -> None:
    """A grant that is too short is asked for again at once (rule R9)."""
    if grant.sequence not in _asked(reaction.before, grant):
        return
    if _asked(reaction.after, grant) and "Query" not in reaction.said:
        raise Violation("R9", f"{name} does not ask again at once for a grant that was too short")


def _check_staging(name: str, reaction: Reaction, stage: Stage) -> None:
    """A part is refused only if no slot is left, or if it was refused before."""
    leases = list(reaction.before.leases)
    known = {sequence for lease in leases for _, (sequence, _) in lease.parts}
    room = stage.sequence not in known and not any(lease.has_slot for lease in leases)
    refused = [each for each in reaction.messages if isinstance(each, Staged) and not each.slot_places]
    if refused and room:
        raise Violation("R9", f"{name} has a slot and does not lend it")


def check_states(name: str, code: CoreCode) -> None:
    """The state that people look at says what is so: pending copies are all lent for, and none is asked for
    or made any more where a leg has failed, so that the prompt cannot be whole.
    """
    for mover in code.movers:
        if mover.state in PENDING and not all(leg.lent for leg in mover.legs):
            raise Violation("F2", f"{name} is in {mover.state}, and not every rank has lent its blocks")
        if mover.state in ("METADATA_QUERY", *PENDING) and any(leg.failure for leg in mover.legs):
            raise Violation("F2", f"{name} is in {mover.state} and copies on, though a leg has failed")


def check_forgotten(name: str, reaction: Reaction) -> None:
    """A mover forgets a transfer only after its last words are said for good (rule R9)."""
    kept = {mover.key for mover in reaction.after.movers}
    for place, mover, leg in leg_places(reaction.before):
        if mover.key in kept or leg.state != "DONE_UNACKED":
            continue
        if reaction.before.timers_of(place).get("farewell_end", inf) > 0:
            raise Violation("L1", f"{name} forgets a transfer whose last word it says for ever")


def check_parked(name: str, reaction: Reaction) -> None:
    """Who was told to wait for blocks that will not come hears it at once (rule R9)."""
    answers = sum(isinstance(message, Gone) for message in reaction.messages)
    over = {owner.key for owner in reaction.after.owners if owner.state == "FREED"}
    waited = [owner for owner in reaction.before.owners if owner.state == "PARKED"]
    if sum(len(owner.parked) for owner in waited if owner.key in over) > answers:
        raise Violation("R9", f"{name} forgets a question that it has parked")


def lease_ends(code: CoreCode) -> dict[tuple[TransferKey, Peer], float]:
    """Return the end of each lease under which a mover copies."""
    legs = ((mover.key, leg) for mover in code.movers for leg in mover.legs)
    return {(key, leg.peer): leg.lease_until for key, leg in legs if leg.state == "COPYING"}


def _reports(reaction: Reaction) -> set[TransferKey]:
    return {effect.key for effect in reaction.effects if isinstance(effect, Report)}


def _asked(code: CoreCode, answer: Metadata) -> list[int]:
    """Return the numbers of the questions that this answer's owner has not answered."""
    legs = (leg for mover in code.movers if mover.key == answer.key for leg in mover.legs)
    return [
        number for leg in legs if leg.peer.incarnation == answer.sender.incarnation for number, _ in leg.asked
    ]


def _parked(code: CoreCode, question: Query) -> int:
    """Return the number of the question that is kept for a mover; 0 if there is none."""
    parked = [dict(owner.parked) for owner in code.owners if owner.key == question.key]
    kept = parked[0].get(question.sender) if parked else None
    return kept.sequence if kept else 0


def _sorted(keys: list[TransferKey]) -> list[tuple[str, int]]:
    return sorted((key.transfer_id, key.attempt) for key in keys)
