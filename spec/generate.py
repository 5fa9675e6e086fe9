"""Writes the Python that follows from the spec: the messages from wire.toml, the timers from timers.toml, the
lines of a trace from trace.toml.

The files are committed, so that readers, type checkers and editors see plain classes; a test says that they
are current. Run ``python -m dfirst.spec.generate`` after a change to one of these files.
"""

import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path

import dfirst.protocol
from dfirst.protocol.specification import (
    FieldSpec,
    TimersSpec,
    TraceSpec,
    WireSpec,
    load_timers,
    load_trace,
    load_wire,
)

WIDTH = 108
HEADER = "# Generated from spec/{source} by `python -m dfirst.spec.generate`. Do not edit.\n"


def messages_source(wire: WireSpec) -> str:
    """Return the text of ``protocol/messages.py``."""
    parts = [
        HEADER.format(source="wire.toml"),
        '"""The side channel\'s messages, as a tagged union."""\n\n',
        "import msgspec\n\nfrom .shards import Directory\n\n",
        f'PROTOCOL = "{wire.protocol}"\nVERSION = {wire.version}\n',
        f"MAX_MESSAGE_BYTES = {wire.max_message_bytes}\n",
    ]
    for record in wire.records:
        parts.append(_class(record.name, "frozen=True", record.about, record.fields))
    for message in wire.messages:
        options = f'frozen=True, tag="{message.tag}"'
        parts.append(_class(message.name, options, message.about, message.fields))
    names = "\n    | ".join(message.name for message in wire.messages)
    parts.append(f"\n\nMessage = (\n    {names}\n)\n")
    return "".join(parts)


def timing_source(timers: TimersSpec) -> str:
    """Return the text of ``protocol/timing.py``."""
    parts = [
        HEADER.format(source="timers.toml"),
        '"""Every wait and margin of the protocol."""\n\nimport msgspec\n\n\n',
        "class Timing(msgspec.Struct, frozen=True, kw_only=True):\n",
        '    """The protocol\'s timers. Units are in the names."""\n',
    ]
    for timer in timers.timers:
        parts.append(f"\n    {timer.name}: float = {timer.default!r}\n{_docstring(timer.about)}")
    return "".join(parts)


def trace_lines_source(trace: TraceSpec) -> str:
    """Return the text of ``protocol/trace_lines.py``."""
    parts = [
        HEADER.format(source="trace.toml"),
        '"""The lines of a trace, as a tagged union. The writer\'s rules are in spec/trace.toml."""\n\n',
        "import msgspec\n",
        _class(
            "TraceLine",
            'frozen=True, kw_only=True, tag_field="line"',
            "What every line says.",
            trace.common,
        ),
    ]
    for line in trace.lines:
        options = f'frozen=True, kw_only=True, tag="{line.tag}"'
        parts.append(_class(line.name, options, line.about, line.fields, base="TraceLine"))
    names = " | ".join(line.name for line in trace.lines)
    parts.append(f"\n\nLine = {names}\n")
    return "".join(parts)


def _class(
    name: str, options: str, about: str, fields: Iterable[FieldSpec], base: str = "msgspec.Struct"
) -> str:
    lines = [f"    {field.name}: {field.type}\n{_docstring(_sentence(field.about))}" for field in fields]
    gap = "\n" if lines else ""
    return "".join([f"\n\nclass {name}({base}, {options}):\n{_docstring(about)}{gap}", *lines])


def _docstring(text: str) -> str:
    wrapped = textwrap.wrap(f'"""{text}"""', width=WIDTH, initial_indent="    ", subsequent_indent="    ")
    if len(wrapped) == 1:
        return wrapped[0] + "\n"
    closing = wrapped[-1].removesuffix('"""')
    return "\n".join([*wrapped[:-1], closing, '    """']) + "\n"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."


def outputs() -> dict[Path, str]:
    """Return what every generated file should hold, by its path."""
    folder = Path(dfirst.protocol.__path__[0])
    return {
        folder / "messages.py": messages_source(load_wire()),
        folder / "timing.py": timing_source(load_timers()),
        folder / "trace_lines.py": trace_lines_source(load_trace()),
    }


def stale() -> list[Path]:
    """Return the generated files that do not hold what they should."""
    return [path for path, text in outputs().items() if not path.exists() or path.read_text() != text]


def main() -> int:
    """Write the files that are stale and name them."""
    for path in stale():
        path.write_text(outputs()[path])
        print(f"wrote {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
