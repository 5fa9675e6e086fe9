"""What the core does wrong where a rule is given up: stand-ins for its methods, guards and effects."""

from typing import Any

import numpy as np
from dfirst.protocol import copies as runs
from dfirst.protocol import lease
from dfirst.protocol.commands import LegKey
from dfirst.protocol.effects import Reply, StartCopies
from dfirst.protocol.lease import mover_end
from dfirst.protocol.messages import Done, Query, Renew, Renewed, Sender, Stopped, TransferKey, Wait
from dfirst.protocol.modes import BLOCKWISE
from dfirst.protocol.mover_leg import MoverLeg
from dfirst.protocol.owner_leg import OwnerLeg
from dfirst.protocol.owner_transfer import OwnerTransfer, Question
from dfirst.protocol.prefill_blockwise import PrefillBlockwise
from dfirst.protocol.rank import RankCore
from dfirst.protocol.renewals import PeerRenewal
from msgspec.structs import replace


def always(_self: object, _payload: object) -> bool:
    return True


def never(_self: object, _payload: object) -> bool:
    return False


def extend_now(self: MoverLeg, _asked_at: float, lease_seconds: float) -> None:
    end = mover_end(self.core.timing, self.core.now, lease_seconds)
    self.lease_until = max(self.lease_until, end)
    self.core.arm(self, "lease_end", self.lease_until)


def extend_back(self: MoverLeg, asked_at: float, lease_seconds: float) -> None:
    self.lease_until = mover_end(self.core.timing, asked_at, lease_seconds)
    self.core.arm(self, "lease_end", self.lease_until)


def take_latest(self: MoverLeg, answer: Any) -> None:
    self.disarm("query_retry", "silence")
    self.lent, self.grant = True, answer.grant
    self._extend(max(self.asked.values()), answer.lease_seconds)


def take_any(self: MoverLeg, answer: Any) -> None:
    self.disarm("query_retry", "silence", "done_retry", "farewell_end")
    self.lent, self.grant = True, getattr(answer, "grant", 0)
    lease_seconds = getattr(answer, "lease_seconds", self.core.timing.lease_seconds)
    self._extend(self.asked.get(answer.sequence, self.core.now), lease_seconds)


def start_without_blocks(self: MoverLeg, answer: Any) -> None:
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


def ask_and_start(self: MoverLeg, _payload: object) -> None:
    """Ask, and copy at once, as if the router's block ids had been lent."""
    _send_query(self, None)
    self.lent = True
    self._extend(self.core.now, self.core.timing.lease_seconds)
    start_without_blocks(self, None)


_send_query = MoverLeg.send_query


def extend_once(self: OwnerLeg, question: Query | None) -> None:
    before = self.timers.get("lease_end")
    _extend_owner(self, question)
    if before is not None:
        self.lent_until = before
        self.core.arm(self, "lease_end", before)


_extend_owner = OwnerLeg.extend


def take_renewal_latest(self: PeerRenewal, answer: Renewed) -> None:
    if answer.sequence in self.outstanding:
        latest = max(asked.at for asked in self.outstanding.values())
        self.outstanding[answer.sequence] = replace(self.outstanding[answer.sequence], at=latest)
    _take_renewal(self, answer)


def take_renewal_whole(self: PeerRenewal, answer: Renewed) -> None:
    _take_renewal(self, replace(answer, extended=[*answer.extended, *answer.gone], gone=[]))


def renew_all_or_none(
    self: RankCore, message: Renew, extended: list[TransferKey], gone: list[TransferKey], route: bytes
) -> None:
    if gone:
        extended, gone = [], [*extended, *gone]
    _answer_renew(self, message, extended, gone, route)


def renew_all(self: RankCore, message: Renew, route: bytes) -> None:
    self._answer_renew(message, list(message.keys), [], route)


def lends(self: OwnerLeg) -> bool:
    return self.state == "LENT"


def free_at_once(self: OwnerLeg, _payload: object) -> None:
    if self.slot is not None:
        self.core.slots.give_back(self.slot)
    self.slot = self.parts = None


def any_part(self: MoverLeg, answer: Any) -> bool:
    return answer.place in self.parts


def no_margin(_timing: Any, _lease_seconds: float) -> float:
    return 0.0


def step_margin(timing: Any, _lease_seconds: float) -> float:
    return float(timing.clock_step_seconds)


def drift_margin(timing: Any, lease_seconds: float) -> float:
    return _margin(timing, lease_seconds) - float(timing.clock_step_seconds)


def lease_margin(timing: Any, lease_seconds: float) -> float:
    return float(timing.clock_drift_ratio * lease_seconds + timing.clock_step_seconds)


def runs_at_end(self: RankCore, leg: LegKey, now: float) -> bool:
    transfer = self.movers.get(leg.key)
    found = transfer.legs.get(leg) if transfer else None
    return found is not None and found.state == "COPYING" and now <= found.lease_until


def ended_at_end(self: MoverLeg, _ended: object) -> bool:
    return self.transfer.mode != BLOCKWISE or self.core.now <= self.lease_until


def early_end(timing: Any, answered_at: float, tail_seconds: float) -> float:
    return float(answered_at + (timing.lease_seconds + tail_seconds) / 2)


