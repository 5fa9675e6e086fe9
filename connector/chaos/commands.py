"""The command ``dfirst chaos``. What is heavy is imported when it runs."""

from pathlib import Path
from typing import Annotated

import typer
from dfirst.spec.given_path import not_empty
from dfirst.spec.number_option import number, whole_number
from dfirst.spec.output_file import prepare

from ..endings import fail, need_vllm

MOST_MINUTES = 7 * 24 * 60


def chaos(
    seed: Annotated[int, whole_number("--seed", "The same seed gives the same plan of load and faults.")] = 1,
    minutes: Annotated[
        float, number("--minutes", "How long load and faults last.", least=0.1, most=MOST_MINUTES)
    ] = 8.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="The account, as JSON.")] = None,
    work_dir: Annotated[
        Path,
        typer.Option(
            parser=not_empty("--work-dir"), metavar="DIR", help="For the model, logs, traces and orders."
        ),
    ] = Path(".chaos"),
    keep: Annotated[bool, typer.Option("--keep", help="Keep logs and traces also when all is well.")] = False,
) -> None:
    """Break real engines on purpose; end with 1 if an answer, a block or a trace is not as it should be.

    Starts a prefill engine, a decode engine and a router, sends them a mixed load in all modes, and loses,
    delays, repeats, reorders and garbles their messages, fails and stalls copies, hangs up, aborts, stops and
    kills processes. Every answer is compared with one engine's, every trace with the spec.
    """
    from rich.console import Console

    from ..launch import LaunchError
    from .run import ChaosSettings, run_chaos
    from .table import print_report

    need_vllm()
    prepare("--json", json_file)
    console = Console()
    settings = ChaosSettings(seed=seed, minutes=minutes, work_dir=work_dir, json_file=json_file, keep=keep)
    try:
        report = run_chaos(settings, console)
    except LaunchError as error:
        fail(str(error))
    except KeyboardInterrupt:
        fail("interrupted; the engines are stopped", status=130)
    print_report(console, report)
    if not report.is_well:
        raise typer.Exit(1)
