"""Rules R4 and R5 given up: what happens to blocks while copies are in flight, and in staging; and the
mistakes of the field about what is copied where.
"""

from collections.abc import Iterator

from dfirst.protocol import copies as runs
from dfirst.protocol.binding import effect, guard
from dfirst.protocol.decode_layerwise import DecodeLayerwise
from dfirst.protocol.mover_leg import MoverLeg
from dfirst.protocol.owner_leg import OwnerLeg
from dfirst.protocol.owner_transfer import OwnerTransfer
from dfirst.protocol.prefill_blockwise import PrefillBlockwise

from . import misdeeds
from .alterations import BOTH, PULL, PUSH, Mutant
from .making import bound, habit, method, refused_used, rows, values


def mistakes() -> Iterator[Mutant]:
    """Yield them all."""
    yield from _failed_batches()
    yield from _handing_back()
    yield from _preemption()
    yield from _staging()
    yield from _field()


def _failed_batches() -> Iterator[Mutant]:
    yield Mutant(
        "R4 early",
        "a failure is reported while the batch still moves",
        BOTH,
        habit("waits_for_failed_batches"),
    )
    yield Mutant(
        "R4 done",
        "a failed batch counts as copied",
        BOTH,
        rows("mover_leg", ML13={"effects": ("say_done", "tell_transfer")}),
    )
    quiet = {"target": "DONE_UNACKED", "effects": ("fail_leg", "say_stopped", "tell_transfer")}
    yield Mutant(
        "R4 stopped",
        "STOPPED is said with copies in flight",
        BOTH,
        rows("mover_leg", ML15=quiet, ML16=quiet, ML17=quiet),
    )
    yield Mutant(
        "R4 unasked",
        "a batch is begun without asking for the lease",
        BOTH,
        habit("asks_before_each_batch"),
        shows_in="push-patient",
    )


def _handing_back() -> Iterator[Mutant]:
    at_once = {"target": "FAILED", "effects": ("cancel_legs", "report_failed")}
    yield Mutant(
        "R5 reader",
        "D hands back what its own reads still write",
        PULL,
        rows("decode_blockwise", DB14=at_once, DB17=at_once, DB18=at_once, DB19=at_once),
    )
    failed = {"target": "FAILED", "effects": ("report_failed",)}
    yield Mutant(
        "R5 owner",
        "D hands back what a writer may still write",
        PUSH,
        rows("decode_layerwise", DL23=failed, DL27=failed, DL29=failed, DL31=failed),
    )
    yield Mutant(
        "R5 one",
        "D waits for one of its writers only",
        PUSH,
        bound(DecodeLayerwise, "any_lent", guard(misdeeds.first_lent)),
    )
    over = {"target": "FAILED", "effects": ("cancel_legs", "finish_if_noted")}
    yield Mutant(
        "R5 writer",
        "P hands back what its own writes still read",
        PUSH,
        rows("prefill_layerwise", PL15=over, PL20=over, PL21=over, PL22=over),
    )


def _preemption() -> Iterator[Mutant]:
    yield Mutant(
        "R5 twice",
        "preempted blocks are pushed again, and DONE said, before the end of the batch in flight",
        PUSH,
        habit("one_batch_at_a_time"),
        shows_in="push-preempted",
    )
    yield Mutant(
        "R5 garbage",
        "what was preempted in flight counts as sent",
        PUSH,
        habit("pushes_preempted_again"),
        shows_in="push-preempted",
    )


def _staging() -> Iterator[Mutant]:
    yield Mutant(
        "R5 scatter", "a push is over before the owner has scattered it", PUSH, habit("waits_for_scatter")
    )
    yield Mutant(
        "R5 lease",
        "a lease that is over counts as such while a part is at work",
        BOTH,
        values((OwnerLeg, "live", property(misdeeds.lends))),
    )
    yield Mutant(
        "R5 slot",
        "a slot is free while a part is at work",
        BOTH,
        bound(OwnerLeg, "free_slot", effect(misdeeds.free_at_once)),
    )
    yield Mutant(
        "R8 part",
        "a STAGED is taken for whatever part is waited for",
        BOTH,
        bound(MoverLeg, "part_outstanding", guard(misdeeds.any_part)),
    )


def _field() -> Iterator[Mutant]:
    yield Mutant(
        "field port",
        "the readers of the engine's first rank are expected at every rank",
        BOTH,
        method(OwnerTransfer, "expected", misdeeds.expected_of_first),
        shows_in="pull-2x2",
    )
    yield Mutant(
        "field first",
        "a P rank is freed at the first DONE",
        PULL,
        bound(PrefillBlockwise, "all_over", guard(misdeeds.any_over)),
        shows_in="pull-1x2",
    )
    yield Mutant(
        "field swapped",
        "source and target of a copy are swapped",
        BOTH,
        values((runs, "copies", misdeeds.swapped)),
    )
    yield Mutant(
        "field offset",
        "the offset inside the block is left out",
        BOTH,
        values((runs, "_first_byte", misdeeds.no_offset)),
        shows_in="pull-1x2",
    )
    yield Mutant("field refused", "a failed metadata query's result is used", BOTH, refused_used())
