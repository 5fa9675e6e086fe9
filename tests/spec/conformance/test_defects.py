"""Defects in the running code, put back one at a time: the trace that it then writes is refused."""

from pathlib import Path

import pytest
from dfirst.protocol import mover_leg, owner_leg
from dfirst.protocol.owner_leg import OwnerLeg
from dfirst.protocol.owner_transfer import OwnerTransfer
from dfirst.protocol.timing import Timing
from dfirst.spec.conform import conform

from .traced_world import TracedWorld

SHORT = Timing(lease_seconds=4.0, copy_timeout_seconds=3.0, stall_allowance_seconds=1.0)


def two_readers(directory: Path) -> None:
    """One prefill rank, two readers; the second one reads on when the first is done."""
    world = TracedWorld(directory, 1, 2, met=True)
    world.offer()
    world.pull()
    world.deliver()
    world.finish_copies("D0")
    world.advance(1.0)
    world.finish_copies("D1")
    world.advance(1.0)
    world.end()


def silent_writer(directory: Path) -> None:
    """The writer is cut off for good while it writes."""
    world = TracedWorld(directory, 1, 1, timing=SHORT, met=True)
    world.accept()
    world.push()
    world.deliver()
    world.advance(10.0, deliver=False)


def late_reader(directory: Path) -> None:
    """The reader is cut off, and its reads end after its lease."""
    world = TracedWorld(directory, 1, 1, timing=SHORT, met=True)
    world.offer()
    world.pull()
    world.deliver()
    world.advance(5.0, deliver=False)
    world.finish_copies("D0")
    world.advance(1.0)
    world.end()


def rule(directory: Path) -> str:
    violation = conform([directory]).violation
    return violation.rule if violation else ""


@pytest.mark.parametrize("story", [two_readers, silent_writer, late_reader])
def test_the_code_as_it_is_conforms(story, tmp_path: Path) -> None:
    story(tmp_path)
    assert rule(tmp_path) == ""


def test_a_rank_that_frees_at_the_first_of_two_dones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OwnerLeg, "live", property(lambda lease: False))
    monkeypatch.setattr(OwnerTransfer, "expected_states", lambda owner: ["DONE"])
    two_readers(tmp_path)
    assert rule(tmp_path) == "S4"


def test_a_rank_that_looks_its_readers_up_under_another_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OwnerTransfer, "expected", lambda owner: frozenset({0}))
    two_readers(tmp_path)
    assert rule(tmp_path) == "S4"


def test_an_owner_of_pushed_blocks_that_waits_for_the_lease_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner_leg, "owner_end", lambda timing, now, tail: now + timing.lease_seconds)
    silent_writer(tmp_path)
    assert rule(tmp_path) == "R3"


def test_a_mover_that_takes_no_end_of_its_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mover_leg, "mover_end", lambda timing, asked_at, lease: asked_at + 100.0)
    late_reader(tmp_path)
    assert rule(tmp_path) == "S1"


def test_an_owner_that_takes_its_blocks_back_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner_leg, "owner_end", lambda timing, now, tail: now + timing.lease_seconds / 2)
    late_reader(tmp_path)
    assert rule(tmp_path) == "R1"
