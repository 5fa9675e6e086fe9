"""spec/conformance.toml speaks of every event and every effect of the machines, and of nothing else."""

from dfirst.protocol.specification import load_wire
from dfirst.spec.conformance.guards import JUDGES
from dfirst.spec.conformance.table import table

SILENT = {
    "abort_load", "announce_abort", "announce_finish", "announce_load", "announce_push", "ask_again_later",
    "ask_layout", "ask_missing_layout", "entomb", "extend", "extend_lease", "fail_leg", "finish_if_noted",
    "forget", "hold",
    "note_again", "note_blocks", "note_finished", "offer_blocks", "park", "renounce", "report_failed",
    "report_received", "report_sent", "start_deadline", "stop_copies", "stop_timers", "take_lease",
    "watch_silence",
    "free_slot", "hand_on_part", "note_staged", "start_staging", "take_slot",
}  # fmt: skip
"""Effects that say nothing to another rank and set no machine of this one going."""
SETTING = {"open_legs", "renounce_peers", "cancel_legs", "tell_transfer", "look_again", "answer_parked"}
LENDING = {"lend", "renew_lease"}


def test_every_event_of_every_machine_has_a_cause():
    declared = {(name, event.name) for name, machine in table().machines.items() for event in machine.events}
    assert declared <= set(table().causes)
    for entry in table().spec.causes:
        assert all(any((name, event) in declared for name in entry.machines) for event in entry.events)


def test_every_effect_says_something_sets_something_going_or_is_silent():
    named = {
        effect
        for machine in table().machines.values()
        for row in machine.transitions
        for effect in row.effects
    }
    spoken = set(table().says)
    assert named == spoken | SILENT | SETTING | LENDING
    assert set(table().tells) == SETTING | LENDING


def test_every_guard_that_it_names_is_one_and_can_be_judged():
    for machine, name in table().guards:
        used = {
            guard.removeprefix("not ")
            for row in table().machines[machine].transitions
            for guard in row.guards
        }
        assert name in used
        assert name in JUDGES


def test_every_message_that_it_names_is_one():
    tags = {message.tag for message in load_wire().messages} | {"copy"}
    spec = table().spec
    named = {message for entry in (*spec.causes, *spec.says) for message in entry.messages}
    named |= {entry.message for entry in spec.answers} | {
        message for entry in spec.answers for message in entry.to
    }
    assert named <= tags


def test_every_rule_that_it_names_has_its_text():
    spec = table().spec
    for entry in (*spec.causes, *spec.says, *spec.answers, *spec.guards, spec.heard):
        assert table().text(entry.rule)
