# Generated from spec/timers.toml by `python -m dfirst.spec.generate`. Do not edit.
"""Every wait and margin of the protocol."""

import msgspec


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """The protocol's timers. Units are in the names."""

    lease_seconds: float = 20.0
    """How long an owner lends its blocks at a time. A mover that stays silent for this long loses them
    (rule R1).
    """

    query_retry_seconds: float = 1.0
    """A mover that has heard nothing repeats its QUERY, and its question for a layout, after this long."""

    query_timeout_seconds: float = 10.0
    """A mover gives a peer up that has not answered anything, not even WAIT, for this long."""

    hold_seconds: float = 120.0
    """Blocks that nobody has asked for, and questions that nobody can answer yet, are given up after this
    long.
    """

    transfer_deadline_seconds: float = 300.0
    """Bounds everything: waiting, retries and renewals of one transfer on one rank."""

    done_retry_seconds: float = 1.0
    """DONE, STOPPED and CANCEL are repeated after this long until they are acknowledged."""

    farewell_seconds: float = 20.0
    """How long, at least, a mover goes on repeating its last word to a peer that does not acknowledge it.
    It does so until the owner's lease has ended anyway: a mover that writes for lease_seconds +
    copy_timeout_seconds + quarantine_seconds + stall_allowance_seconds, if that is longer (rule R3).
    """

    tombstone_seconds: float = 300.0
    """How long a rank remembers a freed transfer, so that late and repeated messages are answered right.
    Longer than its last word is repeated and than any message lives: else a word of the first transfer
    could end the lease of a second one of the same name.
    """

    copy_timeout_seconds: float = 10.0
    """The longest time a batch of copies may take in the engine (rules R2 and R3)."""

    quarantine_seconds: float = 10.0
    """After a batch that failed, how long its copies count as still in flight where the engine cannot tell
    (rule R4).
    """

    stall_allowance_seconds: float = 5.0
    """How long a mover may stand still between looking at the clock and issuing a write (rule R3): an owner
    of pushed blocks waits lease + copy time-out + quarantine + this.
    """

    clock_step_seconds: float = 0.05
    """The coarsest step of the clocks in use; part of the mover's margin (rule R2)."""

    clock_drift_ratio: float = 0.001
    """By how much the rates of two machines' clocks may differ; part of the mover's margin (rule R2)."""
