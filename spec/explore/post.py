"""The messages under way: each kind of message is a number, and is sent, renumbered and read by it.

A question is sent to an address and reaches whatever incarnation listens there; an answer goes back by the
connection on which the question came, and dies with the incarnation that opened it.
"""

from typing import NamedTuple

import msgspec
from dfirst.protocol import messages as wire
from dfirst.protocol.effects import Reply, Send
from dfirst.protocol.messages import Message

from .codec import Numbering
from .sites import Sites

ANYONE = -1
ROUTER = "router"
ROUTER_SITE = -1
QUESTIONS = (wire.Query, wire.Renew)
ANSWERS = (wire.Metadata, wire.Wait, wire.Gone, wire.Renewed)
REASONED = (wire.Gone, wire.Stopped, wire.Cancel)


class Letter(NamedTuple):
    """A message with its way."""

    source: int
    source_incarnation: int
    target: int
    target_incarnation: int
    """``ANYONE`` if it goes to an address."""
    message: Message


class Post:
    """All letters that were ever written in a world, each once."""

    def __init__(self, sites: Sites) -> None:
        self.sites = sites
        self.letters: list[Letter] = []
        self.askers: list[tuple[int, int] | None] = []
        """Whose numbers a letter carries: site and incarnation."""
        self._numbers: dict[tuple[int, int, int, int, str, bytes], int] = {}
        self._renumbered: dict[tuple[int, tuple[tuple[int, int], ...]], int] = {}
        self._sites = {name.encode(): site for site, name in enumerate(sites.names)}

    def send(self, source: int, incarnation: int, effect: Send | Reply) -> int | None:
        """Return the letter of a core's effect; None if it goes to a router."""
        message = effect.message
        if isinstance(message, REASONED):
            message = msgspec.structs.replace(message, reason="")
        if isinstance(effect, Send):
            target, target_incarnation = self.sites.site(effect.host, effect.port), ANYONE
        else:
            name, _, number = effect.route.decode().partition(".")
            if name == ROUTER:
                return None
            target, target_incarnation = self.sites.site_named[name], int(number)
        return self.write(Letter(source, incarnation, target, target_incarnation, message))

    def write(self, letter: Letter) -> int:
        """Return the number of a letter."""
        name, text = type(letter.message).__name__, msgspec.msgpack.encode(letter.message)
        known = (*letter[:4], name, text)
        number = self._numbers.get(known)
        if number is None:
            number = self._numbers[known] = len(self.letters)
            self.letters.append(letter)
            self.askers.append(_asker(letter))
        return number

    def renumber(self, number: int, numbering: Numbering) -> int:
        """Return the letter with its question's number as it is called now; 0 if nobody waits for it."""
        known = (number, tuple(sorted(numbering.items())))
        found = self._renumbered.get(known)
        if found is None:
            letter = self.letters[number]
            sequence = numbering.get(letter.message.sequence, 0)  # type: ignore[union-attr]
            message = msgspec.structs.replace(letter.message, sequence=sequence)
            found = self._renumbered[known] = self.write(letter._replace(message=message))
        return found

    def route(self, letter: Letter) -> bytes:
        """Return the route by which a letter can be answered."""
        if letter.source == ROUTER_SITE:
            return ROUTER.encode()
        return f"{self.sites.names[letter.source]}.{letter.source_incarnation}".encode()

    def text(self, number: int) -> str:
        """Return a letter in words."""
        letter = self.letters[number]
        return f"{self.name(letter.source)} -> {self.name(letter.target)} {self.title(letter.message)}"

    def name(self, site: int) -> str:
        """Return the name of a site, or of the router."""
        return ROUTER if site == ROUTER_SITE else self.sites.names[site]

    @staticmethod
    def title(message: Message) -> str:
        """Return what a message says, in a few words."""
        title = str(message.__struct_config__.tag)
        key = getattr(message, "key", None)
        keys = getattr(message, "keys", None) or ([] if key is None else [key])
        words = [title, *(f"{each.transfer_id}.{each.attempt}" for each in keys)]
        if isinstance(message, wire.Renewed):
            words += [f"extended {len(message.extended)}, gone {len(message.gone)}"]
        sequence = getattr(message, "sequence", None)
        return " ".join(words) + ("" if sequence is None else f" #{sequence}")


def _asker(letter: Letter) -> tuple[int, int] | None:
    if isinstance(letter.message, QUESTIONS):
        return letter.source, letter.source_incarnation
    if isinstance(letter.message, ANSWERS):
        return letter.target, letter.target_incarnation
    return None
