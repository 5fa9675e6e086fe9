"""The sets of worlds that ``dfirst explore`` visits.

Small worlds are explored in every order; larger ones take letters and steps in one order, and another
order is a fault like any other. The quick set has one fault (two where that is few states), the full set
two or three.
"""

import msgspec
from dfirst.protocol.timing import Timing

from .configuration import ABORTS, COPIES, NETWORK, STEADY, SWAPPED, Configuration, pull, push

LONG_BOUNDS = {"bound_steps": 12, "wait_bound_steps": 12}
LONG_HOLD: Timing = msgspec.structs.replace(STEADY, hold_seconds=40.0, transfer_deadline_seconds=20.0)

PATIENT = msgspec.structs.replace(STEADY, query_retry_seconds=12.0, query_timeout_seconds=24.0)

TARGETED: tuple[Configuration, ...] = (
    pull("pull-leases", faults=3, kinds=("slow", "lose", "delay"), orderly=True),
    push("push-leases", faults=2, kinds=("slow", "lose", "delay", "suspend", "late"), orderly=True),
    pull("pull-leases-swapped", faults=3, kinds=("slow", "lose", "suspend"), orderly=True, **SWAPPED),
    push(
        "push-leases-swapped", faults=2, kinds=("slow", "lose", "delay", "suspend"), orderly=True, **SWAPPED
    ),
    pull("pull-crashes", faults=2, kinds=("die", "restart", "slow", "late", "repeat"), orderly=True),
    push("push-crashes", faults=2, kinds=("die", "restart", "slow", "late", "repeat"), orderly=True),
    pull("pull-aborts", faults=2, kinds=("abort", "cancel", "slow", "late", "break"), orderly=True),
    push("push-aborts", faults=2, kinds=("abort", "cancel", "slow", "late", "break"), orderly=True),
    pull("pull-again", faults=2, kinds=("again", "repeat", "delay", "abort"), orderly=True),
    push("push-again", faults=2, kinds=("again", "repeat", "delay", "abort"), orderly=True),
    pull("pull-1x2-readers", faults=2, decode_ranks=2, kinds=("slow", "lose", "abort"), orderly=True),
    push("push-2x1-writers", faults=2, prefill_ranks=2, kinds=("slow", "break", "abort"), orderly=True),
    pull(
        "pull-patient",
        faults=3,
        kinds=("slow", "lose", "delay"),
        timing=PATIENT,
        orderly=True,
        mild_bounds_steps=(0, 3),
    ),
    push(
        "push-patient",
        faults=3,
        kinds=("slow", "lose", "delay"),
        timing=PATIENT,
        orderly=True,
        mild_bounds_steps=(0, 3),
    ),
)
"""Two and three faults of the kinds that have to do with each other."""

STAGED_KINDS = ("lose", "repeat", "delay", "slow")
STAGED: tuple[Configuration, ...] = (
    pull("pull-staged", faults=1, staged=True, batches=2, kinds=(*STAGED_KINDS, "break", "die", "abort")),
    push("push-staged", faults=1, staged=True, batches=2, kinds=(*STAGED_KINDS, "break", "die", "cancel")),
    pull("pull-staged-two", faults=1, staged=True, transfers=2, kinds=STAGED_KINDS, orderly=True),
    push("push-staged-two", faults=1, staged=True, transfers=2, kinds=STAGED_KINDS, orderly=True),
    pull("pull-staged-crashes", faults=2, staged=True, kinds=("slow", "die", "restart"), orderly=True),
)
"""Copies by way of the owner's staging memory, of which each owner has one slot."""

STAGED_LATE: tuple[Configuration, ...] = (
    pull("pull-staged-late", faults=2, staged=True, batches=2, kinds=STAGED_KINDS, orderly=True),
    push("push-staged-late", faults=2, staged=True, batches=2, kinds=STAGED_KINDS, orderly=True),
    push("push-staged-crashes", faults=3, staged=True, kinds=("slow", "die", "lose"), orderly=True),
)
"""And with more faults, for which the quick set has no time."""

SECOND_USE: tuple[Configuration, ...] = (
    push("push-same-transfer", faults=3, kinds=("again", "repeat"), orderly=True),
    pull("pull-same-transfer", faults=4, kinds=("again", "repeat", "abort")),
)
"""The same transfer once more, when both sides have forgotten it; the words of the first one come late."""

