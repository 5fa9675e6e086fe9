"""Rules R6 to R10 given up: whose word counts for what, and what is answered."""

from collections.abc import Iterator

from dfirst.protocol.binding import effect, guard
from dfirst.protocol.mover_leg import MoverLeg
from dfirst.protocol.owner_leg import OwnerLeg
from dfirst.protocol.owner_transfer import OwnerTransfer
from dfirst.protocol.rank import RankCore

from . import misdeeds
from .alterations import BOTH, PULL, PUSH, Mutant
from .making import added, any_number, bound, habit, hinted, method, rows

LENDS = {"effects": ("lend",)}
WAITS = {"effects": ("answer_wait",)}


def mistakes() -> Iterator[Mutant]:
    """Yield them all."""
    yield from _restarts()
    yield from _incarnations()
    yield from _keys()
    yield from _cancelling()
    yield from _released()
    yield from _waiting()
    yield from _hints()


def _restarts() -> Iterator[Mutant]:
    yield Mutant(
        "R6 port", "a restarted process is reached by the old one's copies", BOTH, habit("fresh_ports")
    )
    yield Mutant(
        "R6 silent",
        "a restarted rank does not say GONE",
        BOTH,
        method(RankCore, "_hear_stranger", misdeeds.say_nothing),
    )


def _incarnations() -> Iterator[Mutant]:
    yield Mutant(
        "R7 itself",
        "a message for another incarnation is taken",
        BOTH,
        method(RankCore, "_hear_stranger", misdeeds.hear_as_own),
    )
    yield Mutant(
        "R7 ends",
        "a new incarnation's message ends the old one's lease",
        BOTH,
        method(OwnerTransfer, "lease_for", misdeeds.lease_for_newest),
        shows_in="push-retried",
    )
    yield Mutant(
        "R7 order",
        "an old incarnation's word is not heard after a new one's",
        BOTH,
        method(OwnerTransfer, "lease_for", misdeeds.lease_unless_older),
    )
    yield Mutant(
        "R7 gone",
        "a lease ends when its process is known to be gone",
        BOTH,
        method(RankCore, "_hear", misdeeds.hear_and_end),
        shows_in="push-retried",
    )


def _keys() -> Iterator[Mutant]:
    yield Mutant(
        "R8 transfer",
        "transfers are not told apart",
        BOTH,
        method(RankCore, "_hear", misdeeds.hear_any_transfer),
    )
    yield Mutant(
        "R8 attempt",
        "attempts are not told apart",
        BOTH,
        method(RankCore, "_hear", misdeeds.hear_any_attempt),
    )
    yield Mutant(
        "R8 rank",
        "movers' ranks are not told apart",
        BOTH,
        method(OwnerTransfer, "lease_for", misdeeds.lease_for_engine),
    )
    yield Mutant(
        "R8 incarnation",
        "movers' incarnations are not told apart",
        BOTH,
        method(OwnerTransfer, "lease_for", misdeeds.lease_for_rank),
        shows_in="push-retried",
    )
    yield Mutant(
        "R8 others",
        "a DONE ends other leases too",
        BOTH,
        bound(OwnerLeg, "acknowledge", effect(misdeeds.acknowledge_all)),
    )
    yield Mutant("R8 any", "METADATA is taken for any number", BOTH, any_number())


def _cancelling() -> Iterator[Mutant]:
    yield Mutant(
        "R8 cancel-pull",
        "CANCEL takes the blocks from under a reader",
        PULL,
        rows("prefill_blockwise", PB23={"target": "DONE_SENDING", "effects": ("report_sent",)}),
    )
    yield Mutant(
        "R8 lends-pull", "a cancelled owner still lends", PULL, rows("prefill_blockwise", PB28=LENDS)
    )
    yield Mutant("R8 lends-push", "a cancelled owner still lends", PUSH, rows("decode_layerwise", DL34=LENDS))
    yield Mutant(
        "R8 renews-pull",
        "a cancelled owner still renews",
        PULL,
        added("prefill_blockwise", "CANCELLING", "renew", "renew_lease"),
    )
    yield Mutant(
        "R8 renews-push",
        "a cancelled owner still renews",
        PUSH,
        added("decode_layerwise", "CANCELLING", "renew", "renew_lease"),
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


def _released() -> Iterator[Mutant]:
    yield Mutant(
        "R8 first",
        "blocks are released while a lease is live",
        BOTH,
        bound(OwnerTransfer, "any_lent", guard(misdeeds.never)),
    )
    yield Mutant(
        "R8 released-pull",
        "a question after the release is granted",
        PULL,
        rows("prefill_blockwise", PB30=LENDS, PB31=LENDS),
    )
    yield Mutant(
        "R8 released-push",
        "a question after the release is granted",
        PUSH,
        rows("decode_layerwise", DL37=LENDS, DL38=LENDS, DL39=LENDS),
    )


def _waiting() -> Iterator[Mutant]:
    yield Mutant(
        "R9 parked",
        "a lease runs while the question is parked",
        BOTH,
        bound(OwnerTransfer, "answer_parked", effect(misdeeds.answer_oldest)),
    )
    yield Mutant(
        "R9 oldest",
        "a mover's oldest question is answered",
        BOTH,
        bound(OwnerTransfer, "park", effect(misdeeds.park_oldest)),
    )
    yield Mutant(
        "R9 half",
        "who heard WAIT asks again after two leases",
        BOTH,
        bound(MoverLeg, "ask_again_later", effect(misdeeds.ask_much_later)),
    )
    gone = {"target": "FREED", "effects": ("answer_gone",)}
    yield Mutant(
        "R9 unknown-pull", "an unknown id is answered GONE", PULL, rows("prefill_blockwise", PB2=gone)
    )
    yield Mutant(
        "R9 unknown-push", "an unknown id is answered GONE", PUSH, rows("decode_layerwise", DL2=gone)
    )
    yield Mutant(
        "R9 ended-pull",
        "an id that has ended is answered WAIT",
        PULL,
        rows("prefill_blockwise", PB30=WAITS, PB31=WAITS),
    )
    yield Mutant(
        "R9 ended-push",
        "an id that has ended is answered WAIT",
        PUSH,
        rows("decode_layerwise", DL37=WAITS, DL38=WAITS, DL39=WAITS),
    )
    yield Mutant(
        "R9 other",
        "a question for another incarnation is answered WAIT",
        BOTH,
        method(RankCore, "_hear_stranger", misdeeds.let_stranger_wait),
    )
    unrecorded = {"target": "=", "effects": ("acknowledge",)}
    yield Mutant(
        "R9 unrecorded", "a DONE is acknowledged and not recorded", BOTH, rows("owner_leg", OL6=unrecorded)
    )


def _hints() -> Iterator[Mutant]:
    yield Mutant("R10 hint", "block ids that a router carried grant a copy", BOTH, hinted())
