"""``dfirst bench core``: prints and writes what ``dfirst.spec.bench_rows`` measures."""

from pathlib import Path

import msgspec
from dfirst.spec.bench_rows import rows
from rich.console import Console
from rich.table import Table

from ..json_file import write_json
from .bars import bars


def run(quick: bool, json_file: Path | None, plot: Path | None) -> int:
    """Measure, print and write; return 1 if anything costs more than is asked for."""
    measured = list(rows(quick))
    table = Table(title="The control plane alone")
    for column in ("", "measured", "unit", "at most", "ratio"):
        table.add_column(column, justify="right" if column in ("measured", "at most", "ratio") else "left")
    for row in measured:
        most = f"{row.at_most:,g}" if row.at_most else ""
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        table.add_row(row.name, f"{row.measured:,.{2 if row.measured < 10 else 0}f}", row.unit, most, ratio)
    Console().print(table)
    if json_file is not None:
        document = {"rows": [msgspec.structs.asdict(row) | {"ratio": row.ratio} for row in measured]}
        write_json(json_file, document)
    if plot is not None:
        limited = [(row.name, row.ratio, 1.0) for row in measured if row.ratio is not None]
        plot.write_text(bars("Share of what the control plane may cost", limited))
    return int(any(row.ratio is not None and row.ratio > 1 for row in measured))
