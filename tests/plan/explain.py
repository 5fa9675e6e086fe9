"""Says in words which byte is wrong."""

import numpy as np
import numpy.typing as npt

from .memory import BEHIND, FOREIGN, PADDING, UNTOUCHED, RankMemory

NAMES = {
    UNTOUCHED: "untouched",
    FOREIGN: "a byte of a foreign block",
    BEHIND: "a byte that was not computed",
    PADDING: "padding",
}


def first_of(got: RankMemory, wanted: RankMemory, wrong: npt.NDArray[np.bool_]) -> str:
    """Return how many bytes of a rank are wrong, and where and what the first one is."""
    places = np.flatnonzero(wrong)
    at = int(places[0])
    found, right = int(got.arena[at]), int(wanted.arena[at])
    words = f"is {NAMES.get(found, found)} and should be {NAMES.get(right, right)}"
    return f"{len(places)} bytes are wrong; the first, in {_where(got, at)}, {words}"


def _where(memory: RankMemory, at: int) -> str:
    for tensor in memory.tensors:
        offset = memory.base + at - int(tensor.view.ctypes.data)
        # The axes from the widest stride inwards: a block may lie inside a head, and a layer inside a block.
        axes = sorted(range(4), key=lambda axis: -tensor.view.strides[axis])
        place = [0, 0, 0, 0]
        for axis in axes:
            place[axis], offset = divmod(offset, tensor.view.strides[axis])
        if all(0 <= index < extent for index, extent in zip(place, tensor.view.shape, strict=True)):
            block, head, slot, byte = place
            where = f"block {block}, its head {head}, slot {slot}, byte {byte}"
            return f"layer {tensor.layer} ({tensor.form.name}), {where}"
    return "no tensor"
