"""Each of the rules R1 to R9 given up in turn, in the ways that their text excludes, and the mistakes that
were made in the field.
"""

from collections.abc import Iterator

from dfirst.protocol import copies as runs
from dfirst.protocol import lease, owner_leg
from dfirst.protocol.binding import effect, guard
from dfirst.protocol.mover_leg import MoverLeg
from dfirst.protocol.owner_leg import OwnerLeg
from dfirst.protocol.owner_transfer import OwnerTransfer
from dfirst.protocol.prefill_blockwise import PrefillBlockwise
from dfirst.protocol.rank import RankCore

from .alterations import BOTH, Mutant
from .making import (
    any_number,
    bound,
    counted,
    habit,
    late_mover,
    method,
    refused_used,
    revived,
    rows,
    tail,
    values,
)
from .misdeeds import (
    acknowledge_all,
    answer_oldest,
    any_over,
    any_part,
    early_end,
    expected_of_first,
    extend_back,
    extend_now,
    extend_once,
    free_at_once,
    hear_and_end,
    hear_any_attempt,
    hear_as_own,
    lease_for_engine,
    lease_for_newest,
    lease_for_rank,
    lease_only,
    lends,
    never,
    no_margin,
    no_offset,
    renew_all,
    say_nothing,
    step_margin,
    swapped,
    take_latest,
)

PULL, PUSH = ("pull",), ("push",)


def mistakes() -> Iterator[Mutant]:
    """Yield them all."""
    yield from _leases()
    yield from _copies()
    yield from _handing_back()
    yield from _restarts()
    yield from _belonging()
    yield from _waiting()
    yield from _field()


def _leases() -> Iterator[Mutant]:
    yield Mutant(
        "R1 arrival",
        "the mover counts from the answer's arrival",
        BOTH,
        counted("_extend", extend_now),
    )
    yield Mutant(
        "R1 latest",
        "the mover counts from its latest question",
        BOTH,
        counted("take_lease", effect(take_latest)),
    )
    yield Mutant(
        "R1 back",
        "a late answer moves the mover's end back",
        BOTH,
        method(MoverLeg, "_extend", extend_back),
    )
    yield Mutant(
        "R1 once",
        "only the first answer starts the owner's count",
        BOTH,
        bound(OwnerLeg, "extend", effect(extend_once)),
    )
    yield Mutant(
        "R1 all",
        "a renewal is granted without looking at the transfers",
        BOTH,
        method(RankCore, "_hear_renew", renew_all),
    )
    yield Mutant("R1 revive", "a late answer revives what was reported as failed", BOTH, revived())
    yield Mutant("R2 none", "no margin", BOTH, values((lease, "mover_margin_seconds", no_margin)))
    yield Mutant(
        "R2 step",
        "a margin of one clock step, none for drift",
        BOTH,
        values((lease, "mover_margin_seconds", step_margin)),
    )
    yield Mutant(
        "R2 early", "the owner acts before its end", BOTH, values((owner_leg, "owner_end", early_end))
    )
    yield Mutant("R2 late", "the mover acts after its end", BOTH, late_mover())
    yield Mutant(
        "R2 suspended",
        "a clock stands still while its machine is suspended",
        BOTH,
        habit("counts_suspension"),
    )
    yield Mutant(
        "R3 lease",
        "an owner of pushed blocks waits for the lease alone",
        PUSH,
        values((owner_leg, "owner_end", lease_only)),
    )
    yield Mutant(
        "R3 stall",
        "it does not wait for the stall allowance",
        PUSH,
        tail(lambda timing: timing.copy_timeout_seconds),
    )
    yield Mutant(
        "R3 copy",
        "it does not wait for the copy time-out",
        PUSH,
        tail(lambda timing: timing.stall_allowance_seconds),
    )


def _copies() -> Iterator[Mutant]:
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
        "R4 unasked", "a batch is begun without asking for the lease", BOTH, habit("asks_before_each_batch")
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
    over = {"target": "FAILED", "effects": ("cancel_legs", "finish_if_noted")}
    yield Mutant(
        "R5 writer",
        "P hands back what its own writes still read",
        PUSH,
        rows("prefill_layerwise", PL15=over, PL20=over, PL21=over, PL22=over),
    )
    yield Mutant(
        "R5 twice",
        "preempted blocks are pushed again under the batch in flight",
        PUSH,
        habit("one_batch_at_a_time"),
    )
    yield Mutant(
        "R5 scatter", "a push is over before the owner has scattered it", PUSH, habit("waits_for_scatter")
    )
    yield Mutant(
        "R5 lease",
        "a lease that is over counts as such while a part is at work",
        BOTH,
        values((OwnerLeg, "live", property(lends))),
    )
    yield Mutant(
        "R5 slot",
        "a slot is free while a part is at work",
        BOTH,
        bound(OwnerLeg, "free_slot", effect(free_at_once)),
    )
    yield Mutant(
        "R8 part",
        "a STAGED is taken for whatever part is waited for",
        BOTH,
        bound(MoverLeg, "part_outstanding", guard(any_part)),
    )
    yield Mutant(
        "R5 garbage", "what was preempted in flight counts as sent", PUSH, habit("pushes_preempted_again")
    )


