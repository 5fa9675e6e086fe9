"""The staging memory of a rank, and what is gathered into it and scattered out of it for movers.

One half is lent, a slot for a lease, so that movers read and write long runs instead of many short ones (the
machine ``owner_leg`` says when). The other half is for this rank's own copies. A slot has places, so that one
part is gathered, one is sent and one is scattered at the same time. Places are small on purpose: what has
just been gathered is still in the processor's cache when it is sent.
"""

import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from ..protocol.commands import PartStaged
from ..protocol.effects import StageBlocks
from ..protocol.messages import TransferKey
from ..protocol.shards import Shard
from ..protocol.stages import Slot, unpack
from .cost_model import CostModel
from .kv_memory import KvMemory, Runs
from .lent_memory import LentMemory

logger = logging.getLogger(__name__)

PLACES = 4
PLACE_BYTES = 2 << 20
SLOT_BYTES = PLACES * PLACE_BYTES
_REMEMBERED = 16


@dataclass(frozen=True)
class Staging:
    """What the data path needs to stage copies."""

    memory: KvMemory
    costs: CostModel
    own: "OwnSlots"


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


def share(address: int, size: int) -> tuple[tuple[Slot, ...], OwnSlots]:
    """Divide staging memory into slots to lend and slots of one's own; of an odd number, one more is lent."""
    addresses = [address + number * SLOT_BYTES for number in range(size // SLOT_BYTES)]
    lent = -(-len(addresses) // 2)
    slots = tuple(Slot(address, PLACES, PLACE_BYTES) for address in addresses[:lent])
    return slots, OwnSlots(addresses[lent:])


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
                self._ended(_ended(part, reason))
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
        if known is None or known.block_ids is not part.block_ids:
            known = self._lent_to[part.key] = LentMemory(self._shard, part.block_ids)
            if len(self._lent_to) > _REMEMBERED:
                self._lent_to.popitem(last=False)
        return known


def _ended(part: StageBlocks, reason: str) -> PartStaged:
    return PartStaged(key=part.key, mover=part.mover, sequence=part.sequence, place=part.place, reason=reason)
