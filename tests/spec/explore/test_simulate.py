"""Many transfers at once with random faults: every rule holds, and a seed gives the same run again."""

from dfirst.spec.explore.simulate import run_simulation
from rich.console import Console


def told(seed: int, transfers: int) -> str:
    console = Console(record=True, quiet=False, width=300, file=open("/dev/null", "w"))  # noqa: SIM115
    assert run_simulation(seed, transfers, console), console.export_text()
    return console.export_text().splitlines()[-1]


def test_every_rule_holds_and_a_seed_replays():
    assert told(7, 200) == told(7, 200)


def test_another_seed_is_another_run():
    assert told(8, 100) != told(9, 100)
