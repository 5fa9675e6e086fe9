"""One pair of engines for all tests, reset before each; a router of its own for a test that needs one."""

from collections.abc import Iterator

import pytest
from dfirst.connector.router import RouterSettings
from fake_engines import FakeDecodeEngine, FakePrefillEngine, free_port
from running_router import MakeRouter, Router


@pytest.fixture(scope="session")
def shared_p() -> Iterator[FakePrefillEngine]:
    engine = FakePrefillEngine()
    yield engine
    engine.stop()


@pytest.fixture(scope="session")
def shared_d() -> Iterator[FakeDecodeEngine]:
    engine = FakeDecodeEngine()
    yield engine
    engine.stop()


@pytest.fixture
def p(shared_p: FakePrefillEngine) -> FakePrefillEngine:
    shared_p.reset()
    return shared_p


@pytest.fixture
def d(shared_d: FakeDecodeEngine, p: FakePrefillEngine) -> FakeDecodeEngine:
    shared_d.reset()
    shared_d.has_arrived = lambda transfer_id: transfer_id in p.pushed
    return shared_d


@pytest.fixture
def make_router(shared_p: FakePrefillEngine, shared_d: FakeDecodeEngine) -> Iterator[MakeRouter]:
    made: list[Router] = []

    def make(**settings: object) -> Router:
        defaults = {"prefill": (shared_p.url,), "decode": (shared_d.url,), "host": "127.0.0.1"}
        made.append(Router(RouterSettings(port=free_port(), **{**defaults, **settings})))
        return made[-1]

    yield make
    for router in made:
        router.stop()


@pytest.fixture(scope="session")
def shared_router(shared_p: FakePrefillEngine, shared_d: FakeDecodeEngine) -> Iterator[Router]:
    router = Router(
        RouterSettings(prefill=(shared_p.url,), decode=(shared_d.url,), host="127.0.0.1", port=free_port())
    )
    yield router
    router.stop()


@pytest.fixture
def router(shared_router: Router, p: FakePrefillEngine, d: FakeDecodeEngine) -> Router:
    shared_router.settle()
    shared_router.canceller.calls.clear()
    shared_router.canceller.error = None
    return shared_router
