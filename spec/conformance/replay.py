"""Walks through one file, line by line, and stops at the first that breaks a rule."""

from dfirst.protocol.specification import SAME_STATE, TransitionSpec
from dfirst.protocol.trace_lines import (
    CopyLine,
    EndLine,
    ExpectLine,
    Line,
    MessageLine,
    ReportLine,
    StepLine,
)

from .causes import Causes, incarnation
from .debts import Debts
from .dues import Dues
from .files import TraceText
from .guards import check_guards
from .picture import QUIET, Entity, Key, Lease, Leg, PeerKey, Picture
from .table import table
from .violation import BrokenRule, Violation

LEASES_OVER = ("NEW", "DONE", "STOPPED", "EXPIRED")
FINAL = {"mover_leg": QUIET, "owner_leg": LEASES_OVER}
"""States in which a leg is at its end; all other machines end in FREED."""
FREED = "FREED"


class Replay:
    """One file of a trace."""

    def __init__(self, text: TraceText, must_end: bool = True) -> None:
        if text.start is None:
            raise ValueError(f"{text.path} has no start")
        self._text = text
        self._must_end = must_end
        self.picture = Picture(text.start)
        self._causes = Causes(self.picture)
        self._debts = Debts(self.picture)
        self._dues = Dues(self.picture)
        self._time = 0.0

    def run(self) -> Violation | None:
        """Return the first violation in the file."""
        for number, line in self._text.lines:
            try:
                self._take(number, line)
                self._check_time(line)
            except BrokenRule as broken:
                return self._violation(broken, number, line)
        return self._text.broken or self._last()

    def unfinished(self) -> list[tuple[Entity, str]]:
        """Return the machines that are not at their end, with their states."""
        return [
            (entity, state)
            for entity, state in self.picture.states.items()
            if state not in FINAL.get(entity.machine, (FREED,))
        ]

    def _last(self) -> Violation | None:
        """After the last line: everything must be at its end, and nothing owed."""
        number, line = self._text.lines[-1]
        try:
            if self._must_end:
                self._settle()
                self._check_ended()
        except BrokenRule as broken:
            return self._violation(broken, number, line)
        return None

    def _violation(self, broken: BrokenRule, number: int, line: Line) -> Violation:
        return Violation(
            file=str(self._text.path),
            line=broken.line or number,
            time=broken.time or line.time,
            rule=broken.rule,
            transfer=broken.transfer,
            text=broken.text,
        )

    def _check_time(self, line: Line) -> None:
        if line.time < self._time:
            whose = str(getattr(line, "transfer", ""))
            raise BrokenRule("T2", f"time goes back by {self._time - line.time:.6f} s", whose)
        self._time = line.time

    def _take(self, number: int, line: Line) -> None:
        if isinstance(line, StepLine):
            self._step(number, line)
        elif isinstance(line, MessageLine):
            self._message(line)
        elif isinstance(line, CopyLine):
            self._copy(line)
        elif isinstance(line, ReportLine):
            self._report(line)
        elif isinstance(line, ExpectLine):
            self.picture.expects(line)
        elif isinstance(line, EndLine):
            self._settle()

    def _settle(self) -> None:
        self._dues.settle()
        self._debts.settle()

    # Steps

    def _step(self, number: int, line: StepLine) -> None:
        row = table().rows.get((line.machine, line.row))
        if row is None:
            raise BrokenRule(
                "F2", f"the spec has no row {line.row} of a machine {line.machine}", line.transfer
            )
        self._check_row(line, row)
        self._check_state(line, row)
        entry = table().causes.get((line.machine, line.event))
        cause = None if entry is None else self._causes.take(line, entry)
        check_guards(self.picture, line, row, cause)
        self._check_renewal(line, cause)
        self._check_lease_end(line, row)
        self._check_staged(line, row)
        self._check_hand_back(line, row)
        # What a step asks for depends on the questions that were parked before it.
        self._causes.told(line, row)
        self._debts.take_on(number, line, row, cause)
        self._dues.stepped(line, row)
        self.picture.step(line, row, cause)
        if line.machine.endswith("_request") and line.target == FREED:
            del self.picture.states[_entity(line)]

    def _check_row(self, line: StepLine, row: TransitionSpec) -> None:
        target = row.source if row.target == SAME_STATE else row.target
        if (line.event, line.source, line.target) != (row.event, row.source, target):
            raise BrokenRule(
                "F2",
                f"{row.id} goes from {row.source} on {row.event} to {target}, and not from {line.source} on "
                f"{line.event} to {line.target}",
                line.transfer,
            )

    def _check_state(self, line: StepLine, row: TransitionSpec) -> None:
        state = self.picture.state(_entity(line), table().machines[line.machine].initial)
        if state == line.source:
            return
        releases = line.event == "collected" or any(name.startswith("report_") for name in row.effects)
        again = releases and (_key(line) in self.picture.reported or _key(line) in self.picture.reporting)
        if again:
            raise BrokenRule("S3", f"{row.id} releases a second time, in state {state}", line.transfer)
        raise BrokenRule(
            "F2", f"{row.id} starts in {line.source}, and {line.machine} is in {state}", line.transfer
        )

    def _check_renewal(self, line: StepLine, cause: MessageLine | None) -> None:
        if cause is None or cause.message != "RENEWED":
            return
        if not self.picture.leg(PeerKey(_key(line), line.peer)).awaits(cause):
            raise BrokenRule(
                "R8", f"{line.row} on the answer to number {cause.sequence}, not asked by then", line.transfer
            )

    def _check_lease_end(self, line: StepLine, row: TransitionSpec) -> None:
        if line.machine != "owner_leg" or row.event != "lease_end":
            return
        timers, lease = self.picture.timers, self.picture.lease(PeerKey(_key(line), line.peer))
        pushed = self.picture.pushes(_key(line))
        tail = timers["copy_timeout_seconds"] + timers["stall_allowance_seconds"] if pushed else 0.0
        lent = timers["lease_seconds"] + tail
        passed = line.time - lease.extended_at
        if passed < lent - self.picture.tolerance_seconds:
            raise BrokenRule(
                "R3" if pushed else "R1",
                f"{row.id} after {passed:g} s, where the blocks are lent for {lent:g} s",
                line.transfer,
            )

    def _check_staged(self, line: StepLine, row: TransitionSpec) -> None:
        if "note_staged" in row.effects and not self.picture.lease(PeerKey(_key(line), line.peer)).at_work:
            raise BrokenRule("F2", f"{row.id} on {line.event}, but no part is at work", line.transfer)

    def _check_hand_back(self, line: StepLine, row: TransitionSpec) -> None:
        """Whatever its guards: a row that reports hands the blocks back."""
        if any(effect.startswith("report_") for effect in row.effects):
            self._check_nothing_moves(_key(line), f"{row.id} hands the blocks back")

    def _check_nothing_moves(self, key: Key, what: str) -> None:
        lent = self.picture.lent_to(key)
        if lent:
            rule = "R5" if self.picture.pushes(key) else "S4"
            raise BrokenRule(rule, f"{what} while they are lent to {', '.join(lent)}", key.transfer)
        legs = self.picture.legs_of(key).values()
        loud = [leg.state for leg in legs if leg.state not in (*QUIET, "NEW")]
        if loud or any(leg.in_flight for leg in legs):
            raise BrokenRule("R5", f"{what} while a leg is {', '.join(loud) or 'copying'}", key.transfer)

    # Messages

    def _message(self, line: MessageLine) -> None:
        if line.way == "received":
            if not self._causes.goes_on(line):
                self._settle()
            self._causes.came(line)
            self._dues.came(line)
        elif line.way == "sent":
            self._sent(line)
        else:
            raise BrokenRule("T1", f"a message is sent or received, not {line.way!r}", line.transfer)

    def _sent(self, line: MessageLine) -> None:
        leg_key = PeerKey(_key(line), line.receiver)
        if line.message == "QUERY":
            self._ask(line, self.picture.leg(leg_key).asked)
        elif line.message == "RENEW":
            self._check_copying(line, leg_key)
            self._ask(line, self.picture.leg(leg_key).renewals)
        elif line.message == "METADATA":
            self._grant(line, self.picture.lease(leg_key))
        elif line.message == "STAGE":
            self._stage(line, self.picture.leg(leg_key))
        elif line.message in ("DONE", "STOPPED"):
            self._last_word(line, self.picture.leg(leg_key))
        if self._debts.pay(line):
            return
        if line.message in table().needs_a_row:
            raise BrokenRule("F2", f"{line.message} was sent, and no row says so", line.transfer)
        entry = table().answers.get(line.message)
        if entry is not None:
            self._check_answer(line, entry.to, entry.rule)

    def _ask(self, line: MessageLine, asked: dict[int, float]) -> None:
        known = self.picture.sequences
        # The lines of one RENEW have one number.
        batched = line.message == "RENEW" and line.sequence == self.picture.last_sequence
        if line.sequence in known and not batched:
            raise BrokenRule(
                "R8", f"{line.message} has number {line.sequence}, which was asked before", line.transfer
            )
        known.add(line.sequence)
        self.picture.last_sequence = line.sequence
        asked[line.sequence] = line.time

    @staticmethod
    def _stage(line: MessageLine, leg: Leg) -> None:
        if line.sequence not in leg.parts and line.sequence <= leg.newest_part:
            raise BrokenRule(
                "R8", f"STAGE has number {line.sequence}, and {leg.newest_part} was asked for", line.transfer
            )
        leg.parts.add(line.sequence)
        leg.newest_part = max(leg.newest_part, line.sequence)

    @staticmethod
    def _grant(line: MessageLine, lease: Lease) -> None:
        if lease.grant not in (0, line.grant):
            raise BrokenRule(
                "R8", f"METADATA names grant {line.grant}, and {lease.grant} is lent", line.transfer
            )
        lease.grant = line.grant
        lease.number = max(lease.number, line.sequence)

    @staticmethod
    def _last_word(line: MessageLine, leg: Leg) -> None:
        if line.message == "DONE" and line.grant != leg.grant:
            raise BrokenRule("R8", f"DONE names grant {line.grant}, and {leg.grant} was lent", line.transfer)
        newest = max(leg.asked, default=line.sequence)
        if line.sequence != newest:
            raise BrokenRule(
                "R8",
                f"{line.message} has number {line.sequence}, and the newest question was {newest}",
                line.transfer,
            )
        leg.word_number = line.sequence

    def _check_copying(self, line: MessageLine, leg: PeerKey) -> None:
        if not self.picture.leg(leg).lent:
            raise BrokenRule("R10", f"a renewal of what {line.receiver} has not lent", line.transfer)

    def _check_answer(self, line: MessageLine, to: tuple[str, ...], rule: str) -> None:
        asked = [word for word in self._causes.messages if word.message in to and _answers(line, word)]
        if not asked:
            raise BrokenRule(
                rule,
                f"{line.message} was sent, and no {' or '.join(to)} for it came just before",
                line.transfer,
            )
        mine = incarnation(asked[0].receiver) == incarnation(self.picture.name)
        if line.message == "ACK" and asked[0].message != "CANCEL" and mine:
            raise BrokenRule(
                "R9", f"{asked[0].message} is acknowledged without being recorded", line.transfer
            )
        if line.answer == "extended":
            raise BrokenRule("R1", "RENEWED extends what no row has extended", line.transfer)

    # Copies and reports

    def _copy(self, line: CopyLine) -> None:
        leg = self.picture.leg(PeerKey(_key(line), line.peer))
        if line.phase == "started":
            self._check_start(line)
            leg.in_flight = True
        elif line.phase == "ended":
            self._settle()
            if not leg.in_flight:
                raise BrokenRule("R4", "copies ended that were not under way", line.transfer)
            leg.in_flight = False
            self._causes.copy_ended(line)
        else:
            raise BrokenRule("T1", f"a copy is started or ended, not {line.phase!r}", line.transfer)

    def _check_start(self, line: CopyLine) -> None:
        leg = self.picture.leg(PeerKey(_key(line), line.peer))
        if not self._debts.pay_copy(line):
            said = f", after {leg.last_word}" if leg.last_word else ""
            raise BrokenRule(
                "R10", f"a copy with {line.peer} was started without its METADATA{said}", line.transfer
            )
        if line.time >= leg.lease_until + self.picture.tolerance_seconds:
            raise BrokenRule("R1", f"a copy with {line.peer} was started after its lease", line.transfer)

    def _report(self, line: ReportLine) -> None:
        key = _key(line)
        decided = self.picture.reporting.pop(key, None)
        if decided is None:
            again = "is released a second time" if key in self.picture.reported else "no row has reported"
            raise BrokenRule("S3", f"vLLM took the report {line.outcome!r}: {again}", line.transfer)
        if decided != line.outcome:
            raise BrokenRule(
                "S6", f"vLLM took the report {line.outcome!r} where a row reported {decided!r}", line.transfer
            )
        self._check_nothing_moves(key, "vLLM takes the blocks back")
        self.picture.reported[key] = line.outcome

    def _check_ended(self) -> None:
        for entity, state in self.unfinished():
            whose = f" of request {entity.peer}" if entity.machine.endswith("_request") else ""
            whose = f" with {entity.peer}" if entity.machine in FINAL else whose
            raise BrokenRule(
                "L1", f"the trace ends here and {entity.machine}{whose} is still {state}", entity.key.transfer
            )


def _key(line: StepLine | MessageLine | CopyLine | ReportLine) -> Key:
    return Key(line.transfer, line.attempt)


def _entity(line: StepLine) -> Entity:
    return Entity(line.machine, _key(line), line.peer)


def _answers(line: MessageLine, word: MessageLine) -> bool:
    same = (line.transfer, line.attempt) == (word.transfer, word.attempt)
    return same and line.sequence in (0, word.sequence)