def lease_only(timing: Any, answered_at: float, _tail_seconds: float) -> float:
    return float(answered_at + timing.lease_seconds)


def say_nothing(_self: RankCore, _message: Any, _route: bytes) -> None:
    return


def hear_as_own(self: RankCore, message: Any, route: bytes) -> None:
    if isinstance(message, Renew):
        self._hear_renew(message, route)
    else:
        self._hear_mover(message, route)


def let_stranger_wait(self: RankCore, message: Any, route: bytes) -> None:
    if isinstance(message, Query):
        answer = Wait(sender=self._as(message.target_incarnation), key=message.key, sequence=message.sequence)
        self.emit(Reply(route, answer))
    else:
        _hear_stranger(self, message, route)


_hear_stranger = RankCore._hear_stranger
_answer_renew = RankCore._answer_renew
_take_renewal = PeerRenewal.take
_margin = lease.mover_margin_seconds
_lease_for = OwnerTransfer.lease_for
_hear = RankCore._hear


def lease_for_newest(self: OwnerTransfer, mover: Sender, route: bytes) -> OwnerLeg | None:
    for other in list(self.leases):
        if other.rank == mover.rank and other != mover:
            held = self.leases[other]
            word = Stopped(
                sender=other,
                key=self.key,
                sequence=held.number,
                target_incarnation=self.core.sender.incarnation,
                mode=self.mode,
                layout_digest=self.layout_digest,
                cached_tokens=self.cached_tokens,
                reason="",
            )
            held.fire("stopped", word)
    return _lease_for(self, mover, route)


def lease_unless_older(self: OwnerTransfer, mover: Sender, route: bytes) -> OwnerLeg | None:
    seen = list(self.leases)
    if mover in seen and any(other.rank == mover.rank for other in seen[seen.index(mover) + 1 :]):
        return None
    return _lease_for(self, mover, route)


def hear_and_end(self: RankCore, message: Any, route: bytes) -> None:
    sender = getattr(message, "sender", None)
    if sender is not None and sender.engine_id != self.sender.engine_id:
        for owner in self.owners.values():
            for mover, held in owner.leases.items():
                if (mover.engine_id, mover.rank) == (sender.engine_id, sender.rank) and mover != sender:
                    held.fire("lease_end")
    _hear(self, message, route)


def hear_any_attempt(self: RankCore, message: Any, route: bytes) -> None:
    if hasattr(message, "key"):
        message = replace(message, key=TransferKey(message.key.transfer_id, 0))
    _hear(self, message, route)


def hear_any_transfer(self: RankCore, message: Any, route: bytes) -> None:
    if hasattr(message, "key"):
        message = replace(message, key=TransferKey("t0", message.key.attempt))
    _hear(self, message, route)


def lease_for_engine(self: OwnerTransfer, mover: Sender, route: bytes) -> OwnerLeg | None:
    found = next((each for other, each in self.leases.items() if other.engine_id == mover.engine_id), None)
    return found or _lease_for(self, mover, route)


def lease_for_rank(self: OwnerTransfer, mover: Sender, route: bytes) -> OwnerLeg | None:
    found = next((each for other, each in self.leases.items() if other.rank == mover.rank), None)
    return found or _lease_for(self, mover, route)


_acknowledge = OwnerLeg.acknowledge


def acknowledge_all(self: OwnerLeg, word: Done | Stopped) -> None:
    _acknowledge(self, word)
    for other in self.transfer.leases.values():  # type: ignore[attr-defined]
        if other is not self and other.state == "LENT" and isinstance(word, Done):
            other.fire("done", replace(word, grant=other.grant))


def answer_oldest(self: OwnerTransfer, _payload: object) -> None:
    """The lease counts from the time of the question: nothing tells the mover that it has been answered."""
    parked, self.parked = self.parked, {}
    for mover, query in parked.items():
        self.core.post(self, "query", Question(replace(query, sequence=0), self.leases[mover]))


def park_oldest(self: OwnerTransfer, question: Question) -> None:
    self.parked.setdefault(question.lease.mover, question.query)


def ask_much_later(self: MoverLeg, _payload: object) -> None:
    self.arm("query_retry", 2 * self.core.timing.lease_seconds)


def first_lent(self: OwnerTransfer, _payload: object) -> bool:
    return next(iter(self.leases.values())).live if self.leases else False


def expected_of_first(self: OwnerTransfer) -> frozenset[int] | None:
    if not self.core.peers.known(self.layout_digest):
        return None
    plan = self.core.peers.plan(self.layout_digest, self.own_side)
    return self._expected(plan.request(self.key.transfer_id, self.prompt_tokens, self.cached_tokens), 0)


def any_over(self: PrefillBlockwise, _payload: object) -> bool:
    return any(held.state in ("DONE", "STOPPED", "EXPIRED") for held in self.leases.values())


_copies_of = runs.copies
_first_byte = runs._first_byte


def swapped(*arguments: Any, **named: Any) -> runs.Copies:
    made = _copies_of(*arguments, **named)
    return runs.Copies(np.array(made.target_addresses), np.array(made.source_addresses), made.lengths)


def no_offset(_leg: Any, _shard: Any, region: Any) -> int:
    return int(region.base_address)
