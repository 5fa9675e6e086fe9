"""What a rank's core hears: commands of its scheduler side, messages of peers, ends of copies, reports
taken.

The commands are also what the scheduler side sends to the ranks with each step, so they carry plain data
only.
"""

import msgspec

from .messages import Message, Sender, TransferKey
from .shards import Directory, layout_digest


class RemoteRank(msgspec.Struct, frozen=True):
    """Where a rank of the other engine is reached, as routers carry it."""

    host: str
    port: int
    incarnation: str


class RemoteEngine(msgspec.Struct, frozen=True):
    """The other engine, as routers carry it."""

    engine_id: str
    layout_digest: str
    """Names the directory that the plan is made from; a restarted engine has another."""
    ranks: tuple[RemoteRank, ...]
    """All its ranks, in the order of their numbers. The first one is asked for the layout."""


def remote_of(directory: Directory) -> RemoteEngine:
    """Return an engine as a router names it."""
    return RemoteEngine(directory.engine_id, layout_digest(directory), remote_ranks_of(directory))


def remote_ranks_of(directory: Directory) -> tuple[RemoteRank, ...]:
    """Return where a router finds an engine's ranks, in the order of their numbers."""
    return tuple(RemoteRank(entry.host, entry.port, entry.incarnation) for entry in directory.ranks)


class DirectoryKnown(msgspec.Struct, frozen=True, tag=True):
    """This rank's whole engine: told once, at the first step."""

    directory: Directory


class StartPull(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Decode, block-wise: read this prompt's blocks."""

    key: TransferKey
    request_id: str
    """Empty if vLLM waits for no report: everything was cached here."""
    remote: RemoteEngine
    block_ids: tuple[int, ...]
    """This engine's blocks, from the prompt's first token on."""
    prompt_tokens: int
    cached_tokens: int


class AcceptPush(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Decode, layer-wise: these blocks are announced; prefill ranks will ask for them."""

    key: TransferKey
    request_id: str
    block_ids: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int


class OfferBlocks(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Prefill, block-wise: the prompt is computed; hold these blocks for the decode ranks."""

    key: TransferKey
    request_id: str
    block_ids: tuple[int, ...]
    prompt_tokens: int


class StartPush(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Prefill, layer-wise: the first chunk is scheduled; ask the decode ranks for their blocks."""

    key: TransferKey
    request_id: str
    remote: RemoteEngine
    prompt_tokens: int
    cached_tokens: int


class FinishPush(msgspec.Struct, frozen=True, tag=True):
    """Prefill, layer-wise: vLLM finished the request; report its blocks when the pushes are over."""

    key: TransferKey


class AbortTransfer(msgspec.Struct, frozen=True, tag=True):
    """vLLM aborted the request, or it cannot go on; let go of its blocks as soon as that is safe."""

    key: TransferKey
    reason: str


class Renounce(msgspec.Struct, frozen=True, tag=True):
    """Decode, block-wise: tell the prefill ranks that nobody will read this transfer's blocks."""

    key: TransferKey
    remote: RemoteEngine


class LegKey(msgspec.Struct, frozen=True):
    """One leg of a transfer on this rank: the peer rank, told apart by its incarnation (rule R8)."""

    key: TransferKey
    engine_id: str
    rank: int
    incarnation: str


class MessageReceived(msgspec.Struct, frozen=True, tag=True):
    """A peer's message, and the route by which it can be answered."""

    message: Message
    route: bytes


class CopyEnded(msgspec.Struct, frozen=True, tag=True):
    """The data path ended a leg's copies: none of them can move any more."""

    leg: LegKey
    ok: bool
    reason: str


class PartWanted(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The data path wants the owner to gather (pull) or scatter (push) a part of a leg, at most one in each
    place.
    """

    leg: LegKey
    place: int
    starts: bytes
    """The owner's addresses, packed as ``protocol.stages`` says; empty to ask for the slot alone."""
    lengths: bytes


class PartStaged(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """This rank has gathered or scattered a part for a mover, or could not; it touches nothing any more."""

    key: TransferKey
    mover: Sender
    place: int
    reason: str
    """Empty if all went well."""


class Collected(msgspec.Struct, frozen=True, tag=True):
    """vLLM has taken the report on this transfer."""

    key: TransferKey


Command = StartPull | AcceptPush | OfferBlocks | StartPush | FinishPush | AbortTransfer | Renounce
CoreEvent = Command | DirectoryKnown | MessageReceived | CopyEnded | PartWanted | PartStaged | Collected
