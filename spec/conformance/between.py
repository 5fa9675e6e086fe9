"""Holds the files of a trace against each other: what came in was sent, and what an engine's scheduler
side heard is what its ranks reported, and an owner expects everybody who has a leg to it.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator

from dfirst.protocol.trace_lines import MessageLine, ReportLine, StepLine

from .causes import incarnation
from .expected import check_expected
from .files import TraceText
from .picture import Key
from .violation import Violation

Sent = tuple[str, str, str, int, int, str]
OUTCOMES = ("received", "failed", "sent")
SCHEDULER = -1


def check_between(texts: Iterable[TraceText]) -> list[Violation]:
    """Return every line that another file speaks against."""
    files = list(texts)
    return [*_unsent(files), *_unreported(files), *check_expected(files)]


def _unsent(files: list[TraceText]) -> Iterator[Violation]:
    writers = {incarnation(text.name) for text in files if text.start and text.start.rank != SCHEDULER}
    sent = {_identity(line): line for _, _, line in _messages(files, "sent")}
    receivers = defaultdict(set)
    for _, _, line in _messages(files, "sent"):
        receivers[_identity(line)].add(incarnation(line.receiver))
    for text, number, line in _messages(files, "received"):
        if incarnation(line.sender) not in writers:
            continue
        meant = receivers.get(_identity(line), set())
        if _identity(line) in sent and (not _names_receiver(line) or incarnation(line.receiver) in meant):
            continue
        whom = f" to {line.receiver}" if _identity(line) in sent else ""
        yield Violation(
            file=str(text.path),
            line=number,
            time=line.time,
            rule="S5",
            transfer=line.transfer,
            text=f"{line.message} came in, and by its own trace {line.sender} has not sent it{whom}",
        )


def _names_receiver(line: MessageLine) -> bool:
    return line.message in ("QUERY", "RENEW", "DONE", "STOPPED", "CANCEL")


def _identity(line: MessageLine) -> Sent:
    return line.message, line.sender, line.transfer, line.attempt, line.sequence, line.answer


def _messages(files: list[TraceText], way: str) -> Iterator[tuple[TraceText, int, MessageLine]]:
    for text in files:
        for number, line in text.lines:
            if isinstance(line, MessageLine) and line.way == way:
                yield text, number, line


def _unreported(files: list[TraceText]) -> Iterator[Violation]:
    ranks = _ranks(files)
    reports = _reports(files)
    for text in files:
        for number, line in text.lines:
            if not (isinstance(line, StepLine) and line.machine.endswith("_request")):
                continue
            if line.event not in OUTCOMES or not ranks[line.engine]:
                continue
            found = reports[line.engine, Key(line.transfer, line.attempt), line.peer]
            problem = _problem(line.event, found, ranks[line.engine])
            if problem:
                yield Violation(
                    file=str(text.path),
                    line=number,
                    time=line.time,
                    rule="S6",
                    transfer=line.transfer,
                    text=f"the scheduler side hears {line.event!r} of request {line.peer}, and {problem}",
                )


def _problem(event: str, reports: dict[int, set[str]], ranks: set[int]) -> str:
    silent = sorted(ranks - set(reports))
    outcomes = {outcome for said in reports.values() for outcome in said}
    if silent:
        return f"rank {', '.join(map(str, silent))} has not reported"
    if event == "failed" and "failed" not in outcomes:
        return "no rank has reported a failure"
    if event != "failed" and outcomes != {event}:
        return f"the ranks have reported {', '.join(sorted(outcomes))}"
    return ""


def _ranks(files: list[TraceText]) -> dict[str, set[int]]:
    ranks: dict[str, set[int]] = defaultdict(set)
    for text in files:
        if text.start is not None and text.start.rank != SCHEDULER:
            ranks[text.start.engine].add(text.start.rank)
    return ranks


def _reports(files: list[TraceText]) -> dict[tuple[str, Key, str], dict[int, set[str]]]:
    found: dict[tuple[str, Key, str], dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for text in files:
        for _, line in text.lines:
            if isinstance(line, ReportLine):
                place = line.engine, Key(line.transfer, line.attempt), line.request
                found[place][line.rank].add(line.outcome)
    return found
