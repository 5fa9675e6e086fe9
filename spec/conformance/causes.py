"""What may happen at this point of a trace: the messages and ends of copies that came last, and the
events that steps have set going since.
"""

from collections import Counter

from dfirst.protocol.specification import TransitionSpec
from dfirst.protocol.trace_lines import CopyLine, MessageLine, StepLine

from .picture import Key, Picture
from .table import CauseEntry, table
from .violation import BrokenRule

MANY = 1 << 20
FOR_EVERY_LEG = ("open_legs", "renounce_peers", "cancel_legs")
BATCHED = ("RENEW", "RENEWED")
SAID_OF_EACH = {"renewed": "extended", "gone": "gone"}
"""What RENEWED says of a transfer, by the event of its leg."""


def incarnation(name: str) -> str:
    """Return the last part of engine/rank/incarnation."""
    return name.rpartition("/")[2]


class Causes:
    """Messages and ends of copies hold until the next one comes; each moves a machine once."""

    def __init__(self, picture: Picture) -> None:
        self._picture = picture
        self.messages: list[MessageLine] = []
        self._copies: list[CopyLine] = []
        self._told: Counter[tuple[str, str, Key]] = Counter()
        self._used: set[tuple[int, str, str]] = set()

    def came(self, line: MessageLine) -> None:
        """A message came in. The lines of one RENEW or RENEWED stand together."""
        if not self.goes_on(line):
            self.clear()
        self.messages.append(line)

    def goes_on(self, line: MessageLine) -> bool:
        """Return whether a line is of the same message as the line before."""
        return bool(self.messages) and line.message in BATCHED and _together(self.messages[-1], line)

    def copy_ended(self, line: CopyLine) -> None:
        """A leg's copies ended."""
        self.clear()
        self._copies.append(line)

    def clear(self) -> None:
        """What came before causes nothing any more."""
        self.messages.clear()
        self._copies.clear()
        self._told.clear()
        self._used.clear()

    def told(self, line: StepLine, row: TransitionSpec) -> None:
        """Note the events that a step sets going."""
        key = Key(line.transfer, line.attempt)
        for effect in row.effects:
            times = self._times(effect, key)
            for entry in table().tells.get(effect, ()):
                for machine in entry.machines:
                    for event in entry.events:
                        self._told[machine, event, key] += times

    def take(self, line: StepLine, entry: CauseEntry) -> MessageLine | None:
        """Find what caused a step; return the message if it was one. Raises ``BrokenRule`` if nothing did."""
        key = Key(line.transfer, line.attempt)
        if entry.leaves_no_line:
            return None
        for number, message in enumerate(self.messages):
            if (number, line.machine, line.peer) not in self._used and _fits(message, line, entry):
                self._check_receiver(message, line)
                self._used.add((number, line.machine, line.peer))
                return message
        for copy in self._copies:
            if entry.copies and (Key(copy.transfer, copy.attempt), copy.peer) == (key, line.peer):
                self._check_copy(copy, line)
                return None
        if self._told[line.machine, line.event, key] > 0:
            self._told[line.machine, line.event, key] -= 1
            return None
        if entry.reports and key in self._picture.reported:
            return None
        raise BrokenRule(entry.rule, f"{line.row} on {line.event}, but {_missing(entry)}", line.transfer)

    def _times(self, effect: str, key: Key) -> int:
        if effect == "answer_parked":
            return len(self._picture.parked.get(key, ()))
        return MANY if effect in FOR_EVERY_LEG else 1

    def _check_receiver(self, message: MessageLine, line: StepLine) -> None:
        if incarnation(message.receiver) != incarnation(self._picture.name):
            raise BrokenRule(
                "S5",
                f"{line.row} on {message.message}, which was meant for {message.receiver}",
                line.transfer,
            )

    def _check_copy(self, copy: CopyLine, line: StepLine) -> None:
        self._copies.clear()
        if copy.ok != (line.event == "copied"):
            how = "well" if copy.ok else "badly"
            raise BrokenRule("R4", f"{line.row} on {line.event}, but the copies ended {how}", line.transfer)


def means(message: MessageLine, event: str) -> bool:
    """Return whether a message that may stand for several events stands for this one."""
    return message.message != "RENEWED" or message.answer == SAID_OF_EACH.get(event)


def _together(before: MessageLine, line: MessageLine) -> bool:
    mine = (line.message, line.sender, line.receiver, line.sequence)
    return (before.message, before.sender, before.receiver, before.sequence) == mine


def _fits(message: MessageLine, line: StepLine, entry: CauseEntry) -> bool:
    if message.message not in entry.messages:
        return False
    if (message.transfer, message.attempt) != (line.transfer, line.attempt):
        return False
    if line.peer and message.sender != line.peer:
        return False
    return means(message, line.event)


def _missing(entry: CauseEntry) -> str:
    if entry.messages:
        return f"no {' or '.join(entry.messages)} for it came just before"
    if entry.copies:
        return "no copy of it has just ended"
    if entry.reports:
        return "vLLM has not taken its report"
    return "nothing has just set it going"
