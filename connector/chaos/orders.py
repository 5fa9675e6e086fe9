"""What a bench orders a worker to do wrong, and how the worker tells that it did.

Both go through one directory, which the environment variable `DFIRST_FAULTS` names: the bench appends orders
to one file, and each worker appends what it has carried out to a file of its own. An order waits in the
worker until something comes by that it fits, and is carried out once.
"""

import logging
import os
import random
import threading
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Literal

import msgspec

logger = logging.getLogger(__name__)

ORDERS = "orders.jsonl"
INJECTED = "injected-{engine}-{rank}-{process}.jsonl"

MessageFault = Literal["lost", "delayed", "repeated", "reordered", "garbled"]
CopyFault = Literal["copy fails", "copy stalls", "copy in part"]
Fault = MessageFault | CopyFault
MESSAGE_FAULTS: tuple[MessageFault, ...] = ("lost", "delayed", "repeated", "reordered", "garbled")
COPY_FAULTS: tuple[CopyFault, ...] = ("copy fails", "copy stalls", "copy in part")


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """One fault, of the next message or copy that fits; with `for_seconds`, of all of them for so long."""

    number: int
    engine: str
    """The configured name, without the part that vLLM adds for a data-parallel rank."""
    fault: Fault
    of: str = ""
    """The tag of a message, or `read` or `write` of a copy; empty for any."""
    seconds: float = 0.0
    """How long a message is held back, or a copy stands still."""
    for_seconds: float = 0.0
    given: float = 0.0
    """When, in seconds since 1970."""

    def fits(self, engine: str, fault: Collection[str], of: str) -> bool:
        mine = engine == self.engine or engine.startswith(f"{self.engine}_dp")
        return mine and self.fault in fault and self.of in ("", of)

    def is_over(self, now: float) -> bool:
        return self.for_seconds > 0 and now >= self.given + self.for_seconds


class Injected(msgspec.Struct, frozen=True, kw_only=True):
    """An order that was carried out."""

    number: int
    time: float
    engine: str
    rank: int
    fault: str
    of: str


class OrderBook:
    """The worker's half. Any thread may ask; nothing here waits."""

    def __init__(self, directory: Path, engine: str, rank: int) -> None:
        """Raises `ValueError` if no bench has set the directory up."""
        self._engine = engine
        self._rank = rank
        self._lock = threading.Lock()
        self._open: list[Order] = []
        try:
            self._orders = (directory / ORDERS).open("rb")
            name = INJECTED.format(engine=engine.replace("/", "_"), rank=rank, process=os.getpid())
            self._injected = (directory / name).open("ab", buffering=0)
        except OSError as error:
            raise ValueError(
                f"no bench has prepared faults in {directory} ({error.strerror}): unset the variable that "
                "names it, it makes an engine go wrong on purpose"
            ) from error
        # What was ordered before this process came was for another one.
        self._orders.seek(0, os.SEEK_END)
        self._rest = b""

    def take(self, faults: Collection[str], of: str) -> Order | None:
        """Return the oldest order for this, if there is one, and note it as carried out."""
        now = time.time()
        with self._lock:
            self._read()
            self._open = [order for order in self._open if not order.is_over(now)]
            order = next((order for order in self._open if order.fits(self._engine, faults, of)), None)
            if order is None:
                return None
            if not order.for_seconds:
                self._open.remove(order)
            self._tell(order, of, now)
        return order

    def _read(self) -> None:
        found = self._orders.read()
        if not found:
            return
        *lines, self._rest = (self._rest + found).split(b"\n")
        self._open += [_order.decode(line) for line in lines]

    def _tell(self, order: Order, of: str, now: float) -> None:
        done = Injected(
            number=order.number, time=now, engine=self._engine, rank=self._rank, fault=order.fault, of=of
        )
        self._injected.write(msgspec.json.encode(done) + b"\n")
        logger.warning("fault %d: %s of %s", order.number, order.fault, of)


class FaultDesk:
    """The bench's half: where orders are written and what was carried out is read."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._orders = (directory / ORDERS).open("ab", buffering=0)
        self._number = 0

    def order(
        self, engine: str, fault: Fault, of: str = "", *, seconds: float = 0.0, for_seconds: float = 0.0
    ) -> Order:
        """Give an order to all ranks of an engine: each one that it fits carries it out."""
        self._number += 1
        order = Order(
            number=self._number,
            engine=engine,
            fault=fault,
            of=of,
            seconds=seconds,
            for_seconds=for_seconds,
            given=time.time(),
        )
        self._orders.write(msgspec.json.encode(order) + b"\n")
        return order

    def injected(self) -> list[Injected]:
        """Return all that was carried out, by time."""
        found: list[Injected] = []
        for path in self.directory.glob(INJECTED.format(engine="*", rank="*", process="*")):
            # A worker that was killed may have left half a line.
            found += [_injected.decode(line) for line in path.read_bytes().split(b"\n")[:-1]]
        return sorted(found, key=lambda one: one.time)

    def close(self) -> None:
        self._orders.close()


def garble(frames: Iterable[bytes], randomness: random.Random) -> list[bytes]:
    """Return the frames of a message as something that is none.

    What a checksum cannot tell from a message (a block number with another value) is no fault of this kind:
    TCP and, where it is used, CURVE keep such a message from arriving.
    """
    header, body = frames
    cut = randomness.randrange(len(body))
    kinds = (
        [header, body[:cut]],
        [header, randomness.randbytes(len(body))],
        [header, b"\xc1" + body[1:]],  # a byte that msgpack never uses
        [header[:-1], body],
        [header],
        [header, body, body],
        [b"", b""],
    )
    return list(randomness.choice(kinds))


_order = msgspec.json.Decoder(Order)
_injected = msgspec.json.Decoder(Injected)
