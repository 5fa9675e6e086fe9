"""Rules R1 to R3 given up: how long a lease is, on either side."""

from collections.abc import Iterator

from dfirst.protocol import lease, owner_leg
from dfirst.protocol.binding import effect
from dfirst.protocol.mover_leg import MoverLeg
from dfirst.protocol.owner_leg import OwnerLeg
from dfirst.protocol.rank import RankCore
from dfirst.protocol.renewals import PeerRenewal

from . import misdeeds
from .alterations import BOTH, PUSH, Mutant
from .making import bound, counted, habit, last_moment, late_mover, method, revived, tail, values


def mistakes() -> Iterator[Mutant]:
    """Yield them all."""
    yield from _counting()
    yield from _renewing()
    yield from _margins()
    yield from _tails()


def _counting() -> Iterator[Mutant]:
    yield Mutant(
        "R1 arrival",
        "the mover counts from the answer's arrival",
        BOTH,
        counted("_extend", misdeeds.extend_now),
        shows_in="pull-patient",
    )
    yield Mutant(
        "R1 latest",
        "the mover counts from its latest question",
        BOTH,
        counted("take_lease", effect(misdeeds.take_latest)),
        shows_in="pull-1x1",
    )
    yield Mutant(
        "R1 back",
        "a late answer moves the mover's end back",
        BOTH,
        method(MoverLeg, "_extend", misdeeds.extend_back),
        shows_in="push-leases",
    )
    yield Mutant(
        "R1 once",
        "only the first answer starts the owner's count",
        BOTH,
        bound(OwnerLeg, "extend", effect(misdeeds.extend_once)),
    )
    yield Mutant("R1 revive", "a late answer revives what was reported as failed", BOTH, revived())


def _renewing() -> Iterator[Mutant]:
    yield Mutant(
        "R1 renewal",
        "the mover counts from its latest renewal",
        BOTH,
        method(PeerRenewal, "take", misdeeds.take_renewal_latest),
    )
    yield Mutant(
        "R1 all",
        "a renewal is granted without looking at the transfers",
        BOTH,
        method(RankCore, "_hear_renew", misdeeds.renew_all),
    )
    yield Mutant(
        "R1 whole",
        "a renewal is refused as a whole",
        BOTH,
        method(RankCore, "_answer_renew", misdeeds.renew_all_or_none),
        shows_in="pull-two-leases",
    )
    yield Mutant(
        "R1 refused",
        "the mover extends what was refused too",
        BOTH,
        method(PeerRenewal, "take", misdeeds.take_renewal_whole),
    )


def _margins() -> Iterator[Mutant]:
    yield Mutant(
        "R2 none",
        "no margin",
        BOTH,
        values((lease, "mover_margin_seconds", misdeeds.no_margin)),
        shows_in="pull-leases-swapped",
    )
    yield Mutant(
        "R2 step",
        "a margin of one clock step, none for drift",
        BOTH,
        values((lease, "mover_margin_seconds", misdeeds.step_margin)),
        shows_in="pull-leases-swapped",
    )
    yield Mutant(
        "R2 drift",
        "a margin for drift, none for the clock's step",
        PUSH,
        values((lease, "mover_margin_seconds", misdeeds.drift_margin)),
        shows_in="push-tight",
    )
    yield Mutant(
        "R2 lease",
        "a margin for the drift over the lease, not over the copy",
        PUSH,
        values((lease, "mover_margin_seconds", misdeeds.lease_margin)),
        shows_in="push-tight",
    )
    yield Mutant(
        "R2 early",
        "the owner acts before its end",
        BOTH,
        values((owner_leg, "owner_end", misdeeds.early_end)),
    )
    yield Mutant(
        "R2 at",
        "the mover acts at its end",
        PUSH,
        last_moment(),
        shows_in="push-tight",
    )
    yield Mutant(
        "R2 late",
        "the mover acts after its end",
        BOTH,
        late_mover(),
        shows_in="pull-crashes",
    )
    yield Mutant(
        "R2 suspended",
        "a clock stands still while its machine is suspended",
        BOTH,
        habit("counts_suspension"),
        shows_in="pull-leases-swapped",
    )


def _tails() -> Iterator[Mutant]:
    yield Mutant(
        "R3 lease",
        "an owner of pushed blocks waits for the lease alone",
        PUSH,
        values((owner_leg, "owner_end", misdeeds.lease_only)),
    )
    yield Mutant(
        "R3 stall",
        "it does not wait for the stall allowance",
        PUSH,
        tail(lambda timing: timing.copy_timeout_seconds),
        shows_in="push-patient",
    )
    yield Mutant(
        "R3 copy",
        "it does not wait for the copy time-out",
        PUSH,
        tail(lambda timing: timing.stall_allowance_seconds),
    )
