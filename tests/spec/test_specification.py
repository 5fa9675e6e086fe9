"""A mistake in a file of the spec stops the import and is named in one sentence."""

import msgspec
import pytest
from dfirst.protocol import binding, specification
from dfirst.protocol.binding import BoundMachine, effect, guard
from dfirst.protocol.specification import load_machine, load_timers, load_wire, machine_names

GOOD = """
name = "door"
side = "house"
title = "A door"
about = "It opens and closes."
initial = "SHUT"
states = [{ name = "SHUT", about = "Shut." }, { name = "OPEN", about = "Open." }]
events = [{ name = "push", about = "Somebody pushes." }, { name = "pull", about = "Somebody pulls." }]
transitions = [
{ id = "D1", from = "SHUT", event = "push", guards = ["free"], to = "OPEN", effects = ["hum"], reason = "r" },
{ id = "D2", from = "OPEN", event = "pull", to = "SHUT", reason = "r" },
]
ignored = [{ event = "pull", states = ["SHUT"], reason = "r" }]
"""


class Door:
    @guard
    def free(self, _payload: object) -> bool:
        return True

    @effect
    def hum(self, _payload: object) -> None: ...


@pytest.fixture
def spec(tmp_path, monkeypatch):
    """Return a function that reads a machine from this text."""
    (tmp_path / "machines").mkdir()
    monkeypatch.setattr(specification.resources, "files", lambda package: tmp_path)

    def read(text: str) -> specification.MachineSpec:
        (tmp_path / "machines" / "door.toml").write_text(text)
        return load_machine.__wrapped__("door")

    return read


@pytest.fixture
def bind(spec, monkeypatch):
    """Return a function that binds a machine of this text to a class."""

    def build(text: str, model: type) -> BoundMachine:
        monkeypatch.setattr(binding, "load_machine", lambda name: spec(text))
        return BoundMachine("door", model)

    return build


def test_a_good_file_is_read_and_bound(bind):
    machine = bind(GOOD, Door)
    assert [row.id for row in machine.spec.transitions] == ["D1", "D2"]


@pytest.mark.parametrize(
    ("right", "wrong", "sentence"),
    [
        ('id = "D2"', 'id = "D1"', "id D1 is used twice"),
        ('initial = "SHUT"', 'initial = "AJAR"', "initial state AJAR is not declared"),
        ('to = "OPEN"', 'to = "OPENED"', "D1 names the undeclared state OPENED"),
        ('from = "OPEN"', 'from = "OPENED"', "D2 names the undeclared state OPENED"),
        (
            'from = "SHUT", event = "push"',
            'from = "SHUT", event = "psuh"',
            "D1 names the undeclared event psuh",
        ),
        ('event = "push", guards', 'event = "pull", guards', "event push is in no row"),
        ('states = ["SHUT"]', 'states = ["SHUTT"]', "ignored names the undeclared state SHUTT"),
        ('[{ event = "pull", states', '[{ event = "pul", states', "ignored names the undeclared event pul"),
    ],
)
def test_names_that_do_not_agree_are_listed(spec, right, wrong, sentence):
    with pytest.raises(ValueError, match=r"spec/machines/door\.toml") as caught:
        spec(GOOD.replace(right, wrong, 1))
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("right", "wrong", "sentence"),
    [
        ('guards = ["free"]', 'guards = ["fere"]', "guards without a method: fere"),
        ('guards = ["free"]', "guards = []", "guards that no row names: free"),
        ('effects = ["hum"]', 'effects = ["hmu"]', "effects without a method: hmu"),
        ('effects = ["hum"]', "effects = []", "effects that no row names: hum"),
    ],
)
def test_guards_and_effects_must_be_bound_and_used(bind, right, wrong, sentence):
    with pytest.raises(ValueError, match="does not fit its class") as caught:
        bind(GOOD.replace(right, wrong, 1), Door)
    assert sentence in str(caught.value)


@pytest.mark.parametrize("wrong", [GOOD.replace("reason", "raeson"), GOOD.replace('id = "D1", ', ""), "= ="])
def test_a_file_of_another_form_is_refused_by_name(spec, wrong):
    with pytest.raises(ValueError, match=r"spec/machines/door\.toml is not a valid MachineSpec"):
        spec(wrong)


@pytest.mark.parametrize("name", machine_names())
def test_every_declared_state_is_reached_and_every_row_gives_its_reason(name):
    machine = load_machine(name)
    assert machine.name == name
    reached = {machine.initial} | {row.target for row in machine.transitions}
    assert {state.name for state in machine.states} <= reached
    assert all(row.reason.endswith(".") for row in machine.transitions)
    assert all(entry.reason.endswith(".") for entry in machine.ignored)


@pytest.mark.parametrize("name", machine_names())
def test_every_row_and_every_ignored_event_is_said_once(name):
    machine = load_machine(name)
    rows = [(row.source, row.event, row.guards) for row in machine.transitions]
    assert len(rows) == len(set(rows))
    ignored = [(state, entry.event) for entry in machine.ignored for state in entry.states]
    assert len(ignored) == len(set(ignored))
    unguarded = {(row.source, row.event) for row in machine.transitions if not row.guards}
    assert not unguarded & set(ignored)


def test_the_wire_and_the_timers_name_each_thing_once():
    wire, timers = load_wire(), load_timers()
    tags = [message.tag for message in wire.messages]
    names = [timer.name for timer in timers.timers]
    assert len(tags) == len(set(tags))
    assert len(names) == len(set(names))
    assert all(timer.default > 0 for timer in timers.timers)


def test_the_spec_can_be_printed_as_plain_data():
    machine = load_machine("mover_leg")
    assert msgspec.json.decode(msgspec.json.encode(specification.as_builtins(machine)))["name"] == "mover_leg"