def _restarts() -> Iterator[Mutant]:
    yield Mutant(
        "R6 port", "a restarted process is reached by the old one's copies", BOTH, habit("fresh_ports")
    )
    yield Mutant(
        "R6 silent",
        "a restarted rank does not say GONE",
        BOTH,
        method(RankCore, "_hear_stranger", say_nothing),
    )
    yield Mutant(
        "R7 itself",
        "a message for another incarnation is taken",
        BOTH,
        method(RankCore, "_hear_stranger", hear_as_own),
    )
    yield Mutant(
        "R7 ends",
        "a new incarnation's message ends the old one's lease",
        BOTH,
        method(OwnerTransfer, "lease_for", lease_for_newest),
    )
    yield Mutant(
        "R7 gone",
        "a lease ends when its process is known to be gone",
        BOTH,
        method(RankCore, "_hear", hear_and_end),
    )


def _belonging() -> Iterator[Mutant]:
    yield Mutant(
        "R8 attempt", "attempts are not told apart", BOTH, method(RankCore, "_hear", hear_any_attempt)
    )
    yield Mutant(
        "R8 rank",
        "movers' ranks are not told apart",
        BOTH,
        method(OwnerTransfer, "lease_for", lease_for_engine),
    )
    yield Mutant(
        "R8 incarnation",
        "movers' incarnations are not told apart",
        BOTH,
        method(OwnerTransfer, "lease_for", lease_for_rank),
    )
    yield Mutant(
        "R8 others",
        "a DONE ends other leases too",
        BOTH,
        bound(OwnerLeg, "acknowledge", effect(acknowledge_all)),
    )
    yield Mutant("R8 any", "METADATA is taken for any number", BOTH, any_number())
    yield Mutant(
        "R8 cancel-pull",
        "CANCEL takes the blocks from under a reader",
        PULL,
        rows("prefill_blockwise", PB23={"target": "DONE_SENDING", "effects": ("report_sent",)}),
    )
    yield Mutant(
        "R8 lends-pull",
        "a cancelled owner still lends",
        PULL,
        rows("prefill_blockwise", PB28={"effects": ("lend",)}),
    )
    yield Mutant(
        "R8 lends-push",
        "a cancelled owner still lends",
        PUSH,
        rows("decode_layerwise", DL34={"effects": ("lend",)}),
    )
    yield Mutant(
        "R8 released-pull",
        "a question after the release is granted",
        PULL,
        rows("prefill_blockwise", PB30={"effects": ("lend",)}, PB31={"effects": ("lend",)}),
    )
    yield Mutant(
        "R8 released-push",
        "a question after the release is granted",
        PUSH,
        rows(
            "decode_layerwise",
            DL37={"effects": ("lend",)},
            DL38={"effects": ("lend",)},
            DL39={"effects": ("lend",)},
        ),
    )
    yield Mutant(
        "R8 forgets-pull",
        "a CANCEL before the blocks is forgotten",
        PULL,
        rows("prefill_blockwise", PB4={"target": "=", "effects": ()}, PB7={"target": "=", "effects": ()}),
    )
    yield Mutant(
        "R8 forgets-push",
        "a CANCEL before the blocks is forgotten",
        PUSH,
        rows("decode_layerwise", DL4={"target": "=", "effects": ()}, DL7={"target": "=", "effects": ()}),
    )
    yield Mutant(
        "R8 first",
        "blocks are released while a lease is live",
        BOTH,
        bound(OwnerTransfer, "any_lent", guard(never)),
    )


def _waiting() -> Iterator[Mutant]:
    yield Mutant(
        "R9 parked",
        "a lease runs while the question is parked",
        BOTH,
        bound(OwnerTransfer, "answer_parked", effect(answer_oldest)),
    )
    gone = {"target": "FREED", "effects": ("answer_gone",)}
    yield Mutant(
        "R9 unknown-pull", "an unknown id is answered GONE", PULL, rows("prefill_blockwise", PB2=gone)
    )
    yield Mutant(
        "R9 unknown-push", "an unknown id is answered GONE", PUSH, rows("decode_layerwise", DL2=gone)
    )
    unrecorded = {"target": "=", "effects": ("acknowledge",)}
    yield Mutant(
        "R9 unrecorded", "a DONE is acknowledged and not recorded", BOTH, rows("owner_leg", OL6=unrecorded)
    )


def _field() -> Iterator[Mutant]:
    yield Mutant(
        "field port",
        "the readers of the engine's first rank are expected at every rank",
        BOTH,
        method(OwnerTransfer, "expected", expected_of_first),
    )
    yield Mutant(
        "field first",
        "a P rank is freed at the first DONE",
        PULL,
        bound(PrefillBlockwise, "all_over", guard(any_over)),
    )
    yield Mutant(
        "field swapped", "source and target of a copy are swapped", BOTH, values((runs, "copies", swapped))
    )
    yield Mutant(
        "field offset",
        "the offset inside the block is left out",
        BOTH,
        values((runs, "_first_byte", no_offset)),
    )
    yield Mutant("field refused", "a failed metadata query's result is used", BOTH, refused_used())
