"""A report as a JSON file that people and programs read."""

from pathlib import Path

import msgspec


def write_json(path: Path, value: object) -> None:
    """Write a struct, or what msgspec encodes, with its directory if that is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")
