"""Everything in this directory starts real engines, and is marked so. The engines are in `engines.py`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from .engines import EngineHouse

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineHouse]:
    house = EngineHouse(tmp_path_factory.mktemp("engines"))
    yield house
    house.close()
