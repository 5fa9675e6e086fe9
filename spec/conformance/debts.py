"""What steps have asked for and what has not been seen yet: messages to send, copies to start."""

from dataclasses import dataclass

from dfirst.protocol.specification import TransitionSpec
from dfirst.protocol.trace_lines import CopyLine, MessageLine, StepLine

from .causes import incarnation
from .picture import Key, PeerKey, Picture
from .table import table
from .violation import BrokenRule

COPY = "copy"
ANYONE = ""


@dataclass(frozen=True)
class Debt:
    """A message, or the start of copies, that a row asks for."""

    row: str
    line: int
    time: float
    rule: str
    messages: tuple[str, ...]
    key: Key
    peer: str
    sequence: int = 0
    """The number that it must carry; 0 for any."""

    def paid_by(self, line: MessageLine) -> bool:
        """Return whether a message is the one that is owed."""
        return (
            line.message in self.messages
            and (line.transfer, line.attempt) == self.key
            and self.sequence in (0, line.sequence)
            and (self.peer == ANYONE or incarnation(self.peer) == incarnation(line.receiver))
        )


class Debts:
    """All that are open in one file."""

    def __init__(self, picture: Picture) -> None:
        self._picture = picture
        self._open: list[Debt] = []

    def take_on(self, number: int, line: StepLine, row: TransitionSpec, cause: MessageLine | None) -> None:
        """Note what a step asks for."""
        key = Key(line.transfer, line.attempt)
        owed = [(effect, table().says[effect]) for effect in row.effects if effect in table().says]
        if line.machine.endswith("_leg") and row.event in table().leg_says:
            owed.append((row.event, table().leg_says[row.event]))
        for effect, entry in owed:
            messages = entry.messages
            if effect == "say_again":
                messages = (self._picture.leg(PeerKey(key, line.peer)).last_word,)
            for peer, sequence in self._whom(effect, line, key, cause):
                self._open.append(Debt(row.id, number, line.time, entry.rule, messages, key, peer, sequence))

    def pay(self, line: MessageLine) -> bool:
        """Take a message that was sent off the list; return whether it was on it."""
        debt = next((debt for debt in self._open if debt.paid_by(line)), None)
        if debt is not None:
            self._open.remove(debt)
        return debt is not None

    def pay_copy(self, line: CopyLine) -> bool:
        """Take the start of a leg's copies off the list; return whether it was on it."""
        leg = (Key(line.transfer, line.attempt), line.peer)
        debt = next(
            (debt for debt in self._open if COPY in debt.messages and (debt.key, debt.peer) == leg), None
        )
        if debt is not None:
            self._open.remove(debt)
        return debt is not None

    def settle(self) -> None:
        """Nothing may be left: something new begins. Raises ``BrokenRule`` for the oldest debt."""
        if self._open:
            debt = self._open[0]
            owed = " or ".join(debt.messages)
            what = "no copy was started" if owed == COPY else f"no {owed} was sent"
            whom = f" to {debt.peer}" if debt.peer else ""
            raise BrokenRule(
                debt.rule, f"after {debt.row} {what}{whom}", debt.key.transfer, debt.line, debt.time
            )

    def _whom(
        self, effect: str, line: StepLine, key: Key, cause: MessageLine | None
    ) -> list[tuple[str, int]]:
        if effect == "refuse_parked":
            return [(ANYONE, 0)] * len(self._picture.parked.get(key, ()))
        if effect == "stage_again":
            return [(line.peer, part) for part in sorted(self._picture.leg(PeerKey(key, line.peer)).parts)]
        if effect == "cancel_writers":
            return [(peer, 0) for peer in self._picture.lent_to(key)]
        if effect in ("answer_wait", "answer_gone") and cause is not None:
            return [(cause.sender, cause.sequence)]
        return [(line.peer, 0)]
