"""The exploration notices mistakes, tells the shortest way to one, and that way can be taken again."""

from dataclasses import replace

import pytest
from dfirst.spec.explore.chart import mermaid_chart, text_chart
from dfirst.spec.explore.memory import Habits
from dfirst.spec.explore.mutants import Measure, all_mutants, measured, tried
from dfirst.spec.explore.run import replay_file
from dfirst.spec.explore.scenario import read_head, replay, write_scenario
from dfirst.spec.explore.search import Search
from dfirst.spec.explore.world import World
from dfirst.spec.explore.worlds import HUNT, QUICK
from rich.console import Console

ALL_ROWS = frozenset().union(*(mutant.rows for mutant in all_mutants()))
SMALLEST = {configuration.name: configuration for configuration in HUNT}


def test_every_mutant_has_a_name_of_its_own():
    names = [mutant.name for mutant in all_mutants()]
    assert len(names) == len(set(names)) > 500


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("row DB20", "L1"),
        ("effect ML11.say_done", "R9"),
        ("guard decode_layerwise.any_lent False", "S2"),
        ("timer mover_leg.query_retry", "R9"),
        ("field first", "R9"),
        ("field offset", "S1"),
        ("R6 silent", "R6"),
    ],
)
def test_a_mistake_is_noticed_by_the_rule_that_it_breaks(name, rule):
    bounds = {configuration.name: Measure(99, 99, 2, ALL_ROWS) for configuration in HUNT}
    verdict = tried(name, bounds)
    assert verdict.rule == rule, verdict


def test_a_world_without_mistakes_names_how_long_things_take_to_end():
    measure = measured(SMALLEST["pull-1x1-o"])
    assert 0 < measure.mild_steps <= measure.wait_steps <= measure.steps < 10
    assert "DB20" in measure.rows


def test_the_way_to_a_violation_is_told_and_can_be_taken_again(tmp_path):
    mutant = next(each for each in all_mutants() if each.name == "row DB20")
    configuration = next(each for each in QUICK if each.name == "pull-1x1")
    habits = Habits()
    with mutant.change(habits):
        world = World(configuration, habits)
        world.watcher.strict = False
        found = Search(world).run().found
        assert found is not None
        path = tmp_path / "scenario.txt"
        write_scenario(path, configuration, found, mutant.name)
        assert read_head(path) == {
            "configuration": "pull-1x1",
            "mutant": "row DB20",
            "violates": found.rule,
        }
        again = World(configuration, habits)
        again.watcher.strict = False
        lines, violation = replay(path, again)
    assert not replay_file(path, Console(quiet=True))
    assert [line.text for line in lines] == [line.text for line in found.lines]
    assert violation is not None
    assert violation.rule == found.rule == "L1"
    assert "QUERY" in text_chart(world.sites.names, lines, "L1")
    assert "D0->>P0: QUERY" in mermaid_chart(world.sites.names, lines, "L1")


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
