"""A rank's core as a nested tuple, and back.

Two cores that will behave alike have the same tuple: times are relative to now; timers say in how many
steps of time they fire, since a core's clock only ever moves by whole steps. Left out is what no row
reads in the present state (a lease's end once it is over, the questions of a leg that is lent) and what
only people read (counters, reasons). Numbers of questions and last words are as the core has drawn them;
``numbers`` makes those of a whole world small again.
"""

import heapq
from collections.abc import Callable, Iterable
from math import ceil
from typing import Any

from dfirst.protocol.binding import Observer
from dfirst.protocol.decode_blockwise import DecodeBlockwise
from dfirst.protocol.entity import CoreEntity
from dfirst.protocol.messages import Sender, TransferKey
from dfirst.protocol.modes import BLOCKWISE
from dfirst.protocol.mover_leg import MoverLeg
from dfirst.protocol.mover_transfer import MoverTransfer
from dfirst.protocol.owner_leg import OwnerLeg
from dfirst.protocol.owner_transfer import OwnerTransfer
from dfirst.protocol.peers import PeerBook
from dfirst.protocol.prefill_layerwise import PrefillLayerwise
from dfirst.protocol.rank import OWNER_CLASSES, RankCore
from dfirst.protocol.renewals import Asked, PeerRenewal
from dfirst.protocol.stages import Slot
from dfirst.protocol.timing import Timing

from .codes import CoreCode, LeaseCode, LegCode, MoverCode, OwnerCode, RenewalCode, TimerCode

EPSILON = 1e-9
LONG_OVER = -1.0
"""Further back no end of a lease differs from another: more than one step of a coarse clock."""
ENDED = ("DONE_SENDING", "DONE_RECEIVING", "FAILED", "FREED")
"""States of an owner's transfer in which no word changes anything any more."""
DRAWN_FROM = 40
"""A core that is made from its tuple draws higher numbers than this; those of a state are lower."""


def encode(core: RankCore, rate: int) -> CoreCode:
    """Return the core's tuple."""
    places: dict[int, int] = {}
    now = core.now
    movers = tuple(_mover(transfer, now, places) for transfer in _sorted(core.movers))
    owners = tuple(_owner(transfer, now, places) for transfer in _sorted(core.owners))
    renewals = tuple(
        _renewal(renewal, owner, now, rate)
        for (owner, _), renewal in sorted(core._renewals.items(), key=_renewal_order)
    )
    known = tuple(sorted(core.peers._directories))
    return CoreCode(movers, owners, renewals, _timers(core, rate, places), known)


def decode(
    code: CoreCode,
    timing: Timing,
    sender: Sender,
    peers: PeerBook,
    observer: Observer,
    slots: tuple[Slot, ...] = (),
) -> RankCore:
    """Return the core of a tuple, at time 0."""
    core = RankCore(timing, sender, observer, slots)
    core.peers = peers
    entities: list[CoreEntity] = []
    for mover in code.movers:
        _make_mover(core, mover, entities)
    for owner in code.owners:
        _make_owner(core, owner, entities)
    for renewal in code.renewals:
        _make_renewal(core, renewal)
    for deadline, place, name in code.timers:
        core.arm(entities[place], name, deadline)
    core._sequence = DRAWN_FROM
    return core


def _sorted(transfers: dict[TransferKey, Any]) -> Iterable[Any]:
    if len(transfers) < 2:
        return transfers.values()
    return (transfers[key] for key in sorted(transfers, key=lambda key: (key.transfer_id, key.attempt)))


def _renewal_order(item: tuple[tuple[Sender, str], PeerRenewal]) -> tuple[float, int, str, str]:
    (sender, mode), renewal = item
    return renewal.due or 1e9, sender.rank, sender.incarnation, mode


def _copying(renewal: PeerRenewal) -> list[MoverLeg]:
    return [leg for leg in renewal.legs.values() if leg.state == "COPYING"]


# Movers


def _mover(transfer: MoverTransfer, now: float, places: dict[int, int]) -> MoverCode:
    places[id(transfer)] = len(places)
    legs = []
    for leg in transfer.legs.values():
        places[id(leg)] = len(places)
        legs.append(_leg(leg, now))
    return MoverCode(
        transfer.mode,
        transfer.key,
        transfer.state,
        transfer.remote,
        transfer.request_id,
        transfer.local_blocks,
        transfer.prompt_tokens,
        transfer.cached_tokens,
        transfer.finished,
        tuple(legs),
    )


def _leg(leg: MoverLeg, now: float) -> LegCode:
    asked: tuple[tuple[int, float], ...] = ()
    if leg.state == "METADATA_QUERY":
        asked = tuple((number, at - now) for number, at in leg.asked.items())
    number = leg.number if leg.state in ("METADATA_QUERY", "COPYING", "DRAINING") else 0
    grant = leg.grant if leg.state == "COPYING" else 0
    until = max(leg.lease_until - now, LONG_OVER) if leg.state == "COPYING" else 0.0
    word = leg.last_word if leg.state == "DONE_UNACKED" else None
    failed = "failed" if leg.failure else ""
    return LegCode(
        leg.peer,
        leg.plan,
        leg.entry,
        leg.state,
        until,
        asked,
        leg.lent,
        leg.copied,
        failed,
        word,
        number,
        grant,
        tuple((place, part) for place, part in sorted(leg.parts.items())),
    )


