"""``dfirst bench``: its parts, each with a table on the terminal, and more in a JSON file. What is heavy is
imported when they run.
"""

from pathlib import Path
from typing import Annotated

import typer

bench = typer.Typer(
    help="Measure what a hand-over costs on this host, side by side with what it is compared with.",
    no_args_is_help=True,
)

JsonFile = Annotated[Path | None, typer.Option("--json", help="What was measured, as JSON.")]
Plot = Annotated[Path | None, typer.Option(metavar="FILE.svg", help="The ratios as a picture.")]
Quick = Annotated[bool, typer.Option("--quick", help="Fewer rows and rounds.")]


@bench.command()
def copies(quick: Quick = False, json_file: JsonFile = None, plot: Plot = None, only: str = "") -> None:
    """Two processes, real engine: the bandwidth of the data path against the engine's own best.

    The memory is laid out as KV caches are. Every row is measured in turns with large contiguous copies by
    the engine alone; --only TEXT picks the rows whose name holds that text.
    """
    from .copies import run

    raise typer.Exit(run(quick, only, json_file, plot))


@bench.command()
def core(quick: Quick = False, json_file: JsonFile = None, plot: Plot = None) -> None:
    """The control plane alone: CPU, messages and memory of a transfer; the planner."""
    from dfirst.spec.bench import run

    raise typer.Exit(run(quick, json_file, plot))
