"""The messages under way: each kind of message is a number, and is sent, renumbered and read by it.

A question is sent to an address and reaches whatever incarnation listens there; an answer goes back by the
connection on which the question came, and dies with the incarnation that opened it.
"""

from typing import NamedTuple

import msgspec
from dfirst.protocol import messages as wire
from dfirst.protocol.effects import Reply, Send
from dfirst.protocol.messages import Message

from .numbers import Marked, Threads, what_for
from .sites import Sites

ANYONE = -1
ROUTER = "router"
ROUTER_SITE = -1
ANSWERS = (wire.Metadata, wire.Wait, wire.Gone, wire.Renewed, wire.Staged, wire.Ack)
GRANTS = (wire.Metadata, wire.Done)
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
        self.threads = Threads()
        self.letters: list[Letter] = []
        self.marked: list[Marked | None] = []
        """What each letter's numbers are, if it carries any."""
        self._numbers: dict[tuple[int, int, int, int, str, bytes], int] = {}
        self._renamed: dict[tuple[int, int, int], int] = {}

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
            self.marked.append(self._mark(letter))
        return number

    def renamed(self, number: int, sequence: int, grant: int) -> int:
        """Return a letter whose numbers are called otherwise."""
        known = (number, sequence, grant)
        found = self._renamed.get(known)
        if found is None:
            letter = self.letters[number]
            message = msgspec.structs.replace(letter.message, sequence=sequence)
            if isinstance(message, GRANTS):
                message = msgspec.structs.replace(message, grant=grant)
            found = self._renamed[known] = self.write(letter._replace(message=message))
        return found

    def _mark(self, letter: Letter) -> Marked | None:
        message = letter.message
        found = what_for(message, self.sites.configuration.mode)
        if found is None:
            return None
        what, counts = found
        if isinstance(message, ANSWERS):
            site, incarnation, owner = letter.target, letter.target_incarnation, message.sender.incarnation
        else:
            site, incarnation = letter.source, letter.source_incarnation
            owner = message.target_incarnation  # type: ignore[union-attr]
        mover = self.sites.sender(site, incarnation).incarnation
        thread, grants = self.threads.of(mover, owner, what), self.threads.of(mover, owner, what, grants=True)
        grant = message.grant if isinstance(message, GRANTS) else 0
        return Marked(thread, message.sequence, counts, site, incarnation, grants, grant)  # type: ignore[union-attr]

    def route(self, letter: Letter) -> bytes:
        """Return the route by which a letter can be answered."""
        if letter.source == ROUTER_SITE:
            return ROUTER.encode()
        return f"{self.sites.names[letter.source]}.{letter.source_incarnation}".encode()

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
        numbers = [getattr(message, name, 0) for name in ("sequence", "grant")]
        return " ".join(words + [f"#{number}" for number in numbers if number > 0])
