"""A machine of the spec as a picture, drawn by Graphviz: what ``mermaid.py`` says in text, laid out in SVG.

``transitions`` can draw its machines too, but as one arrow for each row, which for machines of thirty rows
nobody can read; and it knows neither ids nor reasons, which are shown here as labels and tooltips.
"""

import shutil
import subprocess
from html import escape

from dfirst.protocol.specification import MachineSpec, TransitionSpec

from .mermaid import arrows, end_states, guards_text

GRAPH = """\
digraph {name} {{
    graph [label=<<B>{title}</B><BR/> >, labelloc=t, fontname="Helvetica", fontsize=16, rankdir=TB,
           nodesep=0.6, ranksep=0.6, pad=0.3]
    node [shape=box, style="rounded,filled", fillcolor="#eef3fa", color="#33507a", fontname="Helvetica",
          fontsize=12, margin="0.2,0.12"]
    edge [fontname="Helvetica", fontsize=10, color="#555555", arrowsize=0.7]
    START [shape=circle, style=filled, fillcolor="#333333", label="", width=0.18, height=0.18, margin=0]
{body}
}}
"""


class DotMissing(RuntimeError):
    """Graphviz is not installed."""

    def __init__(self) -> None:
        super().__init__("the SVG diagrams need Graphviz's program dot: install the Debian package graphviz")


def svg(machine: MachineSpec) -> bytes:
    """Return a machine's picture; raise ``DotMissing`` without Graphviz."""
    program = shutil.which("dot")
    if program is None:
        raise DotMissing
    text = dot_text(machine).encode()
    return subprocess.run([program, "-Tsvg"], input=text, capture_output=True, check=True).stdout


def dot_text(machine: MachineSpec) -> str:
    """Return a machine in Graphviz's language. Rows that stay in their state are listed inside of it: as
    loops they would lie across the arrows.
    """
    rows_between = arrows(machine)
    ends = end_states(machine)
    lines = [f"    START -> {machine.initial}"]
    for state in machine.states:
        extra = ', peripheries=2, fillcolor="#e4f1e4", color="#3c7a3c"' if state.name in ends else ""
        label = _state(state.name, rows_between.get((state.name, state.name), []))
        lines.append(f'    {state.name} [label=<{label}>, tooltip="{_quoted(state.about)}"{extra}]')
    for (source, target), rows in rows_between.items():
        if source != target:
            reasons = "\\n".join(_quoted(f"{row.id}: {row.reason}") for row in rows)
            attributes = f'label=<{_table(rows)}>, labeltooltip="{reasons}", tooltip="{reasons}"'
            lines.append(f"    {source} -> {target} [{attributes}]")
    return GRAPH.format(name=machine.name, title=escape(machine.title), body="\n".join(lines))


def _state(name: str, inside: list[TransitionSpec]) -> str:
    return f'<TABLE BORDER="0" CELLSPACING="0" CELLPADDING="1"><TR><TD><B>{name}</B></TD></TR>' + (
        f'<TR><TD><FONT POINT-SIZE="10">{_table(inside)}</FONT></TD></TR></TABLE>' if inside else "</TABLE>"
    )


def _table(rows: list[TransitionSpec]) -> str:
    lines = "".join(f'<TR><TD ALIGN="LEFT">{_row(row)}</TD></TR>' for row in rows)
    return f'<TABLE BORDER="0" CELLSPACING="0" CELLPADDING="1">{lines}</TABLE>'


def _row(row: TransitionSpec) -> str:
    guards = f'<FONT COLOR="#7a4a00">{escape(guards_text(row))}</FONT>' if row.guards else ""
    return f'<FONT COLOR="#888888" POINT-SIZE="8">{row.id} </FONT>{escape(row.event)}{guards}'


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')
