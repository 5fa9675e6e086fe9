"""The staging memory of a rank, and what is gathered into it and scattered out of it for movers.

One half is lent, a slot for a lease, so that movers read and write long runs instead of many short ones (the
machine ``owner_leg`` says when). The other half is for this rank's own copies. A slot has places, so that one
part is gathered, one is sent and one is scattered at the same time.
"""

import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ..protocol.commands import PartStaged
from ..protocol.effects import StageBlocks
from ..protocol.messages import TransferKey
from ..protocol.shards import Shard
from ..protocol.stages import Slot, unpack
from .cost_model import CostModel, measure
from .kv_memory import DeviceMemory, HostMemory, KvMemory, Runs
from .lent_memory import LentMemory

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

LEAST_SLOTS, PLACES = 4, 4
PLACE_BYTES = 8 << 20
"""Of parts half as large there would be twice as many questions and answers."""
_REMEMBERED = 16


def power_of_two(most: int) -> int:
    """Return the largest power of two that is not more; 0 if there is none."""
    return 1 << most.bit_length() >> 1


class OwnSlots:
    """Slots for this rank's own copies; each belongs to one thread at a time."""

    def __init__(self, addresses: list[int]) -> None:
        self._free = list(addresses)
        self._lock = threading.Lock()

    def take(self) -> int | None:
        """Return the address of a free slot; None if there is none."""
        with self._lock:
            return self._free.pop() if self._free else None

    def give_back(self, address: int) -> None:
        """Nothing touches this slot any more."""
        with self._lock:
            self._free.append(address)


@dataclass(frozen=True)
class Staging:
    """A rank's staging memory, divided."""

    memory: KvMemory
    """The caches and the staging memory."""
    costs: CostModel
    slots: tuple[Slot, ...]
    """To lend."""
    own: OwnSlots
    place_bytes: int
    held: object
    """What owns the staging memory."""


class CopyEngine(Protocol):
    """What staging needs of the engine at the start."""

    data_address: str

    def register(self, ranges: Sequence[tuple[int, int]], /) -> None: ...
    def read(self, peer: str, local: list[int], remote: list[int], lengths: list[int], /) -> bool: ...
    def forget(self, peer: str, /) -> None: ...


def open_staging(
    engine: CopyEngine,
    ranges: Sequence[tuple[int, int]],
    size: int,
    tensors: "Sequence[torch.Tensor]" = (),
    place_bytes: int = PLACE_BYTES,
    costs: CostModel | None = None,
) -> Staging | None:
    """Register ``size`` bytes of staging memory and try out what copies cost, unless ``costs`` says so; None
    where that cannot be had.

    ``ranges`` are the caches' (address, length). Caches on an accelerator are given as flat byte tensors too,
    and the staging memory is then on that device.
    """
    # With little memory, small slots: a mover that finds none free copies directly.
    place_bytes = min(place_bytes, power_of_two(size // (LEAST_SLOTS * PLACES)))
    if place_bytes == 0:
        return None
    slot_bytes = PLACES * place_bytes
    count = size // slot_bytes
    memory: KvMemory
    if tensors:
        import torch

        buffer = torch.zeros(count * slot_bytes, dtype=torch.uint8, device=tensors[0].device)
        held, address = buffer, buffer.data_ptr()
        memory = DeviceMemory([*tensors, buffer])
    else:
        held = np.zeros(count * slot_bytes, dtype=np.uint8)
        address = held.ctypes.data
        memory = HostMemory([*ranges, (address, held.nbytes)])
    engine.register([(address, count * slot_bytes)])
    here = engine.data_address
    if costs is None:
        costs = measure(lambda *columns: engine.read(here, *columns), memory, address, slot_bytes)
        engine.forget(here)
    if costs is None:
        logger.warning("copies from %s to itself fail, so nothing is staged", here)
        return None
    logger.info(
        "a copy costs %.1f us and %.2f ns a byte here, a local one %.2f ns a byte",
        costs.descriptor * 1e6,
        costs.byte * 1e9,
        costs.copied_byte * 1e9,
    )
    lent = -(-count // 2)
    addresses = [address + number * slot_bytes for number in range(count)]
    slots = tuple(Slot(start, PLACES, place_bytes) for start in addresses[:lent])
    return Staging(memory, costs, slots, OwnSlots(addresses[lent:]), place_bytes, held)


class Stager:
    """Gathers and scatters for movers, one part after the other, in a thread of its own."""

    def __init__(self, memory: KvMemory, shard: Shard, ended: Callable[[PartStaged], None]) -> None:
        """``ended`` is called from that thread, once for each part."""
        self._memory = memory
        self._shard = shard
        self._lent_to: OrderedDict[TransferKey, LentMemory] = OrderedDict()
        self._ended = ended
        self._parts: queue.SimpleQueue[StageBlocks | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="dfirst-stage", daemon=True)
        self._thread.start()

    def stage(self, part: StageBlocks) -> None:
        """Do this when all before it is done; returns at once."""
        self._parts.put(part)

    def stop(self, timeout_seconds: float) -> bool:
        """End after what was asked for; False if that took longer."""
        self._parts.put(None)
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (part := self._parts.get()) is not None:
            reason = ""
            try:
                self._move(part)
            except Exception as error:
                # The mover hears that it has to copy this directly.
                reason = f"{type(error).__name__}: {error}"
                logger.warning(
                    "%s: a part is not staged",
                    part.key.transfer_id,
                    exc_info=not isinstance(error, ValueError),
                )
            try:
                self._ended(PartStaged(key=part.key, mover=part.mover, place=part.place, reason=reason))
            except Exception:
                logger.exception("%s: the end of a part could not be reported", part.key.transfer_id)

    def _move(self, part: StageBlocks) -> None:
        runs = Runs(*unpack(part.starts, part.lengths))
        self._lent(part).check(runs)
        if part.into_blocks:
            self._memory.scatter(runs, part.address)
        else:
            self._memory.gather(runs, part.address)

    def _lent(self, part: StageBlocks) -> LentMemory:
        """Return what is lent; made once for the parts of a transfer that follow each other."""
        known = self._lent_to.get(part.key)
        if known is None or known.block_ids != part.block_ids:
            known = self._lent_to[part.key] = LentMemory(self._shard, part.block_ids)
            if len(self._lent_to) > _REMEMBERED:
                self._lent_to.popitem(last=False)
        return known
