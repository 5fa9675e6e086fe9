"""The numbers of questions, grants and last words in a world, made small again after each step.

A core compares two numbers only where both are of the same mover, the same owner and the same transfer: a
thread. What counts there is which is higher, so the numbers of each thread that anybody still has (a core,
or a letter under way) are called 1, 2, 3 in their order; one that nobody looks at any more is called -1. Two
situations that differ in nothing but how often somebody has asked are then the same state.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from dfirst.protocol import messages as wire
from dfirst.protocol.messages import Message
from msgspec.structs import replace

from .codec import (
    DRAWN_FROM,
    LEASE_GRANT,
    LEASE_NUMBER,
    LEASE_PARTS,
    LEASES,
    LEG_ASKED,
    LEG_GRANT,
    LEG_NUMBER,
    LEG_PARTS,
    LEG_WORD,
    MOVERS,
    OWNERS,
    PARKED,
    RENEWALS,
    Code,
)

NOBODYS = -1
Thread = tuple[Any, ...]
"""The incarnations of mover and owner, the transfer (for renewals the mode), and whether it is of grants."""
Renaming = tuple[tuple[int, int], ...]
Numbers = Iterator[tuple[int, int]]
"""Each with its thread."""
ALWAYS, ASKED, WORD = range(3)
"""How long the numbers of a letter count: for good, or while its mover takes an answer, or an ACK, to it."""


class Marked(NamedTuple):
    """What the numbers of a letter are. A thread of -1 stands for no number."""

    thread: int
    number: int
    counts: int
    site: int
    incarnation: int
    """The mover, whose number it is."""
    grants: int
    """The thread of the grant."""
    grant: int


class CoreNumbers(NamedTuple):
    """The numbers that a core has, by their threads, as bits."""

    held: tuple[tuple[int, int], ...]
    asked: dict[int, int]
    """Those of questions whose answers it takes."""
    words: dict[int, int]
    """And of last words whose acknowledgement it takes."""


class Threads:
    """All threads of a world, each once."""

    def __init__(self) -> None:
        self._ids: dict[Thread, int] = {}

    def of(self, mover: str, owner: str, what: object, grants: bool = False) -> int:
        """Return the number of a thread."""
        return self._ids.setdefault((mover, owner, what, grants), len(self._ids))

    def in_core(self, code: Code, own: str) -> CoreNumbers:
        """Return the numbers that a core has."""
        asked, words = _masks(self._asked(code, own)), _masks(self._words(code, own))
        held = _masks((*self._asked(code, own), *self._words(code, own), *self._others(code, own)))
        return CoreNumbers(tuple(held.items()), asked, words)

    def _asked(self, code: Code, own: str) -> Numbers:
        for key, leg in _legs(code):
            for number, _ in leg[LEG_ASKED]:
                yield self.of(own, leg[0].incarnation, key), number
        for peer, mode, _, _, outstanding, _ in code[RENEWALS]:
            for number, _, _ in outstanding:
                yield self.of(own, peer.incarnation, mode), number

    def _words(self, code: Code, own: str) -> Numbers:
        for key, leg in _legs(code):
            if isinstance(leg[LEG_WORD], wire.Done | wire.Stopped):
                yield self.of(own, leg[0].incarnation, key), leg[LEG_WORD].sequence

    def _others(self, code: Code, own: str) -> Numbers:
        for key, leg in _legs(code):
            yield self.of(own, leg[0].incarnation, key), leg[LEG_NUMBER]
            for _, part in leg[LEG_PARTS]:
                yield self.of(own, leg[0].incarnation, key), part.sequence
            word = leg[LEG_WORD]
            grant = word.grant if isinstance(word, wire.Done) else leg[LEG_GRANT]
            yield self.of(own, leg[0].incarnation, key, grants=True), grant
        for owner in code[OWNERS]:
            for lease in owner[LEASES]:
                yield self.of(lease[0].incarnation, own, owner[1]), lease[LEASE_NUMBER]
                for _, (number, _) in lease[LEASE_PARTS]:
                    yield self.of(lease[0].incarnation, own, owner[1]), number
                yield self.of(lease[0].incarnation, own, owner[1], grants=True), lease[LEASE_GRANT]
            for sender, query in owner[PARKED]:
                yield self.of(sender.incarnation, own, owner[1]), query.sequence

    # Other names

    def renamed(self, code: Code, own: str, thread: int, renaming: Renaming) -> Code:
        """Return a core in which the numbers of one thread are called otherwise."""
        names = dict(renaming)

        def called(number: int, mover: str, owner: str, what: object, grants: bool = False) -> int:
            return names.get(number, number) if self.of(mover, owner, what, grants) == thread else number

        def leg(code: Code, key: object) -> Code:
            peer = code[0].incarnation
            made = list(code)
            made[LEG_ASKED] = tuple((called(number, own, peer, key), at) for number, at in code[LEG_ASKED])
            word = code[LEG_WORD]
            if isinstance(word, wire.Done | wire.Stopped):
                word = replace(word, sequence=called(word.sequence, own, peer, key))
            if isinstance(word, wire.Done):
                word = replace(word, grant=called(word.grant, own, peer, key, grants=True))
            made[LEG_WORD] = word
            made[LEG_PARTS] = tuple(
                (place, part._replace(sequence=called(part.sequence, own, peer, key)))
                for place, part in code[LEG_PARTS]
            )
            made[LEG_NUMBER] = called(code[LEG_NUMBER], own, peer, key)
            made[LEG_GRANT] = called(code[LEG_GRANT], own, peer, key, grants=True)
            return tuple(made)

        def lease(code: Code, key: object) -> Code:
            peer = code[0].incarnation
            made = list(code)
            made[LEASE_PARTS] = tuple(
                (place, (called(number, peer, own, key), how)) for place, (number, how) in code[LEASE_PARTS]
            )
            made[LEASE_NUMBER] = called(code[LEASE_NUMBER], peer, own, key)
            made[LEASE_GRANT] = called(code[LEASE_GRANT], peer, own, key, grants=True)
            return tuple(made)

        def parked(sender: Any, query: wire.Query, key: object) -> tuple[Any, wire.Query]:
            return sender, replace(query, sequence=called(query.sequence, sender.incarnation, own, key))

        def owner(code: Code) -> Code:
            made = list(code)
            made[PARKED] = tuple(parked(sender, query, code[1]) for sender, query in code[PARKED])
            made[LEASES] = tuple(lease(each, code[1]) for each in code[LEASES])
            return tuple(made)

        def renewal(code: Code) -> Code:
            peer, mode, outstanding = code[0].incarnation, code[1], code[4]
            named = tuple((called(number, own, peer, mode), at, keys) for number, at, keys in outstanding)
            return (*code[:4], named, *code[5:])

        made = list(code)
        made[MOVERS] = tuple(
            (*each[:-1], tuple(leg(one, each[1]) for one in each[-1])) for each in code[MOVERS]
        )
        made[OWNERS] = tuple(owner(each) for each in code[OWNERS])
        made[RENEWALS] = tuple(renewal(each) for each in code[RENEWALS])
        return tuple(made)


def what_for(message: Message, mode: str) -> tuple[object, int] | None:
    """Return what a message's number is about, and how long it counts; None if it carries none."""
    if getattr(message, "sequence", 0) <= 0 and getattr(message, "grant", 0) <= 0:
        return None
    if isinstance(message, wire.Renew | wire.Renewed):
        return mode, ASKED
    if isinstance(message, wire.Query | wire.Stage | wire.Staged | wire.Stopped):
        return message.key, ALWAYS
    if isinstance(message, wire.Metadata | wire.Wait | wire.Gone):
        return message.key, ASKED
    return (message.key, WORD) if isinstance(message, wire.Done | wire.Ack) else None


def renaming_of(mask: int) -> Renaming:
    """Return the numbers of a thread with their new names: 1, 2, 3 in their order."""
    numbers = [number for number in range(mask.bit_length()) if mask >> number & 1]
    if len(numbers) > DRAWN_FROM:
        raise RuntimeError(f"{len(numbers)} numbers of one thread are in use, more than {DRAWN_FROM}")
    return tuple((old, new) for new, old in enumerate(numbers, start=1) if old != new)


def in_order(mask: int) -> bool:
    """Return whether the numbers are 1, 2, 3 already."""
    return not mask & (mask + 2)


def _legs(code: Code) -> Iterator[tuple[object, Code]]:
    for mover in code[MOVERS]:
        for leg in mover[-1]:
            yield mover[1], leg


def _masks(numbers: Iterable[tuple[int, int]]) -> dict[int, int]:
    found: dict[int, int] = {}
    for thread, number in numbers:
        if number > 0:
            found[thread] = found.get(thread, 0) | 1 << number
    return found
