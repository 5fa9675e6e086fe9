"""Whatever is lost, repeated, late, aborted or restarted: what real cores then write conforms to the spec."""

from pathlib import Path

import pytest
from dfirst.spec.conform import conform

from tests.protocol import test_faults
from tests.protocol.test_faults import Run, WatchedWorld, bound_seconds

from .traced_world import TracedWorld


@pytest.mark.parametrize("block", range(5))
def test_a_random_run_conforms(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(block * 20, block * 20 + 20):
        directory = tmp_path / str(seed)

        class World(WatchedWorld, TracedWorld):
            def __init__(self, *args, directory=directory, **kwargs) -> None:
                super().__init__(directory, *args, **kwargs)

        with monkeypatch.context() as patched:
            patched.setattr(test_faults, "WatchedWorld", World)
            run = Run(seed)
        run.chaos()
        run.settle(bound_seconds(run))
        run.world.end()
        found = conform([directory])
        assert found.violation is None, f"seed {seed}: {found.violation.sentence}"
        assert found.transfers >= 1
