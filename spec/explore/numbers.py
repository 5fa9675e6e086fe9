"""The numbers of questions, grants and last words in a world, made small again after each step.

A core compares two numbers only where both are of the same mover, the same owner and the same transfer: a
thread. What counts there is which is higher, so the numbers of each thread that anybody still has (a core,
or a letter under way) are called 1, 2, 3 in their order; one that nobody looks at any more is called -1. Two
situations that differ in nothing but how often somebody has asked are then the same state.
"""

from typing import Any, NamedTuple

from dfirst.protocol import messages as wire
from dfirst.protocol.messages import Message, Sender, TransferKey
from msgspec.structs import replace

from .codec import DRAWN_FROM
from .codes import CoreCode, LeaseCode, LegCode, OwnerCode, RenewalCode

NOBODYS = -1
Thread = tuple[Any, ...]
"""The incarnations of mover and owner, the transfer (for renewals the mode), and whether it is of grants."""
Renaming = tuple[tuple[int, int], ...]
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

    def in_core(self, core: CoreCode, own: str) -> CoreNumbers:
        """Return the numbers that a core has."""
        asked: dict[int, int] = {}
        words: dict[int, int] = {}
        others: dict[int, int] = {}
        for mover in core.movers:
            for leg in mover.legs:
                thread = self.of(own, leg.peer.incarnation, mover.key)
                word, grant = leg.last_word, leg.grant
                for number, _ in leg.asked:
                    _note(asked, thread, number)
                if isinstance(word, wire.Done | wire.Stopped):
                    _note(words, thread, word.sequence)
                if isinstance(word, wire.Done):
                    grant = word.grant
                _note(others, thread, leg.number)
                for _, part in leg.parts:
                    _note(others, thread, part.sequence)
                _note(others, self.of(own, leg.peer.incarnation, mover.key, grants=True), grant)
        for renewal in core.renewals:
            for number, _, _ in renewal.outstanding:
                _note(asked, self.of(own, renewal.peer.incarnation, renewal.mode), number)
        for owner in core.owners:
            for lease in owner.leases:
                thread = self.of(lease.mover.incarnation, own, owner.key)
                _note(others, thread, lease.number)
                for _, (number, _) in lease.parts:
                    _note(others, thread, number)
                _note(others, self.of(lease.mover.incarnation, own, owner.key, grants=True), lease.grant)
            for sender, query in owner.parked:
                _note(others, self.of(sender.incarnation, own, owner.key), query.sequence)
        held = dict(asked)
        for masks in (words, others):
            for thread, mask in masks.items():
                held[thread] = held.get(thread, 0) | mask
        return CoreNumbers(tuple(held.items()), asked, words)

    # Other names

    def renamed(self, core: CoreCode, own: str, thread: int, renaming: Renaming) -> CoreCode:
        """Return a core in which the numbers of one thread are called otherwise."""
        names = dict(renaming)

        def called(number: int, mover: str, owner: str, what: object, grants: bool = False) -> int:
            return names.get(number, number) if self.of(mover, owner, what, grants) == thread else number

        def leg(one: LegCode, key: TransferKey) -> LegCode:
            peer, word = one.peer.incarnation, one.last_word
            if isinstance(word, wire.Done | wire.Stopped):
                word = replace(word, sequence=called(word.sequence, own, peer, key))
            if isinstance(word, wire.Done):
                word = replace(word, grant=called(word.grant, own, peer, key, grants=True))
            return one._replace(
                asked=tuple((called(number, own, peer, key), at) for number, at in one.asked),
                last_word=word,
                parts=tuple(
                    (place, part._replace(sequence=called(part.sequence, own, peer, key)))
                    for place, part in one.parts
                ),
                number=called(one.number, own, peer, key),
                grant=called(one.grant, own, peer, key, grants=True),
            )

        def lease(one: LeaseCode, key: TransferKey) -> LeaseCode:
            peer = one.mover.incarnation
            return one._replace(
                parts=tuple(
                    (place, (called(number, peer, own, key), how)) for place, (number, how) in one.parts
                ),
                number=called(one.number, peer, own, key),
                grant=called(one.grant, peer, own, key, grants=True),
            )

        def parked(sender: Sender, query: wire.Query, key: TransferKey) -> tuple[Sender, wire.Query]:
            return sender, replace(query, sequence=called(query.sequence, sender.incarnation, own, key))

        def owner(one: OwnerCode) -> OwnerCode:
            return one._replace(
                parked=tuple(parked(sender, query, one.key) for sender, query in one.parked),
                leases=tuple(lease(each, one.key) for each in one.leases),
            )

        def renewal(one: RenewalCode) -> RenewalCode:
            peer = one.peer.incarnation
            outstanding = tuple(
                (called(number, own, peer, one.mode), at, keys) for number, at, keys in one.outstanding
            )
            return one._replace(outstanding=outstanding)

        return core._replace(
            movers=tuple(
                each._replace(legs=tuple(leg(one, each.key) for one in each.legs)) for each in core.movers
            ),
            owners=tuple(owner(each) for each in core.owners),
            renewals=tuple(renewal(each) for each in core.renewals),
        )


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


def _note(masks: dict[int, int], thread: int, number: int) -> None:
    if number > 0:
        masks[thread] = masks.get(thread, 0) | 1 << number
