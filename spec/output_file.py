"""Files that a command writes: with their directories, and refused in one sentence that names the option."""

import errno
import os
from pathlib import Path

import msgspec

from .endings import fail


def prepare(option: str, file: Path | None, suffix: str = "") -> None:
    """Make the file's directory, or refuse the file before there is work to lose; None was not given."""
    if file is None:
        return
    if suffix and file.suffix.lower() != suffix:
        fail(f"{option} is {file}, but what is written is {suffix[1:].upper()}; end its name in {suffix}", 2)
    try:
        if file.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        _make(file.parent)
        if not os.access(file if file.exists() else file.parent, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        _refuse(option, file, error)


def as_json(value: object) -> bytes:
    """Return a struct, or what else msgspec encodes, as a JSON file that people and programs read."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"


def write(option: str, file: Path, content: bytes) -> None:
    """Write the file, with its directory if that is missing."""
    try:
        _make(file.parent)
        file.write_bytes(content)
    except OSError as error:
        _refuse(option, file, error)


def _make(directory: Path) -> None:
    if directory.exists() and not directory.is_dir():
        # mkdir would say that the file exists.
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    directory.mkdir(parents=True, exist_ok=True)


def _refuse(option: str, file: Path, error: OSError) -> None:
    fail(f"{option}: {file} cannot be written: {error.strerror}; name a file where you may write", 2)
