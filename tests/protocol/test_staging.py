"""Parts that an owner gathers or scatters for a mover: each is done once, and never beyond what is lent."""

import numpy as np
import pytest
from dfirst.protocol import commands
from dfirst.protocol.owner_leg import OwnerLeg
from dfirst.protocol.stages import MAX_RUNS, Slot, pack, total_bytes, unpack

from .forge import done, stop
from .rows import takes
from .world import KEY, World

RUNS = pack(np.array([1 << 20], dtype=np.int64)), pack(np.array([64], dtype=np.int64))
TOO_MUCH = RUNS[0], pack(np.array([65], dtype=np.int64))


def copying(layerwise: bool = False, slots: tuple[Slot, ...] = (Slot(1 << 30, 2, 64),)) -> World:
    """One leg copies; in a push P0 is its mover, in a pull D0."""
    world = World(met=True, slots=slots)
    if layerwise:
        world.accept()
        world.push()
    else:
        world.offer()
        world.pull()
    world.deliver()
    return world


def mover_and_owner(layerwise: bool) -> tuple[str, str]:
    return ("P0", "D0") if layerwise else ("D0", "P0")


def want(world: World, mover: str, place: int = 0, runs: tuple[bytes, bytes] = RUNS) -> None:
    [started] = world.copies[mover]
    world.give(mover, commands.PartWanted(leg=started.leg, place=place, starts=runs[0], lengths=runs[1]))


def lease(world: World, owner: str = "P0") -> OwnerLeg:
    [found] = world.cores[owner].owners[KEY].leases.values()
    return found


@takes("ML23", "ML24", "OL19", "OL22")
def test_a_part_is_staged_where_the_bytes_lie_and_the_data_path_hears_of_it():
    for layerwise in (False, True):
        one_part(layerwise)


def one_part(layerwise: bool) -> None:
    world = copying(layerwise)
    mover, owner = mover_and_owner(layerwise)
    want(world, mover, place=1)
    assert world.deliver() == [f"{mover}>{owner} Stage"]
    [part] = world.staging[owner]
    assert (part.address, part.into_blocks) == ((1 << 30) + 64, layerwise)
    assert (part.starts, part.lengths) == RUNS
    assert part.block_ids == world.cores[owner].owners[KEY].block_ids
    world.finish_part(owner)
    assert world.deliver() == [f"{owner}>{mover} Staged"]
    [ready] = world.ready[mover]
    assert (ready.place, ready.slot) == (1, Slot(1 << 30, 2, 64))


def test_a_writer_hears_of_its_slot_before_there_is_anything_to_scatter():
    world = copying(layerwise=True)
    want(world, "P0", runs=(b"", b""))
    world.deliver()
    world.finish_part("D0")
    world.deliver()
    assert world.ready["P0"][0].slot == Slot(1 << 30, 2, 64)


@takes("OL20")
def test_what_finds_no_room_is_left_to_the_mover():
    slots = (Slot(1 << 30, 2, 64),)
    refused((), 0, RUNS)
    refused(slots, 2, RUNS)
    refused(slots, 0, TOO_MUCH)
    refused(slots, 0, (b"odd", b"odd"))


def refused(slots: tuple[Slot, ...], place: int, runs: tuple[bytes, bytes]) -> None:
    world = copying(slots=slots)
    want(world, "D0", place, runs)
    assert world.deliver() == ["D0>P0 Stage", "P0>D0 Staged"]
    assert world.staging["P0"] == []
    assert [ready.slot for ready in world.ready["D0"]] == [None]


def test_a_part_that_could_not_be_staged_is_left_to_the_mover():
    world = copying()
    want(world, "D0")
    world.deliver()
    world.finish_part("P0", reason="not lent")
    world.deliver()
    assert [ready.slot for ready in world.ready["D0"]] == [None]


@takes("ML25", "OL21")
def test_a_part_whose_answer_was_lost_is_asked_for_again_and_done_once():
    world = copying()
    want(world, "D0")
    world.deliver()
    world.lose("Staged")
    world.finish_part("P0")
    world.deliver()
    assert world.ready["D0"] == []
    world.lose_nothing()
    said = world.advance(world.timing.query_retry_seconds)
    assert said == ["D0>P0 Stage", "P0>D0 Staged"]
    assert world.staging["P0"] == []
    assert len(world.ready["D0"]) == 1
    assert "Stage" not in " ".join(world.advance(2 * world.timing.query_retry_seconds))


def test_a_part_that_is_at_work_is_not_begun_again():
    world = copying()
    want(world, "D0")
    world.deliver()
    said = world.advance(3 * world.timing.query_retry_seconds)
    assert "P0>D0 Staged" not in said
    assert len(world.staging["P0"]) == 1


@takes("OL23", "OL24")
def test_blocks_and_slot_are_held_until_nothing_is_at_work():
    for end in (done, stop):
        world = copying(layerwise=True)
        want(world, "P0")
        world.deliver()
        end(world, "P0", "D0")
        world.deliver()
        assert world.reports == []
        assert lease(world, "D0").live
        world.finish_part("D0")
        world.deliver()
        assert [outcome for rank, outcome in world.reports if rank == "D0"] == [
            "received" if end is done else "failed"
        ]
        assert lease(world, "D0").slot is None


@takes("OL25")
def test_a_lease_that_ran_out_holds_its_blocks_while_a_part_is_at_work():
    world = copying()
    want(world, "D0")
    world.deliver()
    world.lose()
    world.advance(2 * world.timing.lease_seconds)
    assert lease(world).state == "EXPIRED"
    assert ("P0", "sent") not in world.reports
    world.finish_part("P0")
    world.advance(world.timing.hold_seconds)
    assert ("P0", "sent") in world.reports


def test_a_slot_goes_to_the_next_lease_when_the_first_is_over():
    world = copying()
    want(world, "D0")
    world.deliver()
    world.finish_part("P0")
    world.deliver()
    world.finish_copies("D0")
    world.deliver()
    assert world.cores["P0"].slots.next() == Slot(1 << 30, 2, 64)


def test_a_stage_of_somebody_who_has_no_lease_is_not_heard():
    world = copying()
    want(world, "D0")
    [packet] = world.network
    world.network.clear()
    world.finish_copies("D0")
    world.deliver()
    world.hear("P0", packet.message, "D0")
    assert world.staging["P0"] == []


def test_lists_of_runs_travel_whole():
    starts = np.array([5, 1 << 40, 9], dtype=np.int64)
    for lengths in (np.array([1, 2, 3], dtype=np.int64), np.array([4, 4, 4], dtype=np.int64)):
        got = unpack(pack(starts), pack(lengths))
        assert [column.tolist() for column in got] == [starts.tolist(), lengths.tolist()]
    assert len(pack(np.full(100, 7, dtype=np.int64))) == 8
    assert total_bytes(pack(starts), pack(np.array([4, 4, 4], dtype=np.int64))) == 12
    assert total_bytes(b"", b"") == 0


@pytest.mark.parametrize(
    ("starts", "lengths", "reason"),
    [
        (b"odd", b"", "8-byte numbers"),
        (bytes(16), bytes(24), "no list"),
        (bytes(8), bytes(8), "a run of 0 bytes"),
        (bytes(8 * (MAX_RUNS + 1)), (1).to_bytes(8, "little"), f"at most {MAX_RUNS}"),
    ],
)
def test_bytes_that_are_no_list_of_runs_are_refused(starts, lengths, reason):
    with pytest.raises(ValueError, match=reason):
        total_bytes(starts, lengths)
