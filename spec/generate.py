"""Writes the Python that follows from the spec: the messages and their limits from wire.toml, the timers from
timers.toml, the lines of a trace from trace.toml.

The files are committed, so that readers, type checkers and editors see plain classes; a test says that they
are current. Run ``python -m dfirst.spec.generate`` after a change to one of these files.
"""

import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path

import dfirst.protocol
import msgspec
from dfirst.protocol.specification import (
    FieldSpec,
    LimitSpec,
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
        "from typing import Annotated\n\nimport msgspec\n\n",
        f"from .limits import {', '.join(sorted(limit.name for limit in _used(wire)))}\n",
        "from .shards import Directory\n\n",
        f'PROTOCOL = "{wire.protocol}"\nVERSION = {wire.version}\n',
        f"MAX_MESSAGE_BYTES = {wire.max_message_bytes}\n",
    ]
    for record in wire.records:
        parts.append(_class(record.name, "frozen=True", record.about, _limited(wire, record.fields)))
    for message in wire.messages:
        options = f'frozen=True, tag="{message.tag}"'
        parts.append(_class(message.name, options, message.about, _limited(wire, message.fields)))
    names = "\n    | ".join(message.name for message in wire.messages)
    parts.append(f"\n\nMessage = (\n    {names}\n)\n")
    return "".join(parts)


def limits_source(wire: WireSpec) -> str:
    """Return the text of ``protocol/limits.py``."""
    parts = [
        HEADER.format(source="wire.toml"),
        '"""What may stand in the fields of messages."""\n\n',
        "from typing import Annotated\n\nimport msgspec\n",
    ]
    for limit in wire.limits:
        of_a_length = limit.type in ("str", "bytes", "list")
        bounds = (
            [f"max_length={limit.at_most}"]
            if of_a_length
            else [f"ge={limit.at_least}", f"le={limit.at_most}"]
        )
        meta = f"msgspec.Meta({', '.join(bounds)})"
        value = meta if limit.type == "list" else f"Annotated[{limit.type}, {meta}]"
        about = textwrap.fill(f'"""{limit.about}"""', width=WIDTH)
        parts.append(f"\n{limit.name} = {value}\n{about}\n")
    return "".join(parts)


def _limited(wire: WireSpec, fields: Iterable[FieldSpec]) -> list[FieldSpec]:
    """Return the fields with their types narrowed to what may stand there."""
    return [
        msgspec.structs.replace(field, type=_limited_type(wire, field.name, field.type)) for field in fields
    ]


def _limited_type(wire: WireSpec, name: str, type_text: str) -> str:
    if type_text.startswith("list["):
        inner = _limited_type(wire, name, type_text.removeprefix("list[").removesuffix("]"))
        many = _limit(wire, name, "list")
        return f"Annotated[list[{inner}], {many.name}]" if many else f"list[{inner}]"
    limit = _limit(wire, name, type_text)
    return limit.name if limit else type_text


def _limit(wire: WireSpec, name: str, type_text: str) -> LimitSpec | None:
    of_type = [limit for limit in wire.limits if limit.type == type_text]
    named = [limit for limit in of_type if name in limit.fields]
    general = [limit for limit in of_type if not limit.fields]
    return next(iter(named + general), None)


def _used(wire: WireSpec) -> set[LimitSpec]:
    """Return the limits that messages need."""
    fields = [field for group in (wire.records, wire.messages) for one in group for field in one.fields]
    found = {_limit(wire, field.name, _plain(field.type)) for field in fields}
    found |= {_limit(wire, field.name, "list") for field in fields if field.type.startswith("list[")}
    return {limit for limit in found if limit is not None}


def _plain(type_text: str) -> str:
    while type_text.startswith("list["):
        type_text = type_text.removeprefix("list[").removesuffix("]")
    return type_text


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
        folder / "limits.py": limits_source(load_wire()),
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
