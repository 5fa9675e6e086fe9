"""Shows a demo's report as a table, one row a request."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from .demo_report import DemoReport, RequestReport
from .trace_reader import StatePassed, is_request_machine

# A file or a pipe has no width of its own, and the states need room.
WIDTH_WITHOUT_TERMINAL = 170


def print_report(console: Console, report: DemoReport) -> None:
    wide = console if console.is_terminal else Console(file=console.file, width=WIDTH_WITHOUT_TERMINAL)
    wide.print(report_table(report))
    for request in report.requests:
        if request.problem is not None:
            console.print(f"[red]{request.mode}, {request.name}:[/red] ", end="")
            console.print(request.problem, markup=False, highlight=False)
    if report.traces.broken is None:
        console.print(f"traces conform to the spec: {report.traces.summary}", highlight=False)
    else:
        console.print("[red]traces do not conform to the spec:[/red] ", end="")
        console.print(report.traces.broken, markup=False, highlight=False)
    moved = sum(request.bytes for request in report.requests)
    verdict = "[green]every answer equals the single engine's[/green]"
    if report.mismatches:
        verdict = f"[red]{report.mismatches} answers differ from the single engine's[/red]"
    elif any(request.problem is not None for request in report.requests):
        wrong = sum(request.problem is not None for request in report.requests)
        verdict = f"[red]{wrong} requests did not go as they should[/red]"
    console.print(f"{len(report.requests)} requests, {size(moved)} moved: {verdict}", highlight=False)


def report_table(report: DemoReport) -> Table:
    title = f"{report.model}: prefill {report.prefill}, decode {report.decode}"
    table = Table(title=title, title_justify="left")
    table.add_column("mode")
    table.add_column("request", min_width=20)
    table.add_column("tokens\nin / out", justify="right")
    table.add_column("moved", justify="right", no_wrap=True)
    table.add_column("prefill passed, at ms", ratio=1)
    table.add_column("decode passed, at ms", ratio=1)
    table.add_column("MB/s", justify="right")
    table.add_column("equal")
    previous = ""
    for request in report.requests:
        if previous and request.mode != previous:
            table.add_section()
        previous = request.mode
        table.add_row(*_row(request))
    return table


def _row(request: RequestReport) -> tuple[str, ...]:
    speed = request.megabytes_per_second
    return (
        request.mode,
        request.name,
        f"{request.prompt_tokens} / {request.output_tokens}",
        size(request.bytes),
        states(request.prefill_states),
        states(request.decode_states),
        "-" if speed is None else f"{speed:.0f}",
        "[green]yes[/green]" if request.equal else "[red]NO[/red]",
    )


def states(passed: Sequence[StatePassed]) -> str:
    """The states of the rank with the time of each; those of the request's machine where no rank has any."""
    of_rank = [one for one in passed if not is_request_machine(one.machine)]
    return " → ".join(f"{one.state} {one.seconds * 1000:.0f}" for one in of_rank or passed) or "-"


def size(number: int) -> str:
    """A number of bytes for people."""
    if number < 1_000_000:
        return f"{number / 1e3:.0f} kB"
    return f"{number / 1e6:.1f} MB"