QUICK: tuple[Configuration, ...] = (
    pull("pull-1x1", faults=1),
    push("push-1x1", faults=1, batches=2),
    pull("pull-1x1-unmet", faults=1, met=False, **SWAPPED),
    push("push-1x1-unmet", faults=1, met=False, orderly=True, **SWAPPED),
    pull("pull-1x1-d-first", faults=1, prefill_first=False),
    pull("pull-1x1-long-hold", faults=1, timing=LONG_HOLD, **LONG_BOUNDS),
    push("push-1x1-long-hold", faults=1, timing=LONG_HOLD, **LONG_BOUNDS, orderly=True),
    pull("pull-1x2-cached", faults=1, decode_ranks=2, all_cached=True, orderly=True),
    pull("pull-1x2-cached-unmet", faults=1, decode_ranks=2, all_cached=True, met=False, orderly=True),
    pull("pull-2x1", faults=1, prefill_ranks=2, orderly=True),
    push("push-2x1", faults=1, prefill_ranks=2, orderly=True),
    pull("pull-2x1-replicas", faults=1, prefill_ranks=2, heads=1, orderly=True),
    push("push-2x1-replicas", faults=1, prefill_ranks=2, heads=1, orderly=True),
    pull("pull-1x2", faults=1, decode_ranks=2, orderly=True),
    push("push-1x2", faults=1, decode_ranks=2, orderly=True),
    pull("pull-2x2", faults=1, prefill_ranks=2, decode_ranks=2, orderly=True),
    push("push-2x2", faults=1, prefill_ranks=2, decode_ranks=2, orderly=True),
    pull("pull-1x1-two", faults=1, transfers=2, orderly=True),
    push("push-1x1-two", faults=1, transfers=2, orderly=True),
    *TARGETED,
    *STAGED,
)

FULL: tuple[Configuration, ...] = (
    push("push-1x1-every-order", faults=2),
    push("push-1x1-every-order-swapped", faults=2, **SWAPPED),
    pull("pull-1x1-every-order", faults=2),
    pull("pull-1x1-every-order-swapped", faults=2, **SWAPPED),
    pull("pull-1x1-d-first", faults=2, prefill_first=False),
    pull("pull-1x1-three", faults=3, orderly=True),
    push("push-1x1-three", faults=3, orderly=True, batches=2, kinds=(*NETWORK, *COPIES, *ABORTS)),
    pull("pull-1x1-unmet", faults=2, met=False),
    push("push-1x1-unmet", faults=2, met=False, orderly=True),
    pull("pull-1x1-long-hold", faults=2, timing=LONG_HOLD, **LONG_BOUNDS),
    push("push-1x1-long-hold", faults=2, timing=LONG_HOLD, **LONG_BOUNDS, orderly=True),
    pull("pull-1x2-cached", faults=2, decode_ranks=2, all_cached=True, orderly=True),
    pull("pull-2x1", faults=2, prefill_ranks=2, orderly=True),
    push("push-2x1", faults=2, prefill_ranks=2, orderly=True, **SWAPPED),
    pull("pull-2x1-replicas", faults=2, prefill_ranks=2, heads=1, orderly=True),
    push("push-2x1-replicas", faults=2, prefill_ranks=2, heads=1, orderly=True),
    pull("pull-1x2", faults=2, decode_ranks=2, orderly=True, **SWAPPED),
    push("push-1x2", faults=2, decode_ranks=2, orderly=True),
    pull("pull-2x2", faults=2, prefill_ranks=2, decode_ranks=2, orderly=True),
    push("push-2x2", faults=2, prefill_ranks=2, decode_ranks=2, orderly=True),
    pull("pull-1x1-two", faults=2, transfers=2, orderly=True),
    push("push-1x1-two", faults=2, transfers=2, orderly=True),
    *SECOND_USE,
    *STAGED_LATE,
    pull("pull-staged-two", faults=2, staged=True, transfers=2, kinds=STAGED_KINDS, orderly=True),
    push("push-staged-two", faults=2, staged=True, transfers=2, kinds=STAGED_KINDS, orderly=True),
    pull("pull-staged-every-order", faults=2, staged=True, batches=2, kinds=STAGED_KINDS),
    push("push-staged-every-order", faults=2, staged=True, kinds=(*STAGED_KINDS, "restart")),
)

SHORT_LEASE: Timing = msgspec.structs.replace(STEADY, lease_seconds=10.0)
"""A copy that takes its time outlasts the lease, unless that is renewed."""
LONG_LEASE: Timing = msgspec.structs.replace(STEADY, lease_seconds=60.0, transfer_deadline_seconds=44.0)
"""Who waits for a lease to end, or to be renewed, waits long."""
SHORT_HOLD: Timing = msgspec.structs.replace(STEADY, hold_seconds=8.0, transfer_deadline_seconds=80.0)
"""Who waits for a writer that never asks waits far less than for the deadline."""
SHORT_DEADLINE: Timing = msgspec.structs.replace(STEADY, transfer_deadline_seconds=15.0)
SLOW_COPIES: Timing = msgspec.structs.replace(PATIENT, copy_timeout_seconds=16.0)
TIGHT: Timing = msgspec.structs.replace(
    STEADY, lease_seconds=18.0, copy_timeout_seconds=3.0, stall_allowance_seconds=3.0, hold_seconds=32.0
)
"""At rates of 3 and 4 the margin is not one step of time longer than it must be."""

