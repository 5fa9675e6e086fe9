"""What all tests share: a collector of garbage that leaves the libraries alone, and engines that end soon."""

import atexit
import gc
from collections.abc import Iterator

import pytest
from dfirst.connector import listeners

ACCEPT_SECONDS = 0.02


def pytest_sessionstart() -> None:
    gc.disable()


def pytest_collection_finish() -> None:
    """vLLM and torch are a million objects that stay: looking through them again and again takes seconds."""
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)


@pytest.fixture(scope="session", autouse=True)
def engines_that_end_soon() -> Iterator[None]:
    """Tests make and drop hundreds of engine objects, each of which waits for its listener at its end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(listeners, "_ACCEPT_SECONDS", ACCEPT_SECONDS)
        yield
