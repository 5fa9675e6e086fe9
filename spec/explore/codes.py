"""What the tuple of a rank's core holds (``codec`` says how it is made, and what is left out)."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from dfirst.protocol.commands import LegKey, RemoteEngine
from dfirst.protocol.messages import Cancel, Done, Query, Sender, Stopped, TransferKey
from dfirst.protocol.mover_leg import OpenPart, Peer
from dfirst.protocol.plan import Leg
from dfirst.protocol.shards import RankEntry


class LegCode(NamedTuple):
    """A mover's leg."""

    peer: Peer
    plan: Leg | None
    entry: RankEntry | None
    state: str
    lease_until: float
    asked: tuple[tuple[int, float], ...]
    """Questions whose answers it takes, each with its time."""
    lent: bool
    copied: bool
    failure: str
    last_word: Done | Stopped | Cancel | None
    number: int
    grant: int
    parts: tuple[tuple[int, OpenPart], ...]
    """Those that the owner was asked for, by their places."""


class MoverCode(NamedTuple):
    """A transfer on the rank that copies."""

    mode: str
    key: TransferKey
    state: str
    remote: RemoteEngine
    request_id: str
    local_blocks: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int
    finished: bool
    legs: tuple[LegCode, ...]


class LeaseCode(NamedTuple):
    """What an owner has lent to a mover."""

    mover: Sender
    state: str
    lent_until: float
    tail_seconds: float
    route: bytes
    number: int
    grant: int
    parts: tuple[tuple[int, tuple[int, str]], ...]
    """For each place the number of its newest part, and what became of it."""
    has_slot: bool
    """Which one makes no difference: all are alike."""


class OwnerCode(NamedTuple):
    """A transfer on the rank whose blocks are lent."""

    mode: str
    key: TransferKey
    state: str
    request_id: str
    block_ids: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int
    layout_digest: str
    held_until: float
    parked: tuple[tuple[Sender, Query], ...]
    leases: tuple[LeaseCode, ...]


class RenewalCode(NamedTuple):
    """The renewals of all leases of one peer."""

    peer: Peer
    mode: str
    owner: Sender
    legs: tuple[LegKey, ...]
    outstanding: tuple[tuple[int, float, tuple[TransferKey, ...]], ...]
    """Numbers of questions with their times and transfers."""
    due: float
    """-1: never."""


class TimerCode(NamedTuple):
    """A timer of a transfer, a leg or a lease."""

    at: int
    place: int
    """Of whose it is: each transfer is followed by its legs or leases, movers come before owners."""
    name: str


class CoreCode(NamedTuple):
    """A whole core."""

    movers: tuple[MoverCode, ...] = ()
    owners: tuple[OwnerCode, ...] = ()
    renewals: tuple[RenewalCode, ...] = ()
    timers: tuple[TimerCode, ...] = ()
    """Those that ring first come first."""
    known: tuple[str, ...] = ()
    """Digests of the layouts that it knows."""

    @property
    def transfers(self) -> tuple[MoverCode | OwnerCode, ...]:
        """Return both kinds."""
        return (*self.movers, *self.owners)

    @property
    def legs(self) -> Iterator[LegCode]:
        """Return the legs of all transfers."""
        return (leg for mover in self.movers for leg in mover.legs)

    @property
    def leases(self) -> Iterator[LeaseCode]:
        """Return what was lent of all transfers."""
        return (lease for owner in self.owners for lease in owner.leases)

    def timers_of(self, place: int) -> dict[str, int]:
        """Return when the timers at a place ring."""
        return {timer.name: timer.at for timer in self.timers if timer.place == place}


def places(core: CoreCode) -> Iterator[tuple[int, MoverCode | OwnerCode]]:
    """Yield each transfer with its place among all that have timers."""
    place = 0
    for transfer in core.transfers:
        yield place, transfer
        place += 1 + len(_parts(transfer))


def leg_places(core: CoreCode) -> Iterator[tuple[int, MoverCode, LegCode]]:
    """Yield each leg with its place and its transfer."""
    for place, transfer in places(core):
        if isinstance(transfer, MoverCode):
            for number, leg in enumerate(transfer.legs, start=place + 1):
                yield number, transfer, leg


def _parts(transfer: MoverCode | OwnerCode) -> tuple[Any, ...]:
    return transfer.legs if isinstance(transfer, MoverCode) else transfer.leases