PARTICULAR: tuple[Configuration, ...] = (
    pull(
        "pull-short-lease",
        faults=2,
        kinds=("slow", "lose"),
        timing=SHORT_LEASE,
        harmless_faults=0,
        **SWAPPED,
    ),
    pull("pull-late-renewal", faults=3, kinds=("slow", "delay", "mute"), **SWAPPED),
    push("push-short-lease", faults=2, kinds=("slow", "lose"), timing=SHORT_LEASE, harmless_faults=0),
    push(
        "push-long-lease",
        faults=2,
        batches=4,
        kinds=("abort", "cancel", "slow"),
        timing=msgspec.structs.replace(LONG_LEASE, transfer_deadline_seconds=15.0),
        orderly=True,
    ),
    push(
        "push-2x1-long-lease",
        faults=2,
        prefill_ranks=2,
        kinds=("break", "abort", "late"),
        timing=LONG_LEASE,
        orderly=True,
    ),
    pull("pull-1x1-disagree", faults=1, disagree=True),
    push("push-1x1-disagree", faults=1, disagree=True),
    pull("pull-retried", faults=3, kinds=("slow", "restart", "again"), orderly=True),
    push("push-retried", faults=3, kinds=("slow", "restart", "again"), orderly=True),
    pull(
        "pull-1x2-long-hold",
        faults=2,
        decode_ranks=2,
        kinds=("late", "die", "cancel", "abort"),
        timing=LONG_HOLD,
        orderly=True,
        **LONG_BOUNDS,
    ),
    push(
        "push-2x1-long-hold",
        faults=2,
        prefill_ranks=2,
        kinds=("late", "die", "cancel", "abort"),
        timing=LONG_HOLD,
        orderly=True,
        **LONG_BOUNDS,
    ),
    pull(
        "pull-1x2-cached-d-first",
        faults=1,
        decode_ranks=2,
        all_cached=True,
        prefill_first=False,
        orderly=True,
    ),
    push("push-1x2-cached", faults=1, decode_ranks=2, all_cached=True, orderly=True),
    pull("pull-d-first-patient", faults=1, prefill_first=False, timing=PATIENT, mild_bounds_steps=(0, 3)),
    pull("pull-d-first-aborts", faults=2, prefill_first=False, kinds=("abort", "absent"), orderly=True),
    pull(
        "pull-1x2-patient",
        faults=3,
        decode_ranks=2,
        kinds=("slow", "lose", "die"),
        timing=SLOW_COPIES,
        harmless_faults=0,
        orderly=True,
        **SWAPPED,
    ),
    pull(
        "pull-owner-met",
        faults=2,
        met=False,
        owner_met=True,
        kinds=("mute", "abort"),
        timing=LONG_HOLD,
        orderly=True,
        **LONG_BOUNDS,
    ),
    push(
        "push-unmet-mute",
        faults=2,
        met=False,
        kinds=("mute", "abort"),
        timing=LONG_HOLD,
        orderly=True,
        **LONG_BOUNDS,
    ),
    push("push-2x1-stray", faults=1, prefill_ranks=2, heads=1, kinds=("stray",), orderly=True),
    push("push-1x1-cached-stray", faults=1, all_cached=True, kinds=("stray",), orderly=True),
    push(
        "push-2x1-short-hold",
        faults=2,
        prefill_ranks=2,
        batches=4,
        kinds=("mute", "slow"),
        timing=SHORT_HOLD,
        orderly=True,
        bound_steps=20,
        wait_bound_steps=20,
    ),
    pull("pull-mute", faults=2, kinds=("mute", "slow", "abort"), orderly=True),
    push("push-mute", faults=2, kinds=("mute", "slow", "abort"), orderly=True),
    push(
        "push-tight",
        faults=2,
        kinds=("slow", "mute"),
        timing=TIGHT,
        prefill_rate=3,
        decode_rate=4,
        coarse=True,
        bound_steps=12,
        wait_bound_steps=12,
    ),
    pull("pull-deadline", faults=2, batches=4, kinds=("slow", "abort"), timing=SHORT_DEADLINE, orderly=True),
    pull(
        "pull-deadline-swapped",
        faults=2,
        batches=4,
        kinds=("slow", "abort"),
        timing=SHORT_DEADLINE,
        orderly=True,
        **SWAPPED,
    ),
    push("push-deadline", faults=2, batches=4, kinds=("slow", "abort"), timing=SHORT_DEADLINE, orderly=True),
    push(
        "push-deadline-swapped",
        faults=2,
        batches=4,
        kinds=("slow", "abort"),
        timing=SHORT_DEADLINE,
        orderly=True,
        **SWAPPED,
    ),
    push(
        "push-unmet-deadline",
        faults=1,
        met=False,
        batches=4,
        kinds=("slow",),
        timing=SHORT_DEADLINE,
        orderly=True,
        **SWAPPED,
    ),
    push(
        "push-2x1-batches",
        faults=2,
        prefill_ranks=2,
        batches=3,
        kinds=("slow", "break", "abort"),
        orderly=True,
    ),
    pull(
        "pull-2x1-batches",
        faults=3,
        prefill_ranks=2,
        batches=3,
        kinds=("slow", "mute"),
        orderly=True,
    ),
    pull(
        "pull-two-leases",
        faults=3,
        transfers=2,
        kinds=("slow", "cancel"),
        timing=SHORT_LEASE,
        orderly=True,
        **SWAPPED,
    ),
)
"""Each made for something that shows nowhere else."""

