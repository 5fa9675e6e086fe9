"""``dfirst explore --mutants``: tries every mutant, keeps each verdict as it comes, and prints the table.

With ``--json FILE`` a run that was cut short goes on where it was. After a whole run, the file says on which
world each mutant was noticed last, and that one is tried first the next time.
"""

import multiprocessing
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from hashlib import sha256
from importlib import resources
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..output_file import as_json
from .mutants import Verdict, all_mutants, tried, way_to
from .run import show, workers

TABLE_WIDTH = 200
"""Columns of the table where it does not go to a terminal."""


class Record(msgspec.Struct, kw_only=True):
    """What the file holds."""

    code: str
    """A hash of the code that was tried."""
    complete: bool = False
    survivors: int = 0
    seconds: float = 0.0
    """Of CPU time, for the mutants."""
    mutants: list[Verdict]


def hunt(only: str, json_file: Path | None, scenarios: Path, console: Console) -> bool:
    """Try all mutants whose name holds ``only``; return whether each was noticed. Of a single one the way to
    its violation is printed, and written to ``scenarios``.

    Raises ``ValueError`` if there is none, or if a world breaks a rule without any mistake.
    """
    started = time.monotonic()
    names = [name for name in all_mutants() if only in name]
    if not names:
        raise ValueError(f"no mutant's name holds {only!r}")
    before = _read(json_file)
    record = Record(code=code_hash(), mutants=[])
    if before is not None and before.code == record.code and not before.complete:
        record.mutants += [verdict for verdict in before.mutants if verdict.name in names]
    worlds = {verdict.name: verdict.world for verdict in before.mutants} if before else {}
    for verdict in _verdicts(names, record.mutants, worlds, console):
        record.mutants.append(verdict)
        _write(json_file, record)
    record.complete = True
    _write(json_file, record)
    ordered = sorted(record.mutants, key=lambda verdict: (not verdict.rule, names.index(verdict.name)))
    wide = console if console.is_terminal else Console(file=console.file, width=TABLE_WIDTH)
    wide.print(_table(ordered))
    console.print(
        f"{len(names)} mutants, {record.survivors} not noticed, {record.seconds:.0f} CPU seconds, "
        f"{time.monotonic() - started:.0f} s"
    )
    result = way_to(record.mutants[0]) if len(names) == 1 else None
    if result is not None:
        show(result, scenarios, console, names[0])
    return not record.survivors


def _verdicts(
    names: Sequence[str], known: Sequence[Verdict], worlds: Mapping[str, str], console: Console
) -> Iterator[Verdict]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    context = multiprocessing.get_context("spawn")
    done = {verdict.name for verdict in known}
    missed = sum(1 for verdict in known if not verdict.rule)
    with (
        ProcessPoolExecutor(workers(), context) as pool,
        Progress(*columns, console=console, transient=True) as progress,
    ):
        task = progress.add_task("mutants", total=len(names), completed=len(done))
        tries = [pool.submit(tried, name, worlds.get(name, "")) for name in names if name not in done]
        for future in as_completed(tries):
            verdict = future.result()
            yield verdict
            missed += not verdict.rule
            progress.update(task, advance=1, description=f"mutants ({missed} not noticed)")
            if not verdict.rule:
                told = f"not noticed: {verdict.name} ({verdict.about}) {verdict.text}"
                console.print(told, highlight=False)


def code_hash() -> str:
    """Return a hash of everything that a verdict depends on."""
    digest = sha256()
    for package in ("dfirst.protocol", "dfirst.spec.explore", "dfirst.spec"):
        folder = Path(str(resources.files(package)))
        files = sorted(folder.glob("*.py")) + sorted(folder.glob("**/*.toml"))
        for file in files:
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _read(file: Path | None) -> Record | None:
    if file is None or not file.exists():
        return None
    try:
        return msgspec.json.decode(file.read_bytes(), type=Record)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{file} is not what an earlier hunt has written: {error}; remove it") from error


def _write(file: Path | None, record: Record) -> None:
    record.survivors = sum(1 for verdict in record.mutants if not verdict.rule)
    record.seconds = round(sum(verdict.seconds for verdict in record.mutants), 1)
    if file is not None:
        fresh = file.with_suffix(".part")
        fresh.write_bytes(as_json(record))
        fresh.replace(file)


def _table(verdicts: Sequence[Verdict]) -> Table:
    table = Table(box=None, header_style="bold")
    for title in ("mutant", "what", "breaks", "in world"):
        table.add_column(title, overflow="fold")
    table.add_column("states", justify="right", no_wrap=True)
    table.add_column("how it shows", overflow="fold")
    for verdict in verdicts:
        rule = verdict.rule or "NOT NOTICED"
        table.add_row(verdict.name, verdict.about, rule, verdict.world, f"{verdict.states:,}", verdict.text)
    return table
