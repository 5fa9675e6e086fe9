"""The arithmetic of leases (rules R1 to R3): two clocks that only agree on their rates.

The mover counts from the moment it *sent* the question that was granted, the owner from the moment it
answered, which is later. So the mover's end comes first, by its clock and by the owner's, once the drift
between them is taken off.
"""

from .timing import Timing


def mover_margin_seconds(timing: Timing, lease_seconds: float) -> float:
    """Return what the mover takes off its lease for clocks that drift and are coarse (rule R2): they drift
    for as long as an owner may count, which for writes includes the copy time-out and the stall allowance.
    """
    drifting = lease_seconds + timing.copy_timeout_seconds + timing.stall_allowance_seconds
    return timing.clock_drift_ratio * drifting + timing.clock_step_seconds


def mover_end(timing: Timing, asked_at: float, lease_seconds: float) -> float:
    """Return when a grant ends for the mover that asked for it at ``asked_at``; it acts strictly before
    (rule R1).
    """
    return asked_at + lease_seconds - mover_margin_seconds(timing, lease_seconds)


def write_tail_seconds(timing: Timing) -> float:
    """Return for how long after its lease has ended a mover's write may still land (rule R3)."""
    return timing.copy_timeout_seconds + timing.stall_allowance_seconds


def owner_end(timing: Timing, answered_at: float, tail_seconds: float) -> float:
    """Return when the owner may take its blocks back; it acts at or after this.

    A read counts only if it ended inside the mover's lease, so the lease alone is enough. A write has been
    started inside it and may still be under way for ``tail_seconds``, which its mover says (rule R3).
    """
    return answered_at + timing.lease_seconds + tail_seconds


def farewell_seconds(timing: Timing, tail_seconds: float) -> float:
    """Return how long a mover repeats its last word: until the lease that it ends has ended by itself
    (rule R9), and no shorter than configured.
    """
    return max(timing.farewell_seconds, owner_end(timing, 0.0, tail_seconds))
