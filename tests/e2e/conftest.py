"""Everything in this directory starts real engines, and is marked so. The engines are in `engines.py`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from .engines import EngineHouse

HERE = Path(__file__).parent
ORDER = (
    # Starts engines of its own: before any others run.
    "test_chaos",
    # One pair that recomputes, and at the end gets its engines killed.
    *("test_broken_transfers", "test_gone_clients", "test_no_wait", "test_crashes"),
    # One that fails.
    "test_fail_policy",
    # A pair for each layout.
    *("test_data_parallel", "test_hand_over"),
)
"""Files that ask for the same engines follow one another; all others come behind these."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if HERE in item.path.parents]
    for item in ours:
        item.add_marker(pytest.mark.e2e)
    others = [item for item in items if HERE not in item.path.parents]
    items[:] = others + sorted(ours, key=_place)


def _place(item: pytest.Item) -> int:
    name = item.path.stem
    return ORDER.index(name) if name in ORDER else len(ORDER)


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineHouse]:
    house = EngineHouse(tmp_path_factory.mktemp("engines"))
    with pytest.MonkeyPatch.context() as patch:
        # Engine objects of earlier tests have left their own time-out in this process's environment.
        patch.delenv("MC_TRANSFER_TIMEOUT", raising=False)
        yield house
        house.close()
