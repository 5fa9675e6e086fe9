"""The exploration notices mistakes, tells the shortest way to one, and that way can be taken again."""

from dataclasses import replace
from io import StringIO

import msgspec
import pytest
from dfirst.spec.explore.chart import mermaid_chart, text_chart
from dfirst.spec.explore.hunting import Record, code_hash, hunt
from dfirst.spec.explore.memory import Habits
from dfirst.spec.explore.mutants import Verdict, all_mutants, measured, tried
from dfirst.spec.explore.run import replay_file
from dfirst.spec.explore.scenario import read_head, replay, write_scenario
from dfirst.spec.explore.search import Search
from dfirst.spec.explore.world import World
from dfirst.spec.explore.worlds import HUNT, QUICK
from rich.console import Console

SILENT = Console(quiet=True)


def test_every_mutant_and_every_world_has_a_name_of_its_own():
    assert len(all_mutants()) > 500
    names = [configuration.name for configuration in HUNT]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("name", "world", "rule"),
    [
        ("row DB20", "", "L1"),
        ("effect ML11.say_done", "", "R9"),
        ("guard decode_layerwise.any_lent False", "", "S2"),
        ("timer mover_leg.query_retry", "", "R9"),
        ("field first", "pull-1x2", "R9"),
        ("field offset", "pull-1x2", "S1"),
        ("R6 silent", "", "R6"),
        ("row DL11", "push-2x1-stray", "R9"),
        ("effect ML16.tell_transfer", "pull-1x1-unmet-o", "F2"),
    ],
)
def test_a_mistake_is_noticed_by_the_rule_that_it_breaks(name, world, rule):
    verdict = tried(name, world)
    assert verdict.rule == rule, verdict


def test_a_world_without_mistakes_names_how_long_things_take_to_end():
    measure = measured(HUNT[0])
    assert 0 < measure.wait_steps <= measure.steps < 10
    assert measure.bounds[0, 0, False] == (0, 0), "a good day takes no time"
    assert "DB20" in measure.rows


def test_a_hunt_that_was_cut_short_goes_on(tmp_path):
    file = tmp_path / "hunt.json"
    known = Verdict(name="R6 silent", about="", rule="", text="not tried", world="", states=0, seconds=0.0)
    file.write_bytes(msgspec.json.encode(Record(code=code_hash(), mutants=[known])))
    assert not hunt("silent", file, tmp_path, SILENT)
    record = msgspec.json.decode(file.read_bytes(), type=Record)
    assert record.complete
    assert record.survivors == 1
    assert known in record.mutants
    assert all(verdict.rule for verdict in record.mutants if verdict != known)


def test_a_hunt_that_was_finished_or_is_about_other_code_begins_anew(tmp_path):
    file = tmp_path / "hunt.json"
    wrong = Verdict(name="R6 silent", about="", rule="", text="", world="pull-1x1-o", states=0, seconds=0.0)
    for record in (
        Record(code=code_hash(), complete=True, mutants=[wrong]),
        Record(code="other", mutants=[wrong]),
    ):
        file.write_bytes(msgspec.json.encode(record))
        assert hunt("R6 silent", file, tmp_path, SILENT)
        found = msgspec.json.decode(file.read_bytes(), type=Record)
        assert [verdict.rule for verdict in found.mutants] == ["R6"]


def test_a_file_of_another_kind_is_refused_in_a_sentence(tmp_path):
    file = tmp_path / "hunt.json"
    file.write_text("[]")
    with pytest.raises(ValueError, match="is not what an earlier hunt has written"):
        hunt("R6 silent", file, tmp_path, SILENT)


def test_the_way_to_a_violation_is_told_and_can_be_taken_again(tmp_path):
    configuration = next(each for each in QUICK if each.name == "pull-1x1")
    habits = Habits()
    with all_mutants()["row DB20"].change(habits):
        world = World(configuration, habits)
        world.watcher.strict = False
        found = Search(world).run().found
        assert found is not None
        path = tmp_path / "scenario.txt"
        write_scenario(path, configuration, found, "row DB20")
        assert read_head(path) == {
            "configuration": "pull-1x1",
            "mutant": "row DB20",
            "violates": found.rule,
        }
        again = World(configuration, habits)
        again.watcher.strict = False
        lines, violation = replay(path, again)
    assert not replay_file(path, SILENT)
    assert [line.text for line in lines] == [line.text for line in found.lines]
    assert violation is not None
    assert violation.rule == found.rule == "L1"
    assert "QUERY" in text_chart(world.sites.names, lines, "L1")
    assert "D0->>P0: QUERY" in mermaid_chart(world.sites.names, lines, "L1")


def test_of_a_single_mutant_the_way_to_its_violation_is_shown_and_can_be_taken_again(tmp_path):
    stream = StringIO()
    assert hunt("row DB20", None, tmp_path, Console(file=stream, width=200))
    [path] = tmp_path.glob("*-L1.txt")
    assert "D0->>P0: QUERY" in stream.getvalue()
    assert f"--replay {path}" in stream.getvalue()
    assert not replay_file(path, SILENT)


def test_a_scenario_that_cannot_happen_is_refused(tmp_path):
    path = tmp_path / "scenario.txt"
    path.write_text("configuration: pull-1x1\n\nD0 -> P0  DONE t0.0\n")
    with pytest.raises(ValueError, match="cannot happen here"):
        replay(path, World(QUICK[0]))


def test_the_same_situation_at_another_time_is_the_same_state():
    world = World(replace(QUICK[0], faults=0))
    state = world.first()
    for _ in range(3):
        later = world.apply(state, ("tick",), 0)
        assert later == state
