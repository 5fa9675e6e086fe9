"""What comes out of a scenario, as lines that people read: messages that arrive, steps, copies, reports."""

from dfirst.protocol import messages as wire
from dfirst.protocol.entity import CoreEntity
from dfirst.protocol.messages import Message, TransferKey
from dfirst.protocol.mover_leg import MoverLeg
from dfirst.protocol.owner_leg import OwnerLeg
from dfirst.protocol.specification import TransitionSpec
from dfirst.spec.conformance.table import table

from tests.protocol.world import KEY

NUMBERED = (
    wire.Query | wire.Metadata | wire.Wait | wire.Gone | wire.Renew | wire.Renewed | wire.Stage | wire.Staged
)
"""Messages whose numbers are said."""


class Transcript:
    """Collects lines; an observer of every core."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def take(self) -> list[str]:
        """Return what has come out since the last time."""
        taken, self.lines = self.lines, []
        return taken

    def say(self, line: str) -> None:
        """Add a line."""
        self.lines.append(line.rstrip())

    # dfirst.protocol.binding.Observer

    def stepped(self, entity: CoreEntity, row: TransitionSpec, source: str) -> None:
        change = f"{source} -> {entity.state}" if source != entity.state else f"{source} stays"
        self.say(f"  {whose(entity):<20} {change:<34} {row.id} {row.event}")

    def unheard(self, entity: CoreEntity, event: str, expected: bool) -> None:
        cause = table().causes[entity.machine.spec.name, event]
        if cause.effects and not cause.messages:
            return  # posted inside a core, and nobody had to hear it
        why = "ignored" if expected else "ignored, and nobody expected it"
        self.say(f"  {whose(entity):<20} {entity.state} hears {event}: {why}")


def whose(entity: CoreEntity) -> str:
    """Name an object: its rank, and what it is there."""
    sender = entity.core.sender
    what = f"transfer{named(entity.key)}"
    if isinstance(entity, MoverLeg):
        what = f"leg to {entity.peer.engine_id}{entity.peer.rank}{named(entity.key)}"
    elif isinstance(entity, OwnerLeg):
        what = f"lease of {entity.mover.engine_id}{entity.mover.rank}{named(entity.key)}"
    return f"{sender.engine_id}{sender.rank} {what}"


def named(key: TransferKey) -> str:
    """Name a transfer, unless it is the usual one."""
    if key == KEY:
        return ""
    return f" {key.transfer_id}" + (f"#{key.attempt}" if key.attempt else "")


def said(message: Message) -> str:
    """Say a message."""
    return " ".join(part for part in (tag(message), *_details(message)) if part)


def tag(message: Message) -> str:
    """Return a message's name on the wire."""
    return str(type(message).__struct_config__.tag)


def _details(message: Message) -> list[str]:
    key = getattr(message, "key", None)
    details = [named(key).strip()] if key is not None else []
    if isinstance(message, NUMBERED):
        details.append(str(message.sequence))
    if isinstance(message, wire.Metadata):
        blocks = ",".join(map(str, message.block_ids))
        details.append(f"(blocks {blocks} for {message.lease_seconds:g} s)")
    elif isinstance(message, wire.Stage):
        details.append(f"(place {message.place})" if message.starts else "(which slot?)")
    elif isinstance(message, wire.Staged):
        details.append(f"(place {message.place}" + (")" if message.slot_places else ": copy directly)"))
    elif isinstance(message, wire.Renewed):
        answers = [f"extended{named(key)}" for key in message.extended]
        details.append("(" + ", ".join(answers + [f"gone{named(key)}" for key in message.gone]) + ")")
    elif isinstance(message, wire.Cancel):
        details.append(f"to the {message.target} ({message.reason})")
    elif isinstance(message, wire.Gone | wire.Stopped | wire.Error):
        details.append(f"({message.reason})")
    return details