HUNT: tuple[Configuration, ...] = (
    pull("pull-1x1-o", faults=1, orderly=True),
    push("push-1x1-o", faults=1, orderly=True),
    pull("pull-1x1-unmet-o", faults=1, met=False, orderly=True, **SWAPPED),
    push("push-1x1-unmet-o", faults=1, met=False, orderly=True, **SWAPPED),
    pull("pull-1x1-unfit", faults=1, unfit=True),
    push("push-1x1-unfit", faults=1, unfit=True),
    pull("pull-1x1-unfit-unmet", faults=1, unfit=True, met=False),
    push("push-1x1-unfit-unmet", faults=1, unfit=True, met=False),
    pull("pull-1x2-cached", faults=1, decode_ranks=2, all_cached=True, orderly=True),
    pull("pull-1x2-cached-unmet", faults=1, decode_ranks=2, all_cached=True, met=False, orderly=True),
    pull("pull-2x1-replicas", faults=1, prefill_ranks=2, heads=1, orderly=True),
    push("push-2x1-replicas", faults=1, prefill_ranks=2, heads=1, orderly=True),
    push("push-2x1-replicas-unmet", faults=1, prefill_ranks=2, heads=1, met=False, orderly=True),
    pull("pull-2x1", faults=1, prefill_ranks=2, orderly=True),
    push("push-2x1", faults=1, prefill_ranks=2, orderly=True),
    pull("pull-1x2", faults=1, decode_ranks=2, orderly=True),
    push("push-1x2", faults=1, decode_ranks=2, orderly=True),
    pull("pull-2x2", faults=1, prefill_ranks=2, decode_ranks=2, orderly=True),
    push("push-2x2", faults=1, prefill_ranks=2, decode_ranks=2, orderly=True),
    pull("pull-1x1", faults=1),
    push("push-1x1", faults=1, batches=2),
    pull("pull-1x1-d-first", faults=1, prefill_first=False),
    pull("pull-1x1-d-first-long", faults=1, prefill_first=False, timing=LONG_HOLD, **LONG_BOUNDS),
    pull("pull-1x1-long-hold", faults=1, timing=LONG_HOLD, orderly=True, **LONG_BOUNDS),
    push("push-1x1-long-hold", faults=1, timing=LONG_HOLD, orderly=True, **LONG_BOUNDS),
    pull("pull-1x1-two", faults=1, transfers=2, orderly=True),
    pull("pull-1x1-attempts", faults=1, transfers=2, attempts=True, orderly=True),
    pull("pull-1x1-unmet", faults=1, met=False),
    *STAGED[:2],
    *TARGETED,
    *PARTICULAR,
    *STAGED[2:],
    *STAGED_LATE,
    push("push-preempted", faults=2, kinds=("abort", "slow"), batches=2),
    pull("pull-1x2-readers-three", faults=3, decode_ranks=2, kinds=("slow", "lose"), orderly=True),
    push("push-2x1-late", faults=2, prefill_ranks=2, kinds=("late", "cancel", "die"), orderly=True),
    *SECOND_USE,
)
"""Worlds that mutants are tried on; small ones come first by themselves."""


def named(name: str, quick: bool) -> Configuration:
    """Return a world of a set, or the other one's if this set has none of that name."""
    first, second = (QUICK, FULL) if quick else (FULL, QUICK)
    for configuration in (*first, *second, *HUNT):
        if configuration.name == name:
            return configuration
    names = ", ".join(sorted({configuration.name for configuration in (*QUICK, *FULL, *HUNT)}))
    raise ValueError(f"there is no configuration {name!r}; there are {names}")
