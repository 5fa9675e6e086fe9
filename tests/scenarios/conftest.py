"""`pytest tests/scenarios --rewrite` records what comes out of every scenario; look at the diff."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="record the scenarios' outputs anew")
