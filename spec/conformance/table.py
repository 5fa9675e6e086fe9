"""spec/conformance.toml as typed records, with what is looked up in it for every line of a trace."""

from functools import cache
from importlib import resources

import msgspec
from dfirst.protocol.specification import MachineSpec, TransitionSpec, load_machine, machine_names


class RuleEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rule by its name."""

    id: str
    text: str


class CauseEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What may cause these events of these machines; without any of it, what leaves no line."""

    machines: tuple[str, ...]
    events: tuple[str, ...]
    rule: str
    messages: tuple[str, ...] = ()
    effects: tuple[str, ...] = ()
    copies: bool = False
    reports: bool = False

    @property
    def leaves_no_line(self) -> bool:
        """Whether it is a timer or a command."""
        return not (self.messages or self.effects or self.copies or self.reports)


class SaysEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What these effects, or rows on these events of a leg, make a rank say."""

    messages: tuple[str, ...]
    rule: str
    effects: tuple[str, ...] = ()
    leg_events: tuple[str, ...] = ()


class AnswerEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What may be said without a row, in answer to one of these."""

    message: str
    to: tuple[str, ...]
    rule: str


class HeardEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What legs must hear."""

    machines: tuple[str, ...]
    messages: tuple[str, ...]
    rule: str


class GuardEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Guards that a trace shows, and the rule that stands behind them."""

    names: tuple[str, ...]
    machines: tuple[str, ...]
    rule: str


class ConformanceSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file."""

    rules: tuple[RuleEntry, ...]
    causes: tuple[CauseEntry, ...]
    says: tuple[SaysEntry, ...]
    answers: tuple[AnswerEntry, ...]
    heard: HeardEntry
    guards: tuple[GuardEntry, ...]


class Table:
    """Looks things up."""

    def __init__(self, spec: ConformanceSpec) -> None:
        self.spec = spec
        self.machines: dict[str, MachineSpec] = {name: load_machine(name) for name in machine_names()}
        self.rows: dict[tuple[str, str], TransitionSpec] = {
            (name, row.id): row for name, machine in self.machines.items() for row in machine.transitions
        }
        self._texts = {rule.id: rule.text for rule in spec.rules}
        self.causes = {
            (machine, event): entry
            for entry in spec.causes
            for machine in entry.machines
            for event in entry.events
        }
        self.says = {effect: entry for entry in spec.says for effect in entry.effects}
        self.leg_says = {event: entry for entry in spec.says for event in entry.leg_events}
        self.answers = {entry.message: entry for entry in spec.answers}
        self.guards = {
            (machine, name): entry.rule
            for entry in spec.guards
            for machine in entry.machines
            for name in entry.names
        }
        self.tells = {
            effect: tuple(entry for entry in spec.causes if effect in entry.effects)
            for effect in {effect for entry in spec.causes for effect in entry.effects}
        }
        """Events that an effect may cause, by the effect."""
        said = {message for entry in spec.says for message in entry.messages}
        self.needs_a_row = said - {entry.message for entry in spec.answers}

    def hears(self, message: str) -> list[tuple[str, str]]:
        """Return the legs' machines and events that a message must reach."""
        heard = self.spec.heard
        return [
            (machine, event)
            for (machine, event), entry in self.causes.items()
            if machine in heard.machines and message in heard.messages and message in entry.messages
        ]

    def text(self, rule: str) -> str:
        """Return a rule in words."""
        return self._texts[rule]


@cache
def table() -> Table:
    """Read the table, once."""
    data = (resources.files("dfirst.spec") / "conformance.toml").read_bytes()
    return Table(msgspec.toml.decode(data, type=ConformanceSpec, strict=True))
