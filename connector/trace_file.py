"""One file of a trace: makes the lines of spec/trace.toml from what the protocol's objects say.

A trace that cannot be written is said once and then given up: it never stops a transfer. Lines may come from
any thread; their times never go back.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from ..protocol import messages as wire
from ..protocol.commands import LegKey
from ..protocol.effects import Report
from ..protocol.messages import Message, Sender, TransferKey
from ..protocol.mover_leg import MoverLeg
from ..protocol.owner_leg import OwnerLeg
from ..protocol.owner_transfer import OwnerTransfer
from ..protocol.plan import LayoutMismatch
from ..protocol.scheduler import RequestEntity
from ..protocol.specification import MachineSpec, TransitionSpec
from ..protocol.timing import Timing
from ..protocol.trace_lines import (
    CopyLine,
    EndLine,
    ExpectLine,
    MessageLine,
    ReportLine,
    StartLine,
    StepLine,
    TraceLine,
)

logger = logging.getLogger(__name__)

MAX_NAMES = 65_536
"""Ranks and routes whose names are remembered for the messages that are sent to them."""
NO_KEY = TransferKey("", 0)
REPORTS = ("report_sent", "report_received")

L = TypeVar("L", bound=TraceLine)


class TracedMachine(Protocol):
    """The part of a bound machine that a trace names."""

    spec: MachineSpec


class Traced(Protocol):
    """What a trace needs of the object that took a step."""

    state: str

    @property
    def machine(self) -> TracedMachine: ...

    @property
    def key(self) -> TransferKey: ...


class TraceFile:
    """Writes the lines of one rank, or of a scheduler side."""

    def __init__(
        self, path: Path, process: str, engine: str, rank: int, clock: Callable[[], float] = time.time
    ) -> None:
        self._process = process
        self._engine = engine
        self._rank = rank
        self._clock = clock
        self._own = ""
        self._last = 0.0
        self._names: dict[str | bytes, str] = {}
        """Ranks by their incarnation, and by the route that a message of theirs came by."""
        self._encoder = msgspec.json.Encoder()
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")
        self._broken = False

    def started(self, incarnation: str, timing: Timing | None) -> None:
        """The first line."""
        self._own = f"{self._engine}/{self._rank}/{incarnation}"
        # The settings of a connector may hold more than the core's timers.
        names = [] if timing is None else [field.name for field in msgspec.structs.fields(Timing)]
        timers = {name: float(getattr(timing, name)) for name in names}
        self._write(StartLine, incarnation=incarnation, version=wire.VERSION, timers=timers)

    def stepped(self, entity: Traced, row: TransitionSpec, source: str) -> None:
        """A machine took a row."""
        if isinstance(entity, OwnerTransfer) and row.event == "lease_changed":
            self._expect(entity, row)
        self._write(
            StepLine,
            machine=entity.machine.spec.name,
            **_key(entity.key),
            peer=self._peer(entity),
            row=row.id,
            event=row.event,
            source=source,
            target=entity.state,
        )

    def received(self, message: Message, route: bytes) -> None:
        """A message came in."""
        sender = _speaker(message)
        self._note(route, sender)
        target = getattr(message, "target_incarnation", None)
        receiver = self._own if target is None else f"{self._engine}/{self._rank}/{target}"
        self._messages("received", message, sender, receiver)

    def sent(self, message: Message, route: bytes | None = None) -> None:
        """A message is about to leave; a reply by the route by which another one came."""
        target = getattr(message, "target_incarnation", None)
        receiver = self._names.get(route or b"", "") if target is None else self._names.get(target, "")
        self._messages("sent", message, _speaker(message), receiver or (f"//{target}" if target else ""))

    def copies_started(self, leg: LegKey) -> None:
        """A leg's copies are about to be started."""
        self._write(
            CopyLine, phase="started", **_key(leg.key), peer=_name(leg), bytes=0, seconds=0.0, ok=False
        )

    def copies_ended(self, leg: LegKey, moved_bytes: int, seconds: float, ok: bool) -> None:
        """A leg's copies came to their end."""
        self._write(
            CopyLine,
            phase="ended",
            **_key(leg.key),
            peer=_name(leg),
            bytes=moved_bytes,
            seconds=seconds,
            ok=ok,
        )

    def reported(self, report: Report) -> None:
        """vLLM took a report."""
        self._write(ReportLine, **_key(report.key), request=report.request_id, outcome=report.outcome)

    def ended(self) -> None:
        """The process was stopped in good order."""
        if self._own:
            self._write(EndLine)
        self.close()

    def close(self) -> None:
        """Close the file as it is."""
        with self._lock, contextlib.suppress(OSError):  # the disk is full, and that was said already
            self._file.close()

    # Helpers

    def _expect(self, owner: OwnerTransfer, row: TransitionSpec) -> None:
        """Say whom an owner expects, before it ends a transfer since these are all over."""
        if not any(effect in REPORTS for effect in row.effects):
            return
        try:
            ranks = owner.expected()
        except (LayoutMismatch, ValueError):
            return
        if ranks is None:
            return
        directory = owner.core.peers.directory(owner.layout_digest)
        peers = [
            _name(Sender(directory.engine_id, entry.rank, entry.incarnation))
            for entry in directory.ranks
            if entry.rank in ranks
        ]
        self._write(ExpectLine, **_key(owner.key), peers=peers)

    def _peer(self, entity: Traced) -> str:
        if isinstance(entity, MoverLeg):
            name = _name(entity.peer)
            self._note(entity.peer.incarnation, name)
            return name
        if isinstance(entity, OwnerLeg):
            self._note(entity.mover.incarnation, _name(entity.mover))
            return _name(entity.mover)
        return entity.request.request_id if isinstance(entity, RequestEntity) else ""

    def _note(self, known_by: str | bytes, name: str) -> None:
        if len(self._names) >= MAX_NAMES:
            self._names.clear()
        self._names[known_by] = name

    def _messages(self, way: str, message: Message, sender: str, receiver: str) -> None:
        for key, answer in _named(message):
            self._write(
                MessageLine,
                way=way,
                message=type(message).__struct_config__.tag,
                **_key(key),
                sender=sender,
                receiver=receiver,
                sequence=getattr(message, "sequence", 0),
                grant=getattr(message, "grant", 0),
                lease_seconds=0.0 if answer == "gone" else getattr(message, "lease_seconds", 0.0),
                answer=answer,
            )

    def _write(self, kind: type[L], **fields: Any) -> None:
        with self._lock:
            if self._broken or self._file.closed:
                return
            self._last = max(self._last, self._clock())
            line = kind(
                time=self._last, process=self._process, engine=self._engine, rank=self._rank, **fields
            )
            try:
                self._file.write(self._encoder.encode(line) + b"\n")
                self._file.flush()
            except OSError as error:
                logger.error("the trace ends here, it cannot be written: %s", error)
                self._broken = True


def _key(key: TransferKey) -> dict[str, Any]:
    return {"transfer": key.transfer_id, "attempt": key.attempt}


class _Named(Protocol):
    @property
    def engine_id(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def incarnation(self) -> str: ...


def _name(rank: _Named) -> str:
    return f"{rank.engine_id}/{rank.rank}/{rank.incarnation}"


def _speaker(message: Message) -> str:
    return "" if isinstance(message, wire.Error) else _name(message.sender)


def _named(message: Message) -> list[tuple[TransferKey, str]]:
    """Return the transfers that a message names, and what it says of each beside its own name."""
    if isinstance(message, wire.Renew):
        return [(key, "") for key in message.keys]
    if isinstance(message, wire.Renewed):
        return [(key, "extended") for key in message.extended] + [(key, "gone") for key in message.gone]
    if isinstance(message, wire.LayoutQuery | wire.Layout | wire.Error):
        return [(NO_KEY, "")]
    return [(message.key, "")]
