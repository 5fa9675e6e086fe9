"""Writes the second half of spec/README.md: every machine, message and timer, from the files of the spec.

What people wrote stands above the first marker and is left alone. ``python -m dfirst.spec.readme`` rewrites
the rest, and so does ``dfirst diagrams`` in a checkout; a test says that it is current.
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import dfirst.spec
from dfirst.protocol.binding import BoundMachine
from dfirst.protocol.specification import (
    SAME_STATE,
    FieldSpec,
    MachineSpec,
    TransitionSpec,
    load_machine,
    load_timers,
    load_trace,
    load_wire,
)

from .mermaid import state_diagram
from .models import MODELS

BEGIN = "<!-- From here on written by `python -m dfirst.spec.readme`. -->"
END = "<!-- Up to here. -->"


def readme_path() -> Path:
    """Return where the README stands."""
    return Path(dfirst.spec.__path__[0]) / "README.md"


def rendered(present: str) -> str:
    """Return the README's text with its generated part made anew."""
    before, begin, rest = present.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"spec/README.md needs the lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{generated()}\n{END}{after}"


def write() -> Path:
    """Rewrite the README's generated part and return its path."""
    path = readme_path()
    path.write_text(rendered(path.read_text()))
    return path


def generated() -> str:
    """Return the generated part: machines, messages, timers, traces."""
    parts = ["## The machines"]
    parts += [_machine(load_machine(name), model.machine) for name, model in MODELS.items()]
    parts += ["## The messages", *_messages(), "## The timers", _timers(), "## The traces", *_traces()]
    return "\n\n".join(parts) + "\n"


def _machine(machine: MachineSpec, bound: BoundMachine) -> str:
    parts = [
        f"### {machine.title}",
        f"`machines/{machine.name}.toml`",
        " ".join(machine.about.split()),
        f"```mermaid\n{state_diagram(machine)}```",
        "\n".join(f"* `{state.name}`: {state.about}" for state in machine.states),
        _table(
            ("row", "from", "event", "guards", "to", "effects", "reason"),
            (_row(row) for row in machine.transitions),
        ),
    ]
    if machine.ignored:
        entries = ((f"`{entry.event}`", ", ".join(entry.states), entry.reason) for entry in machine.ignored)
        parts += ["Ignored, and counted:", _table(("event", "in", "reason"), entries)]
    events = ((f"`{event.name}`", event.about) for event in machine.events)
    parts += ["Its events:", _table(("event", "what it says"), events)]
    for what, methods in (("guards", bound.guards), ("effects", bound.effects)):
        parts += [
            f"Its {what}, in the words of their methods:",
            _table((what[:-1], "what it says"), _words(methods)),
        ]
    return "\n\n".join(parts)


def _words(methods: Mapping[str, Callable[..., object]]) -> Iterator[tuple[str, ...]]:
    for name, method in methods.items():
        yield f"`{name}`", " ".join((inspect.getdoc(method) or "").split())


def _row(row: TransitionSpec) -> tuple[str, ...]:
    target = "(stays)" if row.target == SAME_STATE else row.target
    guards, effects = ", ".join(row.guards), ", ".join(row.effects)
    return row.id, row.source, f"`{row.event}`", guards, target, effects, row.reason


def _messages() -> Iterator[str]:
    wire = load_wire()
    yield (
        f"Protocol `{wire.protocol}`, version {wire.version}; a message has at most "
        f"{wire.max_message_bytes // 2**20} MiB."
    )
    yield "What may stand in a field; the number is a length for texts and lists:"
    yield _table(
        ("limit", "of", "least", "most", "what it is"),
        (
            (
                f"`{limit.name}`",
                ", ".join(f"`{name}`" for name in limit.fields) or f"every other `{limit.type}`",
                "" if limit.at_least is None else str(limit.at_least),
                str(limit.at_most),
                limit.about,
            )
            for limit in wire.limits
        ),
    )
    for message in wire.messages:
        says = {"either": "either side says it"}.get(message.source, f"the {message.source} says it")
        yield f"**{message.tag}** ({says}). {message.about}"
        yield _fields(message.fields)
    for record in wire.records:
        yield f"**{record.name}**, inside of messages. {record.about}"
        yield _fields(record.fields)


def _fields(fields: Iterable[FieldSpec]) -> str:
    return _table(
        ("field", "type", "what it says"), ((f"`{f.name}`", f"`{f.type}`", f.about) for f in fields)
    )


def _timers() -> str:
    timers = ((f"`{timer.name}`", f"{timer.default:g}", timer.about) for timer in load_timers().timers)
    return _table(("timer", "default", "what it bounds"), timers)


def _traces() -> Iterator[str]:
    trace = load_trace()
    yield (
        "With `trace_path` set, every process writes a file, its name ending in `.jsonl`, one JSON object a "
        "line. `dfirst conform` holds such files against this spec, whoever wrote them; the order in which a "
        "writer has to write is at the head of `trace.toml`. A field `line` says which of these a line is:"
    )
    lines = ((f"`{line.tag}`", line.about) for line in trace.lines)
    yield _table(("line", "what it says"), lines)
    yield "Every line has:"
    yield _fields(trace.common)
    for line in trace.lines:
        if line.fields:
            yield f"**`{line.tag}`** has:"
            yield _fields(line.fields)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def main() -> int:
    """Rewrite the README and name it."""
    print(f"wrote {write().name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
