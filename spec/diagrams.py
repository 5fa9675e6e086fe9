"""Draws every machine of the spec, as Mermaid text and as SVG. ``dfirst diagrams`` calls it.

The files are committed, so that people find them; ``check`` says whether they are current. It compares the
Mermaid text, and of the pictures only what their rows say, since two versions of Graphviz draw the same
machine differently.
"""

import html
from collections.abc import Iterator
from pathlib import Path

import dfirst.spec
from dfirst.protocol.specification import load_machine, machine_names

from . import readme
from .dot import svg
from .mermaid import arrows, state_diagram


def write(out: Path) -> list[Path]:
    """Draw all machines into ``out`` and return the files. Drawn into the spec's own folder, the README that
    shows the same diagrams is written anew as well.
    """
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for path, text in _mermaid_files(out):
        path.write_text(text)
        written.append(path)
    if out.resolve() == own_folder().resolve():
        written.append(readme.write())
    for name in machine_names():
        path = out / f"{name}.svg"
        path.write_bytes(svg(load_machine(name)))
        written.append(path)
    return written


def check(out: Path) -> list[str]:
    """Return the names of the diagrams in ``out`` that are missing or stale."""
    stale = [path.name for path, text in _mermaid_files(out) if not path.exists() or path.read_text() != text]
    pictures = [f"{name}.svg" for name in machine_names() if not _shows(out / f"{name}.svg", name)]
    return sorted(stale + pictures)


def _shows(picture: Path, name: str) -> bool:
    """Whether a picture has the reason of every arrow's rows, which is seen when the mouse is on it."""
    if not picture.exists():
        return False
    text = html.unescape(picture.read_text())
    between = arrows(load_machine(name)).items()
    return all(row.reason in text for (source, target), rows in between if source != target for row in rows)


def own_folder() -> Path:
    """Return where the spec keeps its diagrams."""
    return Path(dfirst.spec.__path__[0]) / "diagrams"


def _mermaid_files(out: Path) -> Iterator[tuple[Path, str]]:
    for name in machine_names():
        yield out / f"{name}.mmd", state_diagram(load_machine(name))
