"""The commands ``dfirst explore`` and ``dfirst simulate``. What is heavy is imported when they run."""

from pathlib import Path
from typing import Annotated

import typer

from ..endings import fail
from ..given_path import check_regular, not_empty
from ..number_option import whole_number
from ..output_file import prepare

MOST_TRANSFERS = 100_000_000
"""Of a simulation: more than a day's work."""


def explore(
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer faults: less than a minute on two cores.")
    ] = False,
    config: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="One world of the set instead of all; a wrong name lists them."),
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
        str,
        typer.Option(
            metavar="TEXT",
            help="With --mutants: those whose name holds this text. Of a single one the way to it is shown.",
        ),
    ] = "",
    scenarios: Annotated[
        Path,
        typer.Option(
            parser=not_empty("--scenarios"),
            metavar="DIR",
            help="Where violations are written as scenario files.",
        ),
    ] = Path(".explore"),
) -> None:
    """Try every interleaving of faults on the real core; end with 1 if a rule is broken.

    Visits each state of small worlds (one and two ranks on each side, both modes) for a bounded number of
    lost, repeated and late messages, failed copies, crashes, restarts and aborts. A violation is printed as
    the shortest way to it. The full set takes some minutes on two cores.
    """
    _check_together(
        {"--quick": quick, "--config": config, "--json": json_file, "--only": only},
        "--mutants" if mutants else "--replay" if replay is not None else "",
    )
    if mutants and replay is not None:
        fail("--mutants cannot be given with --replay, which makes the mistake that its file names", 2)
    prepare("--json", json_file)
    from rich.console import Console

    from .hunting import hunt
    from .run import explore as visit
    from .run import replay_file

    console = Console()
    try:
        if mutants:
            if json_file is not None and json_file.exists():
                check_regular(json_file)
            clean = hunt(only, json_file, scenarios, console)
        elif replay is not None:
            check_regular(replay)
            clean = replay_file(replay, console)
        else:
            clean = visit(quick, config, json_file, scenarios, console)
    except UnicodeDecodeError:
        fail(f"--replay: {replay} is no scenario file: it is not text", 2)
    except OSError as error:
        named = {"--replay": replay, "--json": json_file, "--scenarios": scenarios}
        fail(_where(error, named) + (error.strerror or str(error)), 2)
    except ValueError as error:
        fail(str(error), 2)
    if not clean:
        raise typer.Exit(1)


def _check_together(given: dict[str, object], what: str) -> None:
    """Refuse what would be without effect, before it is waited for."""
    allowed = {"--mutants": {"--json", "--only"}, "--replay": set()}.get(what, given.keys() - {"--only"})
    strange = [name for name, value in given.items() if value and name not in allowed]
    if strange and what:
        fail(f"{' and '.join(strange)} cannot be given with {what}", 2)
    if strange:
        fail(f"{' and '.join(strange)} chooses among mutants: give --mutants too", 2)


def _where(error: OSError, named: dict[str, Path | None]) -> str:
    """Name the file that an error is about, and the option by which it was given."""
    if error.filename is None:
        return ""
    file = Path(error.filename)
    options = [option for option, path in named.items() if path is not None and path in (file, *file.parents)]
    return f"{options[0]}: {file}: " if options else f"{file}: "


def simulate(
    seed: Annotated[int, whole_number("--seed", "The same seed gives the same run.")] = 1,
    transfers: Annotated[
        int, whole_number("--transfers", "How many transfers to run.", least=1, most=MOST_TRANSFERS)
    ] = 10_000,
) -> None:
    """Run many transfers at once over many ranks with random faults; end with 1 if a rule is broken."""
    from rich.console import Console

    from .simulate import run_simulation

    if not run_simulation(seed, transfers, Console()):
        raise typer.Exit(1)