def _make_mover(core: RankCore, code: MoverCode, entities: list[CoreEntity]) -> None:
    mode, key, state, remote, request_id, blocks, prompt, cached, finished, legs = code
    made: MoverTransfer = (DecodeBlockwise if mode == BLOCKWISE else PrefillLayerwise)(core, key, remote)
    made.state, made.request_id, made.local_blocks = state, request_id, blocks
    made.prompt_tokens, made.cached_tokens, made.finished = prompt, cached, finished
    core.movers[key] = made
    entities.append(made)
    for peer, plan, entry, state, until, asked, lent, copied, failed, word, number, grant, parts in legs:
        leg = MoverLeg(core, made, peer, plan, entry)
        leg.state, leg.lease_until, leg.asked = state, until, dict(asked)
        leg.lent, leg.copied, leg.failure, leg.last_word = lent, copied, failed, word
        leg.number, leg.grant, leg.parts = number, grant, dict(parts)
        made.legs[leg.leg_key] = leg
        entities.append(leg)


# Owners


def _owner(transfer: OwnerTransfer, now: float, places: dict[int, int]) -> OwnerCode:
    places[id(transfer)] = len(places)
    leases = []
    by_mover: Callable[[Sender], tuple[int, str]] = lambda mover: (mover.rank, mover.incarnation)  # noqa: E731
    for mover in sorted(transfer.leases, key=by_mover):
        lease = transfer.leases[mover]
        places[id(lease)] = len(places)
        until = max(lease.lent_until - now, 0.0) if lease.state == "LENT" else 0.0
        numbers = (0, 0)
        if lease.state in ("LENT", "EXPIRED") and transfer.state not in ENDED:
            numbers = (lease.number, lease.grant)
        parts, has_slot = tuple(sorted((lease.parts or {}).items())), lease.slot is not None
        leases.append(
            LeaseCode(mover, lease.state, until, lease.tail_seconds, lease.route, *numbers, parts, has_slot)
        )
    parked = tuple((mover, transfer.parked[mover]) for mover in sorted(transfer.parked, key=by_mover))
    return OwnerCode(
        transfer.mode,
        transfer.key,
        transfer.state,
        transfer.request_id,
        transfer.block_ids,
        transfer.prompt_tokens,
        transfer.cached_tokens,
        transfer.layout_digest,
        max(transfer.held_until - now, 0.0),
        parked,
        tuple(leases),
    )


def _make_owner(core: RankCore, code: OwnerCode, entities: list[CoreEntity]) -> None:
    mode, key, state, request_id, blocks, prompt, cached, digest, held, parked, leases = code
    made = OWNER_CLASSES[mode](core, key)
    made.state, made.request_id, made.block_ids = state, request_id, blocks
    made.prompt_tokens, made.cached_tokens, made.layout_digest = prompt, cached, digest
    made.held_until, made.parked = held, dict(parked)
    core.owners[key] = made
    entities.append(made)
    for mover, state, until, tail, route, number, grant, parts, has_slot in leases:
        lease = OwnerLeg(core, made, mover)
        lease.state, lease.lent_until, lease.tail_seconds = state, until, tail
        lease.route, lease.number, lease.grant = route, number, grant
        lease.parts = dict(parts) if parts else None
        lease.slot = core.slots.take() if has_slot else None
        made.leases[mover] = lease
        entities.append(lease)


# Renewals and timers


def _renewal(renewal: PeerRenewal, owner: Sender, now: float, rate: int) -> RenewalCode:
    legs = tuple(leg.leg_key for leg in _copying(renewal))
    outstanding: tuple[tuple[int, float, tuple[TransferKey, ...]], ...] = ()
    if legs:
        outstanding = tuple(
            (number, asked.at - now, asked.keys) for number, asked in renewal.outstanding.items()
        )
    due = _steps(renewal.due - now, rate) * rate if renewal.due else -1.0
    return RenewalCode(renewal.peer, renewal.mode, owner, legs, outstanding, due)


def _make_renewal(core: RankCore, code: RenewalCode) -> None:
    peer, mode, owner, legs, outstanding, due = code
    made = PeerRenewal(peer, mode)
    made.legs = {leg.key: core.movers[leg.key].legs[leg] for leg in legs}
    made.outstanding = {number: Asked(at, keys) for number, at, keys in outstanding}
    core._renewals[owner, mode] = made
    if due >= 0:
        # A due time of 0 means "not armed": a renewal that is due now is due a moment ago.
        core._arm_renewal(made, due or -EPSILON)


def _timers(core: RankCore, rate: int, places: dict[int, int]) -> tuple[TimerCode, ...]:
    found = []
    seen = set()
    for deadline, _, entity, name in heapq.nsmallest(len(core._timers), core._timers):
        place = places.get(id(entity))
        if place is not None and entity.timers.get(name) == deadline and (place, name) not in seen:
            seen.add((place, name))
            found.append(TimerCode(_steps(deadline - core.now, rate) * rate, place, name))
    return tuple(found)


def _steps(seconds: float, rate: int) -> int:
    return max(ceil(seconds / rate - EPSILON), 0)
