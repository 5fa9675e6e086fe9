"""Prints the account of a run."""

from rich.console import Console
from rich.table import Table

from .accounts import ChaosReport


def print_report(console: Console, report: ChaosReport) -> None:
    """Requests, faults by kind, and what should be nothing."""
    table = Table("fault", "times", title=f"seed {report.seed}, {report.minutes:g} minutes")
    table.columns[1].justify = "right"
    for kind, times in report.faults_by_kind.items():
        table.add_row(kind, str(times))
    table.add_section()
    table.add_row("all faults", str(report.faults))
    console.print(table)
    modes = ", ".join(f"{number} {mode}" for mode, number in report.modes.items())
    verdicts = ", ".join(f"{number} {verdict}" for verdict, number in report.verdicts.items())
    lines = [
        f"requests: {report.requests} ({modes}; {verdicts})",
        f"errors while a server was away: {report.excused_errors}",
        f"wrong answers: {report.wrong_answers}",
        f"requests without an answer: {report.without_answer}",
        f"errors that nothing excuses: {report.unexcused_errors}",
        *(
            f"blocks still held on {one.engine}: {one.blocks} ({one.seconds:g} s after the end)"
            for one in report.blocks_held
        ),
        f"traces refused: {report.traces_refused} ({report.traces})",
        f"transfers that have not come to their end: {report.transfers_unfinished}",
        f"errors logged by the connector: {report.errors_logged}",
    ]
    if report.never_injected:
        lines.append(f"never came to pass: {', '.join(report.never_injected)}")
    for line in lines:
        console.print(line, highlight=False)
    for finding in report.findings:
        console.print(f"[red]✗[/red] {finding}", highlight=False, markup=True, soft_wrap=True)
    verdict = "[green]all is well[/green]" if report.is_well else "[red]not all is well[/red]"
    console.print(verdict, highlight=False)
