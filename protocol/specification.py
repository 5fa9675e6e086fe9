"""The spec's files as typed records.

``spec/`` holds the protocol as TOML: one file for each machine, one for the wire, one for the timers. They
are read here, strictly: a name that is misspelt stops the import.
"""

from functools import cache
from importlib import resources
from typing import Any, TypeVar

import msgspec

SPEC_PACKAGE = "dfirst.spec"
SAME_STATE = "="
"""In a transition's ``to``: the state stays."""

T = TypeVar("T")


class StateSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A state and what is true in it."""

    name: str
    about: str


class EventSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Something a machine hears."""

    name: str
    about: str


class TransitionSpec(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"source": "from", "target": "to"}
):
    """One row: in ``source``, on ``event``, if all ``guards`` hold, go to ``target`` and run ``effects`` in
    order.
    """

    id: str
    source: str
    event: str
    target: str
    reason: str
    guards: tuple[str, ...] = ()
    """Names of predicates; ``not x`` asks for the opposite."""
    effects: tuple[str, ...] = ()


class IgnoredSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An event that may come in these states and means nothing there."""

    event: str
    states: tuple[str, ...]
    reason: str


class MachineSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One machine: prose, states, events, rows."""

    name: str
    side: str
    title: str
    about: str
    initial: str
    states: tuple[StateSpec, ...]
    events: tuple[EventSpec, ...]
    transitions: tuple[TransitionSpec, ...]
    ignored: tuple[IgnoredSpec, ...] = ()


class FieldSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A field of a message or a record of the wire."""

    name: str
    type: str
    about: str


class RecordSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A record inside messages."""

    name: str
    about: str
    fields: tuple[FieldSpec, ...]


class MessageSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"source": "from"}):
    """A message of the side channel."""

    name: str
    tag: str
    source: str
    about: str
    fields: tuple[FieldSpec, ...]


class LimitSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What may stand in fields of one type: values of numbers, lengths of texts and lists."""

    name: str
    type: str
    at_most: int
    about: str
    at_least: int | None = None
    fields: tuple[str, ...] = ()
    """The fields that it goes for; none: all of its type that no other limit names."""


class WireSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole side channel."""

    protocol: str
    version: int
    max_message_bytes: int
    limits: tuple[LimitSpec, ...]
    records: tuple[RecordSpec, ...]
    messages: tuple[MessageSpec, ...]


class TimerSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A wait or a margin, in the unit that its name ends with."""

    name: str
    default: float
    about: str


class TimersSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of them."""

    timers: tuple[TimerSpec, ...]


class LineSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A kind of line of a trace."""

    name: str
    tag: str
    about: str
    fields: tuple[FieldSpec, ...]


class TraceSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a process writes about its transfers."""

    common: tuple[FieldSpec, ...]
    """Fields of every line."""
    lines: tuple[LineSpec, ...]


def _read(path: str, record: type[T]) -> T:
    data = (resources.files(SPEC_PACKAGE) / path).read_bytes()
    try:
        return msgspec.toml.decode(data, type=record, strict=True)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ValueError(f"spec/{path} is not a valid {record.__name__}: {error}") from error


@cache
def load_machine(name: str) -> MachineSpec:
    """Read ``spec/machines/<name>.toml`` and check that its names agree with each other."""
    spec = _read(f"machines/{name}.toml", MachineSpec)
    _check_names(spec)
    return spec


def machine_names() -> tuple[str, ...]:
    """Return the names of all machines in ``spec/machines``, sorted."""
    folder = resources.files(SPEC_PACKAGE) / "machines"
    names = (entry.name for entry in folder.iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml")))


@cache
def load_wire() -> WireSpec:
    """Read ``spec/wire.toml``."""
    return _read("wire.toml", WireSpec)


@cache
def load_timers() -> TimersSpec:
    """Read ``spec/timers.toml``."""
    return _read("timers.toml", TimersSpec)


@cache
def load_trace() -> TraceSpec:
    """Read ``spec/trace.toml``."""
    return _read("trace.toml", TraceSpec)


def _check_names(spec: MachineSpec) -> None:
    states = {state.name for state in spec.states}
    events = {event.name for event in spec.events}
    problems = [f"initial state {spec.initial} is not declared"] if spec.initial not in states else []
    seen: set[str] = set()
    for row in spec.transitions:
        if row.id in seen:
            problems.append(f"id {row.id} is used twice")
        seen.add(row.id)
        problems += _undeclared(row.id, "state", {row.source}, states)
        problems += _undeclared(row.id, "state", {row.target} - {SAME_STATE}, states)
        problems += _undeclared(row.id, "event", {row.event}, events)
    for entry in spec.ignored:
        problems += _undeclared("ignored", "state", set(entry.states), states)
        problems += _undeclared("ignored", "event", {entry.event}, events)
    used_events = {row.event for row in spec.transitions} | {entry.event for entry in spec.ignored}
    problems += [f"event {name} is in no row" for name in sorted(events - used_events)]
    if problems:
        raise ValueError(f"spec/machines/{spec.name}.toml: " + "; ".join(problems))


def _undeclared(row: str, kind: str, used: set[str], declared: set[str]) -> list[str]:
    return [f"{row} names the undeclared {kind} {name}" for name in sorted(used - declared)]


def as_builtins(record: Any) -> Any:
    """Return a record as plain lists and maps, for programs that print the spec."""
    return msgspec.to_builtins(record)
