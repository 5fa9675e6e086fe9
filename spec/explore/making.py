"""How a rule is given up: methods, rows and habits are exchanged for a while."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from dfirst.protocol import mover_leg, owner_leg
from dfirst.protocol.binding import effect, guard
from dfirst.protocol.commands import LegKey
from dfirst.protocol.mover_leg import MoverLeg
from dfirst.protocol.rank import RankCore
from dfirst.protocol.specification import SAME_STATE, TransitionSpec, load_machine
from msgspec.structs import replace

from ..models import MODELS
from .alterations import Change, machine, patched, unarmed
from .memory import Habits
from .misdeeds import (
    always,
    ask_and_start,
    ended_at_end,
    runs_at_end,
    start_without_blocks,
    take_any,
)

Method = Callable[..., Any]


def method(owner: type, name: str, method: Method) -> Change:
    return values((owner, name, method))


def values(*values: tuple[Any, str, Any]) -> Change:
    @contextmanager
    def change(_habits: Habits) -> Iterator[None]:
        with ExitStack() as stack:
            for owner, name, value in values:
                stack.enter_context(patched(owner, name, value))
            yield

    return change


def all_of(*changes: Change) -> Change:
    """Several changes, made in this order."""

    @contextmanager
    def change(habits: Habits) -> Iterator[None]:
        with ExitStack() as stack:
            for each in changes:
                stack.enter_context(each(habits))
            yield

    return change


def bound(owner: type, name: str, method: Method) -> Change:
    """A guard or an effect: every machine of the class and its heirs is bound anew."""

    @contextmanager
    def change(_habits: Habits) -> Iterator[None]:
        with patched(owner, name, method), ExitStack() as stack:
            for spec_name, model in MODELS.items():
                if issubclass(model, owner):
                    stack.enter_context(machine(spec_name, load_machine(spec_name)))
            yield

    return change


def rows(name: str, **changes: dict[str, Any]) -> Change:
    def changed(row: TransitionSpec) -> TransitionSpec:
        return replace(row, **changes[row.id]) if row.id in changes else row

    @contextmanager
    def change(_habits: Habits) -> Iterator[None]:
        spec = load_machine(name)
        with machine(name, replace(spec, transitions=tuple(map(changed, spec.transitions)))):
            yield

    return change


def added(name: str, source: str, event: str, *effects: str, target: str = SAME_STATE) -> Change:
    """A row that the machine must not have: it is asked before all others."""

    @contextmanager
    def change(_habits: Habits) -> Iterator[None]:
        spec = load_machine(name)
        row = TransitionSpec(
            id="added", source=source, event=event, target=target, reason="", effects=effects
        )
        with machine(name, replace(spec, transitions=(row, *spec.transitions))):
            yield

    return change


def habit(name: str) -> Change:
    @contextmanager
    def change(habits: Habits) -> Iterator[None]:
        setattr(habits, name, False)
        yield

    return change


def tail(tail: Callable[[Any], float]) -> Change:
    return values((owner_leg, "write_tail_seconds", tail), (mover_leg, "write_tail_seconds", tail))


def revived() -> Change:
    return all_of(
        bound(MoverLeg, "take_lease", effect(take_any)),
        added(
            "mover_leg",
            "DONE_UNACKED",
            "metadata",
            *("take_lease", "start_copies", "tell_transfer"),
            target="COPYING",
        ),
    )


def any_number() -> Change:
    return all_of(
        bound(MoverLeg, "outstanding", guard(always)),
        bound(MoverLeg, "grant_still_runs", guard(always)),
        bound(MoverLeg, "take_lease", effect(take_any)),
    )


def refused_used() -> Change:
    used = {"target": "COPYING", "effects": ("take_lease", "start_copies", "tell_transfer")}
    return all_of(
        bound(MoverLeg, "take_lease", effect(take_any)),
        bound(MoverLeg, "start_copies", effect(start_without_blocks)),
        rows("mover_leg", ML8=used),
    )


def hinted() -> Change:
    """Copies begin with the question, without a grant."""
    copying = {"target": "COPYING", "effects": ("send_query", "tell_transfer")}
    return all_of(bound(MoverLeg, "send_query", effect(ask_and_start)), rows("mover_leg", ML1=copying))


def last_moment() -> Change:
    """The mover still acts at the very end of its lease."""
    return all_of(
        method(RankCore, "lease_runs", runs_at_end),
        bound(MoverLeg, "ended_in_time", guard(ended_at_end)),
    )


def counted(name: str, method: Method) -> Change:
    """The mover counts its lease in another way, also where it asks whether anything is left of it."""
    return all_of(bound(MoverLeg, "grant_still_runs", guard(always)), bound(MoverLeg, name, method))


def late_mover() -> Change:
    def runs_late(self: RankCore, leg: LegKey, now: float) -> bool:
        transfer = self.movers.get(leg.key)
        found = transfer.legs.get(leg) if transfer else None
        return found is not None and found.state in ("COPYING", "DRAINING")

    return all_of(
        method(RankCore, "lease_runs", runs_late),
        unarmed("mover_leg", "lease_end"),
        bound(MoverLeg, "ended_in_time", guard(always)),
    )
