"""Which test takes which row of the spec.

A test names the rows that it takes with ``@takes(...)``; it fails if it did not take them. ``test_rows.py``
runs every test in the table and fails for each row that is not in it.
"""

from collections.abc import Callable
from functools import wraps

from .world import TAKEN

Scenario = Callable[[], None]
ROWS: dict[str, Scenario] = {}


def takes(*rows: str) -> Callable[[Scenario], Scenario]:
    """Enter a test in the table, and have it check that these rows were taken."""

    def enter(test: Scenario) -> Scenario:
        @wraps(test)
        def checked() -> None:
            TAKEN.clear()
            test()
            missed = [row for row in rows if row not in TAKEN]
            assert not missed, f"{test.__name__} did not take {', '.join(missed)}"

        for row in rows:
            ROWS.setdefault(row, checked)
        return checked

    return enter
