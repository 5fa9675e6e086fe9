"""The machines of the spec with one thing taken out: a row, a guard, an effect, a timer.

An alteration is made to the classes in this process and undone afterwards.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, cast

from dfirst.protocol.binding import BoundMachine, guard
from dfirst.protocol.entity import CoreEntity
from dfirst.protocol.rank import RankCore
from dfirst.protocol.specification import MachineSpec, TransitionSpec, load_machine
from msgspec.structs import replace

from ..models import MODELS
from .memory import Habits

PULL, PUSH, BOTH = ("pull",), ("push",), ("pull", "push")
MODES = {
    "decode_blockwise": PULL,
    "prefill_blockwise": PULL,
    "decode_layerwise": PUSH,
    "prefill_layerwise": PUSH,
}
Change = Callable[[Habits], AbstractContextManager[None]]


@dataclass(frozen=True)
class Mutant:
    """One mistake."""

    name: str
    about: str
    modes: tuple[str, ...]
    change: Change
    rows: frozenset[str] = frozenset()
    """The rows that it touches: a world that takes none of them cannot notice it. Empty: any world may."""
    shows_in: str = ""
    """The world that is tried first, where the small ones are known not to show it."""


def spec_mutants() -> Iterator[Mutant]:
    """Yield every mistake that the spec itself can have."""
    for name in MODELS:
        spec = load_machine(name)
        modes = MODES.get(name, BOTH)
        for row in spec.transitions:
            without = tuple(other for other in spec.transitions if other is not row)
            yield Mutant(f"row {row.id}", "taken out", modes, _altered(spec, without), frozenset((row.id,)))
        for row in spec.transitions:
            for effect in row.effects:
                left = tuple(other for other in row.effects if other != effect)
                rows = _exchanged(spec, row, replace(row, effects=left))
                change = _altered(spec, rows)
                only = frozenset((row.id,))
                yield Mutant(f"effect {row.id}.{effect}", "dropped", modes, change, only)
        guards = sorted({text.removeprefix("not ") for row in spec.transitions for text in row.guards})
        for text in guards:
            for answer in (True, False):
                about = f"always {'yes' if answer else 'no'}"
                yield Mutant(f"guard {name}.{text} {answer}", about, modes, _decided(name, text, answer))
        for timer in _timers(spec):
            yield Mutant(f"timer {name}.{timer}", "ignored", modes, unarmed(name, timer))
    yield Mutant("timer renewals", "ignored", BOTH, _unarmed_renewals())


def _timers(spec: MachineSpec) -> list[str]:
    return [event.name for event in spec.events if event.about.startswith("Timer:")]


def _exchanged(spec: MachineSpec, row: TransitionSpec, other: TransitionSpec) -> tuple[TransitionSpec, ...]:
    return tuple(other if each is row else each for each in spec.transitions)


def _altered(spec: MachineSpec, rows: tuple[TransitionSpec, ...]) -> Change:
    @contextmanager
    def change(_habits: Habits) -> Iterator[None]:
        with machine(spec.name, replace(spec, transitions=rows)):
            yield

    return change


def _decided(name: str, text: str, answer: bool) -> Change:
    @contextmanager
    def change(_habits: Habits) -> Iterator[None]:
        def decide(_self: object, _payload: object) -> bool:
            return answer

        with patched(MODELS[name], text, guard(decide)), machine(name, load_machine(name)):
            yield

    return change


def unarmed(name: str, timer: str) -> Change:
    """A timer of one machine is never set."""
    original = RankCore.arm

    @contextmanager
    def change(_habits: Habits) -> Iterator[None]:
        def arm(self: RankCore, entity: CoreEntity, armed: str, deadline: float) -> None:
            if armed != timer or entity.machine.spec.name != name:
                original(self, entity, armed, deadline)

        with patched(RankCore, "arm", arm):
            yield

    return change


def _unarmed_renewals() -> Change:
    @contextmanager
    def change(_habits: Habits) -> Iterator[None]:
        def arm(self: RankCore, renewal: object, due: float) -> None:
            return

        with patched(RankCore, "_arm_renewal", arm):
            yield

    return change


@contextmanager
def machine(name: str, spec: MachineSpec) -> Iterator[None]:
    """Run a class by another machine for a while."""
    with patched(MODELS[name], "machine", BoundMachine(name, MODELS[name], spec)):
        yield


@contextmanager
def patched(owner: Any, name: str, value: object) -> Iterator[None]:
    """Put something else in the place of an attribute for a while."""
    own = name in vars(owner)
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, cast(Any, before))
        else:
            delattr(owner, name)
