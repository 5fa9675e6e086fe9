"""``dfirst bench``: its parts, each with a table on the terminal, and more in a JSON file. What is heavy is
imported when they run.
"""

from pathlib import Path
from typing import Annotated

import typer
from dfirst.spec.given_path import not_empty
from dfirst.spec.number_option import whole_number
from dfirst.spec.output_file import prepare

from ..engine_spec import Executor
from .serve_defaults import EXECUTOR, ROUNDS

bench = typer.Typer(
    help="Measure what a hand-over costs on this host, side by side with what it is compared with.",
    no_args_is_help=True,
)

JsonFile = Annotated[Path | None, typer.Option("--json", help="What was measured, as JSON.")]
Plot = Annotated[Path | None, typer.Option(metavar="FILE.svg", help="What was measured as a picture.")]
Quick = Annotated[bool, typer.Option("--quick", help="Fewer rows and rounds.")]


@bench.command()
def copies(
    quick: Quick = False,
    json_file: JsonFile = None,
    plot: Plot = None,
    only: Annotated[
        str, typer.Option(metavar="TEXT", help="The rows whose name holds this text; a wrong one lists them.")
    ] = "",
) -> None:
    """Two processes, real engine: the bandwidth of the data path against the engine's own best.

    The memory is laid out as KV caches are. Every row is measured in turns with large contiguous copies by
    the engine alone. Ends with 1 if a row is below the least that any should reach.
    """
    _prepare(json_file, plot)
    from .copies import run

    raise typer.Exit(run(quick, only, json_file, plot))


@bench.command()
def core(quick: Quick = False, json_file: JsonFile = None, plot: Plot = None) -> None:
    """The control plane alone: CPU, messages and memory of a transfer; the planner."""
    _prepare(json_file, plot)
    from .core import run

    raise typer.Exit(run(quick, json_file, plot))


@bench.command()
def layers(quick: Quick = False, json_file: JsonFile = None, plot: Plot = None) -> None:
    """Layer-wise, two processes, real engine: what is unsent when the last layer is computed, and what the
    forward pass pays for the push.

    The forward pass multiplies matrices on one thread, four times as long as the engine alone takes for the
    bytes, in turns with a push and without one. Ends with 1 if more is unsent, or paid, than is asked for.
    """
    _prepare(json_file, plot)
    from .layers import run

    raise typer.Exit(run(quick, json_file, plot))


@bench.command()
def serve(
    quick: Quick = False,
    json_file: JsonFile = None,
    plot: Plot = None,
    way: Annotated[
        list[str] | None,
        typer.Option(
            help="One way to measure: alone, blockwise, blockwise-d-first, layerwise, mooncake or nixl. "
            "Repeat it; all if none."
        ),
    ] = None,
    tokens: Annotated[
        list[int] | None,
        whole_number("--tokens", "Tokens of a prompt. Repeat it; 1000 and 4000 if none.", least=1),
    ] = None,
    at_once: Annotated[
        list[int] | None,
        whole_number("--at-once", "Requests at once. Repeat it; 1 and 4 if none.", least=1),
    ] = None,
    rounds: Annotated[int, whole_number("--rounds", "How often everything is measured.", least=1)] = ROUNDS,
    executor: Annotated[
        Executor,
        typer.Option(
            help="How vLLM runs each engine: uni, as it runs one rank on an accelerator, or mp, as vllm "
            "serve runs it on a CPU: with the worker in a process of its own, and both spinning on a "
            "queue, which costs most where cores are few."
        ),
    ] = EXECUTOR,
    work_dir: Annotated[
        Path, typer.Option(parser=not_empty("--work-dir"), metavar="DIR", help="For the model and logs.")
    ] = Path(".bench"),
) -> None:
    """Real vLLM engines: what a hand-over adds to the time to the first token, and throughput.

    One engine alone, dfirst in its three modes, vLLM's MooncakeConnector and its NixlConnector (where nixl
    is installed) take the same loads in turns: 1,000 and 4,000 tokens, 1 and 4 requests at once, and 16 at
    once for the throughput. CPU time is printed beside, since two cores starve each other. Takes some
    minutes.
    """
    _prepare(json_file, plot)
    from .serve import run

    run(quick, way, tokens, at_once, rounds, executor, work_dir, json_file, plot)


def _prepare(json_file: Path | None, plot: Path | None) -> None:
    prepare("--json", json_file)
    prepare("--plot", plot, ".svg")
