"""What a rank's core asks for: messages to send, copies to start and stop, reports to vLLM. Values, no
actions.
"""

import msgspec

from .commands import LegKey
from .messages import Message, Sender, TransferKey
from .plan import Leg
from .shards import RankEntry
from .stages import Slot

SENT = "sent"
RECEIVED = "received"
FAILED = "failed"


class Send(msgspec.Struct, frozen=True):
    """Send a message to the rank that listens at this address."""

    host: str
    port: int
    message: Message


class Reply(msgspec.Struct, frozen=True):
    """Send a message back by the route by which one came."""

    route: bytes
    message: Message


class StartCopies(msgspec.Struct, frozen=True, kw_only=True):
    """The leg's blocks are lent: move its bytes until they are all moved, or until told to stop."""

    leg: LegKey
    mode: str
    plan: Leg
    peer: RankEntry
    local_blocks: tuple[int, ...]
    """This rank's blocks; empty in a push, where they come with the forward pass."""
    remote_blocks: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int


class StopCopies(msgspec.Struct, frozen=True):
    """Issue no further copy for this leg, and say when those in flight have ended."""

    leg: LegKey


class StageBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """Gather runs of lent blocks into a place of the mover's slot, or scatter them out of it, and say when it
    is done (``PartStaged``). Nothing but lent blocks may be touched.
    """

    key: TransferKey
    mover: Sender
    place: int
    address: int
    into_blocks: bool
    """Whether to scatter."""
    starts: bytes
    lengths: bytes
    block_ids: tuple[int, ...]
    """What is lent."""


class PartReady(msgspec.Struct, frozen=True, kw_only=True):
    """The owner has gathered or scattered what the data path wanted; or it has not, and that is to be copied
    directly.
    """

    leg: LegKey
    place: int
    slot: Slot | None
    """The slot that this leg has; None if it has none."""


class Report(msgspec.Struct, frozen=True):
    """Tell vLLM: this request's blocks are sent, received, or not received."""

    key: TransferKey
    request_id: str
    outcome: str
    reason: str


Effect = Send | Reply | StartCopies | StopCopies | StageBlocks | PartReady | Report
