"""The commands ``dfirst explore`` and ``dfirst simulate``. What is heavy is imported when they run."""

from pathlib import Path
from typing import Annotated

import typer


def explore(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer faults: some seconds.")] = False,
    config: Annotated[
        str | None, typer.Option(metavar="NAME", help="One world of the set instead of all.")
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json",
            help="The counts, or the mutants' verdicts as they come: a hunt cut short goes on from it.",
        ),
    ] = None,
    replay: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Take the steps of a scenario file again.")
    ] = None,
    mutants: Annotated[
        bool,
        typer.Option("--mutants", help="Make one mistake at a time and end with 1 if any is not noticed."),
    ] = False,
    only: Annotated[
        str, typer.Option(metavar="TEXT", help="With --mutants: those whose name holds this text.")
    ] = "",
    scenarios: Annotated[Path, typer.Option(help="Where violations are written as scenario files.")] = Path(
        ".explore"
    ),
) -> None:
    """Try every interleaving of faults on the real core; end with 1 if a rule is broken.

    Visits each state of small worlds (one and two ranks on each side, both modes) for a bounded number of
    lost, repeated and late messages, failed copies, crashes, restarts and aborts. A violation is printed as
    the shortest way to it. The full set takes some minutes on two cores.
    """
    from rich.console import Console

    from .hunting import hunt
    from .run import explore as visit
    from .run import replay_file

    console = Console()
    try:
        if mutants:
            clean = hunt(only, json_file, console)
        elif replay is not None:
            clean = replay_file(replay, console)
        else:
            clean = visit(quick, config, json_file, scenarios, console)
    except (OSError, ValueError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    if not clean:
        raise typer.Exit(1)


def simulate(
    seed: Annotated[int, typer.Option(help="The same seed gives the same run.")] = 1,
    transfers: Annotated[int, typer.Option(min=1, help="How many transfers to run.")] = 10_000,
) -> None:
    """Run many transfers at once over many ranks with random faults; end with 1 if a rule is broken."""
    from rich.console import Console

    from .simulate import run_simulation

    if not run_simulation(seed, transfers, Console()):
        raise typer.Exit(1)
