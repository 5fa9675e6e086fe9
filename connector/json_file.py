"""A report as a JSON file that people and programs read."""

from pathlib import Path

from dfirst.spec.output_file import as_json


def write_json(path: Path, value: object) -> None:
    """Write a struct, or what msgspec encodes, with its directory if that is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(as_json(value))
