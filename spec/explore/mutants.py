"""Mutants."""

from pathlib import Path

from rich.console import Console


def hunt(only: str, json_file: Path | None, console: Console) -> bool:
    """Not yet."""
    raise ValueError("not yet")
