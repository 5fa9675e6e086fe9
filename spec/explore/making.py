"""How a rule is given up: methods, rows and habits are exchanged for a while."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from dfirst.protocol import mover_leg, owner_leg
from dfirst.protocol.binding import effect, guard
from dfirst.protocol.commands import LegKey
from dfirst.protocol.mover_leg import MoverLeg
from dfirst.protocol.rank import RankCore
from dfirst.protocol.specification import SAME_STATE, TransitionSpec, load_machine
from msgspec.structs import replace

from .alterations import CLASSES, Change, machine, patched, unarmed
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


def bound(owner: type, name: str, method: Method) -> Change:
    """A guard or an effect: every machine of the class and its heirs is bound anew."""

    @contextmanager
    def change(_habits: Habits) -> Iterator[None]:
        with patched(owner, name, method), ExitStack() as stack:
            for spec_name, model in CLASSES.items():
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


def with_rows(name: str, *rows: TransitionSpec) -> AbstractContextManager[None]:
    spec = load_machine(name)
    kept = tuple(row for row in spec.transitions if row.id not in {new.id for new in rows})
    return machine(name, replace(spec, transitions=(*rows, *kept)))


def added(name: str, source: str, event: str, *effects: str) -> Change:
    """A row that the machine must not have."""

    @contextmanager
    def change(_habits: Habits) -> Iterator[None]:
        row = TransitionSpec(
            id="added", source=source, event=event, target=SAME_STATE, reason="", effects=effects
        )
        with with_rows(name, row):
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
        with patched(MoverLeg, "take_lease", effect(take_any)), with_rows("mover_leg", row):
            yield

    return change


def any_number() -> Change:
    @contextmanager
    def change(_habits: Habits) -> Iterator[None]:
        with (
            patched(MoverLeg, "outstanding", guard(always)),
            patched(MoverLeg, "grant_still_runs", guard(always)),
            patched(MoverLeg, "take_lease", effect(take_any)),
            machine("mover_leg", load_machine("mover_leg")),
        ):
            yield

    return change


def refused_used() -> Change:
    @contextmanager
    def change(_habits: Habits) -> Iterator[None]:
        spec = load_machine("mover_leg")
        refused = next(row for row in spec.transitions if row.id == "ML8")
        effects = ("take_lease", "start_copies", "tell_transfer")
        with (
            patched(MoverLeg, "take_lease", effect(take_any)),
            patched(MoverLeg, "start_copies", effect(start_without_blocks)),
            with_rows("mover_leg", replace(refused, target="COPYING", effects=effects)),
        ):
            yield

    return change


def hinted() -> Change:
    """Copies begin with the question, without a grant."""

    @contextmanager
    def change(_habits: Habits) -> Iterator[None]:
        spec = load_machine("mover_leg")
        opened = next(row for row in spec.transitions if row.id == "ML1")
        copying = replace(opened, target="COPYING", effects=("send_query", "tell_transfer"))
        with (
            patched(MoverLeg, "send_query", effect(ask_and_start)),
            with_rows("mover_leg", copying),
        ):
            yield

    return change


def last_moment() -> Change:
    """The mover still acts at the very end of its lease."""

    @contextmanager
    def change(_habits: Habits) -> Iterator[None]:
        with (
            patched(RankCore, "lease_runs", runs_at_end),
            patched(MoverLeg, "ended_in_time", guard(ended_at_end)),
            machine("mover_leg", load_machine("mover_leg")),
        ):
            yield

    return change


def counted(name: str, method: Method) -> Change:
    """The mover counts its lease in another way, also where it asks whether anything is left of it."""

    @contextmanager
    def change(_habits: Habits) -> Iterator[None]:
        with (
            patched(MoverLeg, "grant_still_runs", guard(always)),
            patched(MoverLeg, name, method),
            machine("mover_leg", load_machine("mover_leg")),
        ):
            yield

    return change


def late_mover() -> Change:
    def runs_late(self: RankCore, leg: LegKey, now: float) -> bool:
        transfer = self.movers.get(leg.key)
        found = transfer.legs.get(leg) if transfer else None
        return found is not None and found.state in ("COPYING", "DRAINING")

    def in_time(_self: MoverLeg, _ended: object) -> bool:
        return True

    @contextmanager
    def change(habits: Habits) -> Iterator[None]:
        with (
            patched(RankCore, "lease_runs", runs_late),
            unarmed("mover_leg", "lease_end")(habits),
            patched(MoverLeg, "ended_in_time", guard(in_time)),
            machine("mover_leg", load_machine("mover_leg")),
        ):
            yield

    return change
