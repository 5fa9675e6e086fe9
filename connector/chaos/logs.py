"""Finds in the logs of engines and router what this package itself calls an error."""

import re
from pathlib import Path

_CONNECTOR = Path(__file__).parent.parent
_MODULES = "|".join(sorted(path.stem for path in _CONNECTOR.glob("*.py") if path.stem != "__init__"))
# vLLM names the file, `ERROR 11-30 00:27:04 [rank_loop.py:123] text`; the router names the logger.
_ERROR = re.compile(rf"\bERROR (?:\S+ \S+ \[(?:\S*/)?(?:{_MODULES})\.py:\d+\]|dfirst\.\S+:) (.*)")


def errors_logged(logs: Path) -> list[str]:
    """Return each of these lines in the logs of a directory, with the log's name."""
    found = []
    for log in sorted(logs.glob("*.log")):
        for line in log.read_text(errors="replace").splitlines():
            error = _ERROR.search(line)
            if error:
                found.append(f"{log.name}: {error.group(1)}")
    return found
