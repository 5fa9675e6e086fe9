"""What `bench serve` measured, on the screen: a table for each load."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from .serve_report import FIRST_TOKEN, Row, ServeReport, load_name
from .serve_ways import TITLES

WIDTH_WITHOUT_TERMINAL = 140


def show(report: ServeReport, console: Console) -> None:
    if not console.is_terminal:
        console = Console(file=console.file, width=WIDTH_WITHOUT_TERMINAL)
    for title, rows in by_load(report.rows).items():
        console.print(_table(title, rows))
    if any(row.ratio is not None for row in report.rows):
        console.print("ratio: to MooncakeConnector, of what is added to the first token or of the throughput")
    console.print(f"CPU s each: of all servers, for a request; vLLM's executor was {report.executor}")
    for line in report.left_out:
        console.print(line, highlight=False, markup=False)


def by_load(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each load under its name."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        name = load_name(row.what, row.prompt_tokens, row.at_once)
        groups.setdefault(name, []).append(row)
    return groups


def _table(title: str, rows: Sequence[Row]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("way", no_wrap=True)
    names = ("requests", "first token ms", "quartiles", "added ms", "requests/s", "ratio", "CPU s each")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("by process")
    for row in rows:
        table.add_row(*_cells(row))
    return table


def _cells(row: Row) -> tuple[str, ...]:
    low, high = row.first_token_quartiles
    return (
        TITLES[row.way],
        str(row.requests),
        _ms(row.first_token_seconds),
        f"{_ms(low)}-{_ms(high)}",
        "" if row.added_seconds is None or row.what != FIRST_TOKEN else _ms(row.added_seconds),
        f"{row.requests_per_second:.2f}",
        "" if row.ratio is None else f"{row.ratio:.2f}",
        f"{row.cpu_seconds:.2f}",
        ", ".join(f"{_side(time.process)} {time.seconds:.2f}" for time in row.cpu),
    )


def _side(process: str) -> str:
    """`dfirst-prefill` is P: which pair it belongs to, the row says already."""
    return {"prefill": "P", "decode": "D"}.get(process.rpartition("-")[2], process.rpartition("-")[2])


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f}"
