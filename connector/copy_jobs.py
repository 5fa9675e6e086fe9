"""What there is to copy, and what became of it: jobs, their pieces and their results.

A job is a pull (everything known at its start) or a push (pieces arrive layer by layer until it is closed).
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from ..protocol.copies import Copies
from .mooncake_engine import Batch
from .staged_copies import Answers, StagedCopies

READ, WRITE = "read", "write"
STOPPED, DROPPED, LEASE = "stopped", "dropped", "lease"
NO_ANSWER, COPY_FAILED = "no answer", "copy failed"


class Engine(Protocol):
    """What the data path needs of ``MooncakeEngine``. Both copies return when no byte can move any more."""

    def connect(self, peer: str, /) -> bool: ...
    def read(self, peer: str, local: list[int], remote: list[int], lengths: list[int], /) -> bool: ...
    def write(self, peer: str, local: list[int], remote: list[int], lengths: list[int], /) -> bool: ...
    def begin(
        self, direction: str, peer: str, local: list[int], remote: list[int], lengths: list[int], /
    ) -> Batch: ...
    def finish(self, batch: Batch, /) -> bool: ...
    def forget(self, peer: str, /) -> None: ...


@dataclass(frozen=True, eq=False)
class PullJob:
    """Bytes to copy from a peer."""

    key: str
    """Names the job in ``stop`` and in its result."""
    peer: str
    """Data address of the peer, ``host:port``."""
    copies: Copies
    may_start: Callable[[str], bool] | None = None
    """Asked with the key before each batch; False ends the job with reason ``lease``."""


class CopyResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a job ended. No byte of it moves any more."""

    key: str
    ok: bool
    """Every byte has arrived."""
    bytes: int
    """Bytes of the batches that arrived whole; more may have arrived if not ``ok``."""
    seconds: float
    """Time spent copying, without waiting for turns and events."""
    reason: str
    """Empty if ``ok``, else one of the words at the top of this file or an exception's text."""


@dataclass(eq=False)
class Piece:
    copies: Copies
    after: Callable[[], None] | None
    ready: Callable[[], bool] | None
    drops: int
    """How often pieces of its job had been dropped when it came: a later drop is for it too."""


@dataclass(eq=False)
class Job:
    key: str
    peer: str
    direction: str
    may_start: Callable[[str], bool] | None
    pieces: deque[Piece] = field(default_factory=deque)
    closed: bool = False
    """No more pieces will come."""
    queued: bool = False
    """It stands in its peer's line, or a thread has it in hand."""
    in_hand: bool = False
    drops: int = 0
    """How often its pieces were dropped."""
    stages: bool = True
    """Nothing of it was left unstaged so far, by the owner or here."""
    reason: str = ""
    """Why it cannot end well."""
    bytes: int = 0
    seconds: float = 0.0
    answers: Answers | None = None
    """Of the owner, on parts that it was asked to gather or scatter."""
    staged: StagedCopies | None = None
    staged_drops: int = 0
    """How often its pieces had been dropped when the last part was staged."""

    def is_over(self) -> bool:
        return bool(self.reason) or (self.closed and not self.pieces)
