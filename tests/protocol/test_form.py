"""The core computes and nothing else: no I/O, no thread, no clock, no random number (rule F1)."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import dfirst.protocol
import pytest
from dfirst.spec import generate

FILES = sorted(Path(dfirst.protocol.__path__[0]).glob("*.py"))
ALLOWED = {"msgspec", "transitions", "numpy"}
FORBIDDEN = {
    "asyncio",
    "concurrent",
    "datetime",
    "http",
    "io",
    "logging",
    "multiprocessing",
    "os",
    "queue",
    "random",
    "sched",
    "secrets",
    "select",
    "selectors",
    "signal",
    "socket",
    "ssl",
    "subprocess",
    "threading",
    "time",
    "urllib",
    "uuid",
}
"""Modules of the standard library that would let the world in."""


def imported(file: Path) -> Iterator[str]:
    """Yield the top-level modules that a file imports; relative imports stay inside the core."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield str(node.module).split(".")[0]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_core_imports_nothing_that_touches_the_world(file):
    allowed = (sys.stdlib_module_names - FORBIDDEN) | ALLOWED
    foreign = sorted(set(imported(file)) - allowed)
    assert not foreign, f"protocol/{file.name} imports {', '.join(foreign)}"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_core_opens_and_prints_nothing(file):
    calls = [node.func for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
    names = {call.id for call in calls if isinstance(call, ast.Name)}
    assert not names & {"open", "print", "input", "exec", "eval", "__import__"}


def test_the_generated_files_say_what_the_spec_says():
    assert generate.stale() == []


def test_the_core_state_changes_only_in_its_machines():
    """Nobody but a row that is taken and the first line of a new object writes ``state`` (rule F2)."""
    writes = [
        (file.name, node.lineno)
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "state" and isinstance(node.ctx, ast.Store)
    ]
    assert sorted({name for name, _ in writes}) == ["binding.py", "entity.py", "scheduler.py"]
    assert len(writes) == 3
