"""Reads trace files: every line by its form, its time and its writer (rules T1 to T3)."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
from dfirst.protocol.specification import load_wire
from dfirst.protocol.trace_lines import EndLine, Line, StartLine

from ..given_path import check_regular
from .violation import BrokenRule, Violation

_decoder = msgspec.json.Decoder(Line)


class TraceText(msgspec.Struct, frozen=True):
    """One file: its lines with their numbers, and the first that has not the form of a trace."""

    path: Path
    start: StartLine | None
    lines: tuple[tuple[int, Line], ...]
    broken: Violation | None

    @property
    def name(self) -> str:
        """The rank or scheduler side that wrote it: engine/rank/incarnation."""
        start = self.start
        return "" if start is None else f"{start.engine}/{start.rank}/{start.incarnation}"

    @property
    def ended(self) -> bool:
        """Whether its process was stopped in good order."""
        return bool(self.lines) and isinstance(self.lines[-1][1], EndLine)


def trace_paths(given: Iterable[Path]) -> list[Path]:
    """Return the files that are meant, each once: a directory stands for the .jsonl files in it."""
    found: dict[Path, Path] = {}
    for path in given:
        meant = sorted(file for file in path.glob("*.jsonl") if file.is_file()) if path.is_dir() else [path]
        for file in meant:
            found.setdefault(file.resolve(), file)
    return list(found.values())


def why_no_trace(given: Iterable[Path]) -> str:
    """Say of files and directories without a single whole line what they are not."""
    return "there is no trace: " + "; ".join(_what_it_is_not(path) for path in given)


def _what_it_is_not(path: Path) -> str:
    if path.is_dir() and any(path.glob("*.jsonl")):
        return f"no file *.jsonl in {path} has a whole line"
    if path.is_dir():
        inside = [each for each in path.iterdir() if each.is_dir()]
        hint = f"; directories in it are not looked into: name them, as in {inside[0]}" if inside else ""
        return f"{path} holds no file *.jsonl{hint}"
    content = path.read_bytes()
    if not content:
        return f"{path} is empty"
    try:
        content.decode()
    except UnicodeDecodeError:
        return f"{path} is not text"
    return f"{path} has no whole line, which would end with a newline"


def read_trace(path: Path) -> TraceText:
    """Read a file up to the first line that has not the form of a trace. A last line without its end is still
    being written, or its writer was killed: it is left out.

    Raises ``OSError`` for a file that cannot be read.
    """
    check_regular(path)
    start: StartLine | None = None
    lines: list[tuple[int, Line]] = []
    time = 0.0
    try:
        for number, text in _numbered(path):
            line = _decode(text, number, time)
            start = _check_place(line, number, start, lines[-1][1] if lines else None)
            lines.append((number, line))
            time = line.time
    except BrokenRule as broken:
        violation = Violation(
            file=str(path),
            line=broken.line,
            time=time,
            rule=broken.rule,
            transfer=broken.transfer,
            text=broken.text,
        )
        return TraceText(path, start, tuple(lines), violation)
    return TraceText(path, start, tuple(lines), None)


def _numbered(path: Path) -> Iterator[tuple[int, bytes]]:
    for number, text in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        if text.strip():
            yield number, text


def _decode(text: bytes, number: int, time: float) -> Line:
    try:
        return _decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BrokenRule("T1", f"this is no line of a trace: {error}", line=number, time=time) from error


def _check_place(line: Line, number: int, start: StartLine | None, before: Line | None) -> StartLine:
    whose = str(getattr(line, "transfer", ""))
    if start is None:
        if not isinstance(line, StartLine):
            raise BrokenRule("T3", "the file does not begin with a start line", line=number)
        if line.version != load_wire().version:
            theirs, ours = line.version, load_wire().version
            raise BrokenRule(
                "T3", f"the file is of protocol version {theirs}, the spec is {ours}", line=number
            )
        return line
    if isinstance(line, StartLine):
        raise BrokenRule("T3", "a second start in one file", line=number)
    if isinstance(before, EndLine):
        raise BrokenRule("T3", "a line follows the end", whose, line=number)
    if (line.engine, line.rank, line.process) != (start.engine, start.rank, start.process):
        raise BrokenRule(
            "T3",
            f"a line of {line.engine}/{line.rank}, process {line.process}, in the file of "
            f"{start.engine}/{start.rank}, process {start.process}",
            whose,
            line=number,
        )
    return start
