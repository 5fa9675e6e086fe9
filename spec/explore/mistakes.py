"""Each of the rules R1 to R9 given up in turn, in the ways that their text excludes, and the mistakes that
were made in the field (section 5 of the design).
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import numpy as np
from dfirst.protocol import copies as runs
from dfirst.protocol import lease, mover_leg, owner_leg
from dfirst.protocol.binding import effect, guard
from dfirst.protocol.commands import LegKey
from dfirst.protocol.effects import StartCopies
from dfirst.protocol.lease import mover_end
from dfirst.protocol.messages import Query, Renew, Sender, TransferKey
from dfirst.protocol.mover_leg import MoverLeg
from dfirst.protocol.owner_leg import OwnerLeg
from dfirst.protocol.owner_transfer import OwnerTransfer, Question
from dfirst.protocol.prefill_blockwise import PrefillBlockwise
from dfirst.protocol.rank import RankCore
from dfirst.protocol.specification import TransitionSpec, load_machine
from msgspec.structs import replace

from .alterations import BOTH, CLASSES, Change, Mutant, machine, patched
from .memory import Habits

PULL, PUSH = ("pull",), ("push",)
Method = Callable[..., Any]


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
        _method(MoverLeg, "_extend", _extend_now),
    )
    yield Mutant(
        "R1 latest",
        "the mover counts from its latest question",
        BOTH,
        _bound(MoverLeg, "take_lease", effect(_take_latest)),
    )
    yield Mutant(
        "R1 back",
        "a late answer moves the mover's end back",
        BOTH,
        _method(MoverLeg, "_extend", _extend_back),
    )
    yield Mutant(
        "R1 once",
        "only the first answer starts the owner's count",
        BOTH,
        _bound(OwnerLeg, "extend", effect(_extend_once)),
    )
    yield Mutant(
        "R1 all",
        "a renewal is granted without looking at the transfers",
        BOTH,
        _method(RankCore, "_hear_renew", _renew_all),
    )
    yield Mutant("R1 revive", "a late answer revives what was reported as failed", BOTH, _revived())
    yield Mutant("R2 none", "no margin", BOTH, _values((lease, "mover_margin_seconds", _no_margin)))
    yield Mutant(
        "R2 step",
        "a margin of one clock step, none for drift",
        BOTH,
        _values((lease, "mover_margin_seconds", _step_margin)),
    )
    yield Mutant(
        "R2 early", "the owner acts before its end", BOTH, _values((owner_leg, "owner_end", _early_end))
    )
    yield Mutant("R2 late", "the mover acts after its end", BOTH, _late_mover())
    yield Mutant(
        "R2 suspended",
        "a clock stands still while its machine is suspended",
        BOTH,
        _habit("counts_suspension"),
    )
    yield Mutant(
        "R3 lease",
        "an owner of pushed blocks waits for the lease alone",
        PUSH,
        _values((owner_leg, "owner_end", _lease_only)),
    )
    yield Mutant(
        "R3 stall",
        "it does not wait for the stall allowance",
        PUSH,
        _tail(lambda timing: timing.copy_timeout_seconds),
    )
    yield Mutant(
        "R3 copy",
        "it does not wait for the copy time-out",
        PUSH,
        _tail(lambda timing: timing.stall_allowance_seconds),
    )


def _copies() -> Iterator[Mutant]:
    yield Mutant(
        "R4 early",
        "a failure is reported while the batch still moves",
        BOTH,
        _habit("waits_for_failed_batches"),
    )
    yield Mutant(
        "R4 done",
        "a failed batch counts as copied",
        BOTH,
        _rows("mover_leg", ML13={"effects": ("say_done", "tell_transfer")}),
    )
    quiet = {"target": "DONE_UNACKED", "effects": ("fail_leg", "say_stopped", "tell_transfer")}
    yield Mutant(
        "R4 stopped",
        "STOPPED is said with copies in flight",
        BOTH,
        _rows("mover_leg", ML15=quiet, ML16=quiet, ML17=quiet),
    )
    yield Mutant(
        "R4 unasked", "a batch is begun without asking for the lease", BOTH, _habit("asks_before_each_batch")
    )


def _handing_back() -> Iterator[Mutant]:
    at_once = {"target": "FAILED", "effects": ("cancel_legs", "report_failed")}
    yield Mutant(
        "R5 reader",
        "D hands back what its own reads still write",
        PULL,
        _rows("decode_blockwise", DB14=at_once, DB17=at_once, DB18=at_once, DB19=at_once),
    )
    failed = {"target": "FAILED", "effects": ("report_failed",)}
    yield Mutant(
        "R5 owner",
        "D hands back what a writer may still write",
        PUSH,
        _rows("decode_layerwise", DL23=failed, DL27=failed, DL29=failed, DL31=failed),
    )
    over = {"target": "FAILED", "effects": ("cancel_legs", "finish_if_noted")}
    yield Mutant(
        "R5 writer",
        "P hands back what its own writes still read",
        PUSH,
        _rows("prefill_layerwise", PL15=over, PL20=over, PL21=over, PL22=over),
    )
    yield Mutant(
        "R5 twice",
        "preempted blocks are pushed again under the batch in flight",
        PUSH,
        _habit("one_batch_at_a_time"),
    )
    yield Mutant(
        "R5 garbage", "what was preempted in flight counts as sent", PUSH, _habit("pushes_preempted_again")
    )


def _restarts() -> Iterator[Mutant]:
    yield Mutant(
        "R6 port", "a restarted process is reached by the old one's copies", BOTH, _habit("fresh_ports")
    )
    yield Mutant(
        "R6 silent",
        "a restarted rank does not say GONE",
        BOTH,
        _method(RankCore, "_hear_stranger", _say_nothing),
    )
    yield Mutant(
        "R7 itself",
        "a message for another incarnation is taken",
        BOTH,
        _method(RankCore, "_hear_stranger", _hear_as_own),
    )
    yield Mutant(
        "R7 ends",
        "a new incarnation's message ends the old one's lease",
        BOTH,
        _method(OwnerTransfer, "lease_for", _lease_for_newest),
    )
    yield Mutant(
        "R7 gone",
        "a lease ends when its process is known to be gone",
        BOTH,
        _method(RankCore, "_hear", _hear_and_end),
    )


def _belonging() -> Iterator[Mutant]:
    yield Mutant(
        "R8 attempt", "attempts are not told apart", BOTH, _method(RankCore, "_hear", _hear_any_attempt)
    )
    yield Mutant(
        "R8 rank",
        "movers' ranks are not told apart",
        BOTH,
        _method(OwnerTransfer, "lease_for", _lease_for_engine),
    )
    yield Mutant(
        "R8 incarnation",
        "movers' incarnations are not told apart",
        BOTH,
        _method(OwnerTransfer, "lease_for", _lease_for_rank),
    )
    yield Mutant(
        "R8 others",
        "a DONE ends other leases too",
        BOTH,
        _bound(OwnerLeg, "acknowledge", effect(_acknowledge_all)),
    )
    yield Mutant("R8 any", "METADATA is taken for any number", BOTH, _any_number())
    yield Mutant(
        "R8 cancel-pull",
        "CANCEL takes the blocks from under a reader",
        PULL,
        _rows("prefill_blockwise", PB23={"target": "DONE_SENDING", "effects": ("report_sent",)}),
    )
    yield Mutant(
        "R8 lends-pull",
        "a cancelled owner still lends",
        PULL,
        _rows("prefill_blockwise", PB28={"effects": ("lend",)}),
    )
    yield Mutant(
        "R8 lends-push",
        "a cancelled owner still lends",
        PUSH,
        _rows("decode_layerwise", DL34={"effects": ("lend",)}),
    )
    yield Mutant(
        "R8 released-pull",
        "a question after the release is granted",
        PULL,
        _rows("prefill_blockwise", PB30={"effects": ("lend",)}, PB31={"effects": ("lend",)}),
    )
    yield Mutant(
        "R8 released-push",
        "a question after the release is granted",
        PUSH,
        _rows(
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
        _rows("prefill_blockwise", PB4={"target": "=", "effects": ()}, PB7={"target": "=", "effects": ()}),
    )
    yield Mutant(
        "R8 forgets-push",
        "a CANCEL before the blocks is forgotten",
        PUSH,
        _rows("decode_layerwise", DL4={"target": "=", "effects": ()}, DL7={"target": "=", "effects": ()}),
    )
    yield Mutant(
        "R8 first",
        "blocks are released while a lease is live",
        BOTH,
        _bound(OwnerTransfer, "any_lent", guard(_never)),
    )


def _waiting() -> Iterator[Mutant]:
    yield Mutant(
        "R9 parked",
        "a lease runs while the question is parked",
        BOTH,
        _bound(OwnerTransfer, "answer_parked", effect(_answer_oldest)),
    )
    gone = {"target": "FREED", "effects": ("answer_gone",)}
    yield Mutant(
        "R9 unknown-pull", "an unknown id is answered GONE", PULL, _rows("prefill_blockwise", PB2=gone)
    )
    yield Mutant(
        "R9 unknown-push", "an unknown id is answered GONE", PUSH, _rows("decode_layerwise", DL2=gone)
    )
    unrecorded = {"target": "=", "effects": ("acknowledge",)}
    yield Mutant(
        "R9 unrecorded", "a DONE is acknowledged and not recorded", BOTH, _rows("owner_leg", OL6=unrecorded)
    )


def _field() -> Iterator[Mutant]:
    yield Mutant(
        "field port",
        "the readers of the engine's first rank are expected at every rank",
        BOTH,
        _method(OwnerTransfer, "expected", _expected_of_first),
    )
    yield Mutant(
        "field first",
        "a P rank is freed at the first DONE",
        PULL,
        _bound(PrefillBlockwise, "all_over", guard(_any_over)),
    )
    yield Mutant(
        "field swapped", "source and target of a copy are swapped", BOTH, _values((runs, "copies", _swapped))
    )
    yield Mutant(
        "field offset",
        "the offset inside the block is left out",
        BOTH,
        _values((runs, "_first_byte", _no_offset)),
    )
    yield Mutant("field refused", "a failed metadata query's result is used", BOTH, _refused_used())


# How they are made


def _method(owner: type, name: str, method: Method) -> Change:
    return _values((owner, name, method))


def _values(*values: tuple[Any, str, Any]) -> Change:
    @contextmanager
    def change(_habits: Habits) -> Iterator[None]:
        with ExitStack() as stack:
            for owner, name, value in values:
                stack.enter_context(patched(owner, name, value))
            yield

    return change


def _bound(owner: type, name: str, method: Method) -> Change:
    """A guard or an effect: every machine of the class and its heirs is bound anew."""

    @contextmanager
    def change(_habits: Habits) -> Iterator[None]:
        with patched(owner, name, method), ExitStack() as stack:
            for spec_name, model in CLASSES.items():
                if issubclass(model, owner):
                    stack.enter_context(machine(spec_name, load_machine(spec_name)))
            yield

    return change


def _rows(name: str, **changes: dict[str, Any]) -> Change:
    def changed(row: TransitionSpec) -> TransitionSpec:
        return replace(row, **changes[row.id]) if row.id in changes else row

    @contextmanager
    def change(_habits: Habits) -> Iterator[None]:
        spec = load_machine(name)
        with machine(name, replace(spec, transitions=tuple(map(changed, spec.transitions)))):
            yield

    return change


def _with_rows(name: str, *rows: TransitionSpec) -> AbstractContextManager[None]:
    spec = load_machine(name)
    kept = tuple(row for row in spec.transitions if row.id not in {new.id for new in rows})
    return machine(name, replace(spec, transitions=(*rows, *kept)))


def _habit(name: str) -> Change:
    @contextmanager
    def change(habits: Habits) -> Iterator[None]:
        setattr(habits, name, False)
        yield

    return change


def _tail(tail: Callable[[Any], float]) -> Change:
    return _values((owner_leg, "write_tail_seconds", tail), (mover_leg, "write_tail_seconds", tail))


def _revived() -> Change:
    @contextmanager
    def change(_habits: Habits) -> Iterator[None]:
        row = TransitionSpec(
            id="ML-revive",
            source="DONE_UNACKED",
            event="metadata",
            target="COPYING",
            reason="",
            effects=("take_lease", "start_copies", "tell_transfer"),
        )
        with patched(MoverLeg, "take_lease", effect(_take_any)), _with_rows("mover_leg", row):
            yield

    return change


def _any_number() -> Change:
    @contextmanager
    def change(_habits: Habits) -> Iterator[None]:
        with (
            patched(MoverLeg, "outstanding", guard(_always)),
            patched(MoverLeg, "grant_still_runs", guard(_always)),
            patched(MoverLeg, "take_lease", effect(_take_any)),
            machine("mover_leg", load_machine("mover_leg")),
        ):
            yield

    return change


def _refused_used() -> Change:
    @contextmanager
    def change(_habits: Habits) -> Iterator[None]:
        spec = load_machine("mover_leg")
        refused = next(row for row in spec.transitions if row.id == "ML8")
        effects = ("take_lease", "start_copies", "tell_transfer")
        with (
            patched(MoverLeg, "take_lease", effect(_take_any)),
            patched(MoverLeg, "start_copies", effect(_start_without_blocks)),
            _with_rows("mover_leg", replace(refused, target="COPYING", effects=effects)),
        ):
            yield

    return change


def _late_mover() -> Change:
    def runs_late(self: RankCore, leg: LegKey, now: float) -> bool:
        transfer = self.movers.get(leg.key)
        found = transfer.legs.get(leg) if transfer else None
        return found is not None and found.state in ("COPYING", "DRAINING")

    def in_time(_self: MoverLeg, _ended: object) -> bool:
        return True

    @contextmanager
    def change(_habits: Habits) -> Iterator[None]:
        with (
            patched(RankCore, "lease_runs", runs_late),
            patched(MoverLeg, "ended_in_time", guard(in_time)),
            machine("mover_leg", load_machine("mover_leg")),
        ):
            yield

    return change


# What they do


def _always(_self: object, _payload: object) -> bool:
    return True


def _never(_self: object, _payload: object) -> bool:
    return False


def _extend_now(self: MoverLeg, _asked_at: float, lease_seconds: float) -> None:
    end = mover_end(self.core.timing, self.core.now, lease_seconds)
    self.lease_until = max(self.lease_until, end)
    self.core.arm(self, "lease_end", self.lease_until)


def _extend_back(self: MoverLeg, asked_at: float, lease_seconds: float) -> None:
    self.lease_until = mover_end(self.core.timing, asked_at, lease_seconds)
    self.core.arm(self, "lease_end", self.lease_until)


def _take_latest(self: MoverLeg, answer: Any) -> None:
    self.disarm("query_retry", "silence")
    self.lent = True
    self._extend(max(self.asked.values()), answer.lease_seconds)


def _take_any(self: MoverLeg, answer: Any) -> None:
    self.disarm("query_retry", "silence", "done_retry", "farewell_end")
    self.lent = True
    lease_seconds = getattr(answer, "lease_seconds", self.core.timing.lease_seconds)
    self._extend(self.asked.get(answer.sequence, self.core.now), lease_seconds)


def _start_without_blocks(self: MoverLeg, answer: Any) -> None:
    self.core.emit(
        StartCopies(
            leg=self.leg_key,
            mode=self.transfer.mode,
            plan=self.plan,  # type: ignore[arg-type]
            peer=self.entry,  # type: ignore[arg-type]
            local_blocks=self.transfer.local_blocks,
            remote_blocks=tuple(getattr(answer, "block_ids", ())),
            prompt_tokens=self.transfer.prompt_tokens,
            cached_tokens=self.transfer.cached_tokens,
        )
    )


def _extend_once(self: OwnerLeg, _question: Query | None) -> None:
    if self.state != "LENT" or not self.timers:
        self.lent_until = lease.owner_end(self.core.timing, self.core.now, self.tail_seconds)
        self.core.arm(self, "lease_end", self.lent_until)


def _renew_all(self: RankCore, message: Renew, route: bytes) -> None:
    self._answer_renew(message, list(message.keys), [], route)


def _no_margin(_timing: Any, _lease_seconds: float) -> float:
    return 0.0


def _step_margin(timing: Any, _lease_seconds: float) -> float:
    return float(timing.clock_step_seconds)


def _early_end(timing: Any, answered_at: float, tail_seconds: float) -> float:
    return float(answered_at + (timing.lease_seconds + tail_seconds) / 2)


def _lease_only(timing: Any, answered_at: float, _tail_seconds: float) -> float:
    return float(answered_at + timing.lease_seconds)


def _say_nothing(_self: RankCore, _message: Any, _route: bytes) -> None:
    return


def _hear_as_own(self: RankCore, message: Any, route: bytes) -> None:
    if isinstance(message, Renew):
        self._hear_renew(message, route)
    else:
        self._hear_mover(message, route)


_lease_for = OwnerTransfer.lease_for
_hear = RankCore._hear


def _lease_for_newest(self: OwnerTransfer, mover: Sender, route: bytes) -> OwnerLeg | None:
    for other in list(self.leases):
        if other.rank == mover.rank and other != mover:
            self.leases[other].fire("stopped")
    return _lease_for(self, mover, route)


def _hear_and_end(self: RankCore, message: Any, route: bytes) -> None:
    sender = getattr(message, "sender", None)
    if sender is not None and sender.engine_id != self.sender.engine_id:
        for owner in self.owners.values():
            for mover, held in owner.leases.items():
                if (mover.engine_id, mover.rank) == (sender.engine_id, sender.rank) and mover != sender:
                    held.fire("lease_end")
    _hear(self, message, route)


def _hear_any_attempt(self: RankCore, message: Any, route: bytes) -> None:
    if hasattr(message, "key"):
        message = replace(message, key=TransferKey(message.key.transfer_id, 0))
    _hear(self, message, route)


def _lease_for_engine(self: OwnerTransfer, mover: Sender, route: bytes) -> OwnerLeg | None:
    found = next((each for other, each in self.leases.items() if other.engine_id == mover.engine_id), None)
    return found or _lease_for(self, mover, route)


def _lease_for_rank(self: OwnerTransfer, mover: Sender, route: bytes) -> OwnerLeg | None:
    found = next((each for other, each in self.leases.items() if other.rank == mover.rank), None)
    return found or _lease_for(self, mover, route)


_acknowledge = OwnerLeg.acknowledge


def _acknowledge_all(self: OwnerLeg, payload: object) -> None:
    _acknowledge(self, payload)
    for other in self.transfer.leases.values():  # type: ignore[attr-defined]
        if other is not self and other.state == "LENT" and self.state == "DONE":
            other.fire("done")


def _answer_oldest(self: OwnerTransfer, _payload: object) -> None:
    """The lease counts from the time of the question: nothing tells the mover that it has been answered."""
    parked, self.parked = self.parked, {}
    for mover, query in parked.items():
        self.core.post(self, "query", Question(replace(query, sequence=0), self.leases[mover]))


def _expected_of_first(self: OwnerTransfer) -> frozenset[int] | None:
    if not self.core.peers.known(self.layout_digest):
        return None
    plan = self.core.peers.plan(self.layout_digest, self.own_side)
    return self._expected(plan.request(self.key.transfer_id, self.prompt_tokens, self.cached_tokens), 0)


def _any_over(self: PrefillBlockwise, _payload: object) -> bool:
    return any(held.state in ("DONE", "STOPPED", "EXPIRED") for held in self.leases.values())


_copies_of = runs.copies
_first_byte = runs._first_byte


def _swapped(*arguments: Any, **named: Any) -> runs.Copies:
    made = _copies_of(*arguments, **named)
    return runs.Copies(np.array(made.target_addresses), np.array(made.source_addresses), made.lengths)


def _no_offset(_leg: Any, _shard: Any, region: Any) -> int:
    return int(region.base_address)
