"""Gather and scatter move exactly the bytes of a list, on the host and by the device's own operations."""

import numpy as np
import pytest
import torch
from dfirst.connector.kv_memory import DeviceMemory, HostMemory, KvMemory, Runs, joined
from dfirst.connector.lent_memory import LentMemory
from dfirst.protocol.shards import Region, Shard

SIZE = 1 << 16


@pytest.fixture(params=["host", "device"])
def memory(request):
    """Return (caches, buffer, the memory made of them): two caches and a staging buffer."""
    generator = np.random.default_rng(5)
    arrays = [generator.integers(0, 256, SIZE, dtype=np.uint8) for _ in range(3)]
    made: KvMemory
    if request.param == "host":
        made = HostMemory([(array.ctypes.data, SIZE) for array in arrays])
    else:
        made = DeviceMemory([torch.from_numpy(array) for array in arrays])
    return arrays[:2], arrays[2], made


def runs_of(arrays, places) -> Runs:
    """Return runs from (array, offset, length)."""
    starts = [arrays[number].ctypes.data + offset for number, offset, _ in places]
    lengths = [length for _, _, length in places]
    return Runs(np.array(starts, dtype=np.int64), np.array(lengths, dtype=np.int64))


def bytes_of(arrays, places) -> np.ndarray:
    return np.concatenate([arrays[number][offset : offset + length] for number, offset, length in places])


def drawn(seed: int, grain: int) -> list[tuple[int, int, int]]:
    """Draw runs that do not overlap, in any order, of one length or of several, in both caches."""
    generator = np.random.default_rng(seed)
    slots = SIZE // (8 * grain)
    places = []
    for place in generator.permutation(2 * slots)[:40].tolist():
        count = int(generator.integers(1, 9)) if seed % 2 else 4
        # In some lists all runs begin at multiples of eight grains, in others at multiples of one.
        first = int(generator.integers(0, 9 - count)) if seed % 3 else 0
        places.append((place // slots, (place % slots * 8 + first) * grain, count * grain))
    return places


@pytest.mark.parametrize("grain", [32, 64, 144])
@pytest.mark.parametrize("seed", range(6))
def test_what_is_gathered_is_what_lies_there_and_nothing_else_changes(memory, seed, grain):
    caches, buffer, made = memory
    places = drawn(seed, grain)
    before, at = [cache.copy() for cache in caches], 48
    wanted, rest = bytes_of(caches, places), buffer.copy()
    made.gather(runs_of(caches, places), buffer.ctypes.data + at)
    assert (buffer[at : at + len(wanted)] == wanted).all()
    assert (buffer[:at] == rest[:at]).all()
    assert (buffer[at + len(wanted) :] == rest[at + len(wanted) :]).all()
    assert all((cache == old).all() for cache, old in zip(caches, before, strict=True))


@pytest.mark.parametrize("grain", [32, 64, 144])
@pytest.mark.parametrize("seed", range(6))
def test_what_is_scattered_arrives_and_nothing_else_changes(memory, seed, grain):
    caches, buffer, made = memory
    places = drawn(seed, grain)
    expected, offset = [cache.copy() for cache in caches], 16
    for number, start, length in places:
        expected[number][start : start + length] = buffer[offset : offset + length]
        offset += length
    made.scatter(runs_of(caches, places), buffer.ctypes.data + 16)
    assert all((cache == wanted).all() for cache, wanted in zip(caches, expected, strict=True))


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ((0, SIZE - 32, 64), "not in the registered memory"),
        ((0, 64, (1 << 63) - 64), "not in the registered memory"),
        ((0, 8, 40), "multiples of 8 bytes"),
    ],
)
def test_a_list_that_cannot_be_moved_moves_nothing(memory, place, reason):
    caches, buffer, made = memory
    before = buffer.copy()
    with pytest.raises(ValueError, match=reason):
        made.gather(runs_of(caches, [(0, 0, 64), place]), buffer.ctypes.data)
    assert (buffer == before).all()


def test_a_buffer_that_is_not_registered_is_refused(memory):
    caches, _, made = memory
    stranger = np.zeros(64, dtype=np.uint8)
    with pytest.raises(ValueError, match="not in the registered memory"):
        made.gather(runs_of(caches, [(0, 0, 64)]), stranger.ctypes.data)
    assert (stranger == 0).all()


def test_no_runs_are_nothing_to_do(memory):
    caches, buffer, made = memory
    before = buffer.copy()
    made.gather(runs_of(caches, []), buffer.ctypes.data)
    assert (buffer == before).all()


def test_neighbours_are_made_one():
    starts, lengths = np.array([0, 64, 200, 264], dtype=np.int64), np.array([64, 64, 64, 32], dtype=np.int64)
    made = joined(starts, lengths)
    assert (made.starts.tolist(), made.lengths.tolist()) == ([0, 200], [128, 96])


def shard_of(heads_outside_blocks: bool) -> Shard:
    """Two heads, four tokens of 32 bytes, ten blocks; heads in a block, or all blocks of a head together."""
    block, head = (128, 1280) if heads_outside_blocks else (256, 128)
    region = Region(0, "kv", 4096, 10, block, head, 32, 32)
    return Shard(total_kv_heads=2, first_kv_head=0, kv_head_count=2, block_size=4, regions=(region,))


def runs_at(*places: tuple[int, int]) -> Runs:
    return Runs(*(np.array(column, dtype=np.int64) for column in zip(*places, strict=True)))


def test_only_lent_blocks_may_be_touched():
    lent = LentMemory(shard_of(False), (2, 3, 7))
    lent.check(runs_at((4096 + 512, 512), (4096 + 7 * 256 + 32, 32)))
    for start, length in ((4096 + 256, 32), (4096 + 512, 513), (4096 + 4 * 256, 32), (0, 32), (1 << 40, 32)):
        with pytest.raises(ValueError, match="not in the blocks that are lent"):
            lent.check(runs_at((4096 + 512, 32), (start, length)))


def test_blocks_whose_heads_lie_apart_are_lent_head_by_head():
    lent = LentMemory(shard_of(True), (2,))
    lent.check(runs_at((4096 + 256, 128), (4096 + 1280 + 256, 128)))
    with pytest.raises(ValueError, match="not in the blocks that are lent"):
        lent.check(runs_at((4096 + 256, 129)))


def test_a_run_whose_end_is_beyond_all_numbers_is_not_lent():
    lent = LentMemory(shard_of(False), (2, 3))
    with pytest.raises(ValueError, match="not in the blocks that are lent"):
        lent.check(runs_at((4096 + 512, (1 << 63) - 32)))


def test_where_nothing_is_lent_nothing_is_touched():
    with pytest.raises(ValueError, match="not in the blocks that are lent"):
        LentMemory(shard_of(False), ()).check(runs_at((4096, 32)))
