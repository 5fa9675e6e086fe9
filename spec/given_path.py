"""Paths of the command line: what can't be meant is refused before anything is read or written there."""

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

from .endings import fail


def not_empty(name: str) -> Callable[[str], Path]:
    """Return how a path is read: an empty one, as of an unset variable, would mean the current directory."""

    def read(text: str) -> Path:
        if not str(text):
            fail(f"{name} is '', an empty path; name one, and . for the current directory", 2)
        return Path(text)

    return read


def check_regular(file: Path) -> None:
    """Raise ``OSError`` for what is no regular file: reading a fifo or a terminal may never end."""
    mode = file.stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(file))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is no regular file; name one that is", str(file))
