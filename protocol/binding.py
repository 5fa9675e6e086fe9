"""Binds a machine of the spec to the class that holds its data.

Guards and effects are named in the spec; here every name is looked up on the class, and a name without a
method, or a method that no row uses, stops the import. One ``transitions.Machine`` is built for each spec
and shared by all transfers: building one, or adding a model to it, costs more than all that a transfer does.
For the same reason a row is taken directly and not by the library's ``trigger``, whose callbacks, models and
log lines cost about 20 microseconds a step, ten times what a row does.
"""

from collections.abc import Callable
from typing import Any, Protocol, cast

from transitions import Machine, Transition

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


class BoundRow(Transition):
    """A row of the spec, as a transition of the machine."""

    def __init__(
        self,
        source: str,
        dest: str | None,
        *_callbacks: None,
        row: TransitionSpec,
        guards: tuple[tuple[Predicate, bool], ...],
        effects: tuple[Action, ...],
    ) -> None:
        """``guards`` come with what they must say. The library's own callbacks are not used."""
        super().__init__(source, cast(str, dest))  # None, as its stubs do not say, for one that stays
        self.row = row
        self.guards = guards
        self.effects = effects

    def take(self, entity: Entity, payload: object) -> bool:
        """Take the row if its guards hold; return whether they did."""
        for predicate, wanted in self.guards:
            if predicate(entity, payload) is not wanted:
                return False
        if self.dest is not None:
            entity.state = self.dest
        entity.observer.stepped(entity, self.row, self.row.source)
        for action in self.effects:
            action(entity, payload)
        return True


class _Rows(Machine):
    transition_cls = BoundRow


class BoundMachine:
    """A machine of the spec, ready to move objects of one class.

    ``altered`` stands in for the spec's own machine where somebody wants to see what a change to it breaks;
    it need not use everything that the class has.
    """

    def __init__(self, name: str, model: type, altered: MachineSpec | None = None) -> None:
        self.spec: MachineSpec = altered or load_machine(name)
        self.guards: dict[str, Predicate] = _marked(model, GUARD_MARK)
        self.effects: dict[str, Action] = _marked(model, EFFECT_MARK)
        if altered is None:
            _check_bound(self.spec, set(self.guards), set(self.effects))
        self._ignored = {(state, entry.event) for entry in self.spec.ignored for state in entry.states}
        self._machine = _Rows(
            model=None,
            states=[state.name for state in self.spec.states],
            initial=self.spec.initial,
            auto_transitions=False,
        )
        for row in self.spec.transitions:
            self._machine.add_transition(
                trigger=row.event,
                source=row.source,
                dest=None if row.target == SAME_STATE else row.target,
                row=row,
                guards=tuple(_wanted(name, self.guards) for name in row.guards),
                effects=tuple(self.effects[name] for name in row.effects),
            )
        self._rows: dict[tuple[str, str], tuple[BoundRow, ...]] = {
            (source, name): tuple(cast(list[BoundRow], rows))
            for name, event in self._machine.events.items()
            for source, rows in event.transitions.items()
        }

    def fire(self, entity: Entity, event: str, payload: object = None) -> bool:
        """Give ``entity`` an event; return whether a row took it. One without a row, or one that this
        machine never hears, changes nothing (rule F3).
        """
        source = entity.state
        for row in self._rows.get((source, event), ()):
            if row.take(entity, payload):
                return True
        entity.observer.unheard(entity, event, (source, event) in self._ignored)
        return False


def _wanted(name: str, guards: dict[str, Predicate]) -> tuple[Predicate, bool]:
    return guards[name.removeprefix("not ")], not name.startswith("not ")


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
