"""Steps that have to come before anything new does: a leg's on a message for it, a lease's on its renewal."""

from typing import NamedTuple

from dfirst.protocol.specification import TransitionSpec
from dfirst.protocol.trace_lines import MessageLine, StepLine

from .causes import incarnation, means
from .picture import Entity, Key, Picture
from .table import table
from .violation import BrokenRule

ANYONE = ""
RENEWAL = "renew_lease"
ASKS = {"outstanding", "part_outstanding"}
"""Guards by which only the answer to one's own question is taken. A RENEWED has none: it is looked at for all
legs of the peer at once.
"""


class Due(NamedTuple):
    """A step of one machine; ``peer`` may be anyone."""

    machine: str
    event: str
    key: Key
    peer: str
    why: str


class Dues:
    """All that are open in one file."""

    def __init__(self, picture: Picture) -> None:
        self._picture = picture
        self._open: list[Due] = []

    def came(self, line: MessageLine) -> None:
        """Note which leg must hear a message."""
        if incarnation(line.receiver) != incarnation(self._picture.name):
            return
        key = Key(line.transfer, line.attempt)
        for machine, event in table().hears(line.message):
            if not means(line, event):
                continue
            state = self._picture.states.get(Entity(machine, key, line.sender))
            rows = [
                row
                for row in table().machines[machine].transitions
                if (row.source, row.event) == (state, event)
            ]
            asks = line.message == "RENEWED" or any(ASKS & set(row.guards) for row in rows)
            if rows and not (asks and not self._outstanding(key, line)):
                why = f"{line.message} came in state {state}"
                self._open.append(Due(machine, event, key, line.sender, why))

    def stepped(self, line: StepLine, row: TransitionSpec) -> None:
        """Take a step off the list, and note the one that it makes due."""
        key = Key(line.transfer, line.attempt)
        step = (line.machine, line.event, key)
        found = next((due for due in self._open if due[:3] == step and due.peer in (ANYONE, line.peer)), None)
        if found is not None:
            self._open.remove(found)
        if RENEWAL in row.effects:
            self._open.append(Due("owner_leg", "renew", key, ANYONE, f"{row.id} renews a lease"))

    def settle(self) -> None:
        """Nothing may be left: something new begins."""
        if self._open:
            due = self._open[0]
            raise BrokenRule(
                table().spec.heard.rule,
                f"before this line {due.why}, and {due.machine} took no row on {due.event}",
                due.key.transfer,
            )

    def _outstanding(self, key: Key, line: MessageLine) -> bool:
        leg = self._picture.legs_of(key).get(line.sender)
        if leg is not None and line.message in ("ACK", "STAGED"):
            return leg.awaits(line)
        if leg is None:
            return False
        # Of many questions only the newest are kept.
        asked = leg.renewals if line.message == "RENEWED" else leg.asked
        return line.sequence in list(asked)[-1:]
