"""Binds a machine of the spec to the class that holds its data.

Guards and effects are named in the spec; here every name is looked up on the class, and a name without a
method, or a method that no row uses, stops the import. One ``transitions.Machine`` is built for each spec
and shared by all transfers: building one, or adding a model to it, costs more than a whole transfer's
triggers.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, cast

from transitions import EventData, Machine

from .specification import SAME_STATE, MachineSpec, TransitionSpec, load_machine

Predicate = Callable[[Any, Any], bool]
Action = Callable[[Any, Any], None]

GUARD_MARK = "_dfirst_guard"
EFFECT_MARK = "_dfirst_effect"


class Observer(Protocol):
    """Who hears of every step; the running engine, the traces and the tests hang here."""

    def stepped(self, entity: "Entity", row: TransitionSpec, source: str) -> None:
        """``entity`` took ``row`` out of ``source``; its effects run next."""

    def unheard(self, entity: "Entity", event: str, expected: bool) -> None:
        """``entity`` got an event without a row; ``expected`` if the spec lists it as ignored there."""


class Entity(Protocol):
    """What a machine needs of the object that it moves."""

    state: str

    @property
    def observer(self) -> Observer:
        """Who hears of this object's steps."""


def guard(method: Callable[..., bool]) -> Callable[..., bool]:
    """Mark a method as a guard that the spec may name."""
    setattr(method, GUARD_MARK, True)
    return method


def effect(method: Callable[..., None]) -> Callable[..., None]:
    """Mark a method as an effect that the spec may name."""
    setattr(method, EFFECT_MARK, True)
    return method


class BoundMachine:
    """A machine of the spec, ready to move objects of one class.

    ``altered`` stands in for the spec's own machine where somebody wants to see what a change to it breaks;
    it need not use everything that the class has.
    """

    def __init__(self, name: str, model: type, altered: MachineSpec | None = None) -> None:
        self.spec: MachineSpec = altered or load_machine(name)
        guards = _marked(model, GUARD_MARK)
        effects = _marked(model, EFFECT_MARK)
        if altered is None:
            _check_bound(self.spec, set(guards), set(effects))
        self._ignored = {(state, entry.event) for entry in self.spec.ignored for state in entry.states}
        self._machine = Machine(
            model=None,
            states=[state.name for state in self.spec.states],
            initial=self.spec.initial,
            auto_transitions=False,
            send_event=True,
            ignore_invalid_triggers=True,
        )
        for row in self.spec.transitions:
            self._machine.add_transition(
                trigger=row.event,
                source=row.source,
                dest=None if row.target == SAME_STATE else row.target,
                conditions=[_condition(name, guards) for name in row.guards],
                after=[partial(_run, row, [effects[name] for name in row.effects])],
            )

    def fire(self, entity: Entity, event: str, payload: object = None) -> bool:
        """Give ``entity`` an event; return whether a row took it. One without a row, or one that this
        machine never hears, changes nothing (rule F3).
        """
        source = entity.state
        trigger = self._machine.events.get(event)
        # Asked first, as transitions itself would write a line into the log for every ignored event.
        taken = False
        if trigger is not None and source in trigger.transitions:
            taken = bool(trigger.trigger(entity, payload=payload))
        if not taken:
            entity.observer.unheard(entity, event, (source, event) in self._ignored)
        return taken


def _run(row: TransitionSpec, effects: list[Action], data: EventData) -> None:
    entity = cast(Entity, data.model)
    entity.observer.stepped(entity, row, row.source)
    payload = data.kwargs["payload"]
    for action in effects:
        action(entity, payload)


def _condition(name: str, guards: dict[str, Predicate]) -> Callable[[EventData], bool]:
    wanted = not name.startswith("not ")
    return partial(_holds, guards[name.removeprefix("not ")], wanted)


def _holds(predicate: Predicate, wanted: bool, data: EventData) -> bool:
    return predicate(data.model, data.kwargs["payload"]) is wanted


def _marked(model: type, mark: str) -> dict[str, Any]:
    found = {}
    for name in dir(model):
        method = getattr(model, name)
        if getattr(method, mark, False):
            found[name] = method
    return found


def _check_bound(spec: MachineSpec, guards: set[str], effects: set[str]) -> None:
    named_guards = {name.removeprefix("not ") for row in spec.transitions for name in row.guards}
    named_effects = {name for row in spec.transitions for name in row.effects}
    problems = [
        (named_guards - guards, "guards without a method"),
        (named_effects - effects, "effects without a method"),
        (guards - named_guards, "guards that no row names"),
        (effects - named_effects, "effects that no row names"),
    ]
    texts = [f"{what}: {', '.join(sorted(names))}" for names, what in problems if names]
    if texts:
        raise ValueError(f"spec/machines/{spec.name}.toml does not fit its class: {'; '.join(texts)}")
