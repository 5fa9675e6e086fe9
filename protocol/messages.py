# Generated from spec/wire.toml by `python -m dfirst.spec.generate`. Do not edit.
"""The side channel's messages, as a tagged union."""

from typing import Annotated

import msgspec

from .limits import Many, Name, Number, Place, Rank, Runs, Seconds, Sentence
from .shards import Directory

PROTOCOL = "dfirst"
VERSION = 1
MAX_MESSAGE_BYTES = 67108864


class Sender(msgspec.Struct, frozen=True):
    """Who speaks: a rank of an engine, or a router (rank -1)."""

    engine_id: Name
    """The engine's configured name."""
    rank: Rank
    """Place in the engine; -1 for a router."""
    incarnation: Name
    """Drawn at each start: a restarted rank is another peer (rule R7)."""


class TransferKey(msgspec.Struct, frozen=True):
    """What a transfer is called."""

    transfer_id: Name
    """Drawn by the router, or by the engine that starts the transfer; unguessable."""
    attempt: Number
    """0, and one more for every retry on another engine."""


class LayoutQuery(msgspec.Struct, frozen=True, tag="LAYOUT_QUERY"):
    """Send me the directory that goes by this digest: asked once, when two engines first meet."""

    sender: Sender
    """Who asks."""
    digest: Name
    """The directory's digest as the asker heard of it."""


class Layout(msgspec.Struct, frozen=True, tag="LAYOUT"):
    """Every rank of my engine, with its addresses and its shard."""

    sender: Sender
    """Who answers."""
    digest: Name
    """The digest that was asked for; the receiver checks it against the directory."""
    directory: Directory
    """The whole engine."""


class Query(msgspec.Struct, frozen=True, tag="QUERY"):
    """The metadata query: lend me this transfer's blocks."""

    sender: Sender
    """The mover."""
    key: TransferKey
    """The transfer."""
    sequence: Number
    """Echoed by the answer, so that the mover knows when it asked (rule R1); a rank never uses a number
    twice, and each is higher than the last.
    """
    target_incarnation: Name
    """The owner that is meant; another one answers GONE (rule R7)."""
    mode: Name
    """Blockwise or layerwise."""
    layout_digest: Name
    """The mover's directory."""
    prompt_tokens: Number
    """Tokens of the prompt."""
    cached_tokens: Number
    """Tokens at its start that the decode side has already."""
    tail_seconds: Seconds
    """For how long after its lease has ended a write of this mover may still land: its copy time-out, the
    quarantine of a copy that failed and its stall allowance (rules R3 and R4); 0 for reads.
    """


class Metadata(msgspec.Struct, frozen=True, tag="METADATA"):
    """Granted: these are the blocks, and they are yours for this long from the moment you asked."""

    sender: Sender
    """The owner."""
    key: TransferKey
    """The transfer."""
    sequence: Number
    """The question's number."""
    lease_seconds: Seconds
    """How long the blocks are lent."""
    block_ids: Annotated[list[Number], Many]
    """The owner's blocks, from the prompt's first token on."""
    grant: Number
    """The owner's number for what is lent here: DONE names it."""


class Wait(msgspec.Struct, frozen=True, tag="WAIT"):
    """Not yet: I do not know that transfer yet, or its prompt is not computed. Ask again; no lease runs
    (rule R9).
    """

    sender: Sender
    """The owner."""
    key: TransferKey
    """The transfer."""
    sequence: Number
    """The question's number."""


class Gone(msgspec.Struct, frozen=True, tag="GONE"):
    """Never: the transfer has ended here, was cancelled, or was meant for another incarnation, or the
    layouts do not fit.
    """

    sender: Sender
    """The owner."""
    key: TransferKey
    """The transfer."""
    sequence: Number
    """The question's number."""
    reason: Sentence
    """A sentence for the log."""


class Renew(msgspec.Struct, frozen=True, tag="RENEW"):
    """I am still copying: extend these leases. One message for all transfers with the same peer."""

    sender: Sender
    """The mover."""
    sequence: Number
    """Echoed by the answer."""
    target_incarnation: Name
    """The owner that is meant."""
    mode: Name
    """Blockwise or layerwise."""
    keys: Annotated[list[TransferKey], Many]
    """The transfers."""


class Renewed(msgspec.Struct, frozen=True, tag="RENEWED"):
    """The answer to RENEW, for each transfer: extended, or gone."""

    sender: Sender
    """The owner."""
    sequence: Number
    """The question's number."""
    lease_seconds: Seconds
    """How long the extended ones are lent, from the question on."""
    extended: Annotated[list[TransferKey], Many]
    """Still lent."""
    gone: Annotated[list[TransferKey], Many]
    """No longer lent."""


class Stage(msgspec.Struct, frozen=True, tag="STAGE"):
    """Block-wise: gather these bytes of the blocks that are lent to me into this place of my slot. Layer-
    wise: scatter what I have written there to them. A slot is staging memory of the owner; it belongs to my
    lease from the first STAGE on. Without addresses: only tell me my slot. Repeated until answered.
    """

    sender: Sender
    """The mover."""
    key: TransferKey
    """The transfer."""
    sequence: Number
    """The part's number, drawn like those of questions and after that of the one that was granted: a part
    is done once, however often it is asked for, and none of what was lent before (rule R8).
    """
    target_incarnation: Name
    """The owner that is meant."""
    mode: Name
    """Blockwise or layerwise."""
    place: Place
    """Where in the slot; a place has one part at a time."""
    starts: Runs
    """The owner's addresses in the order in which the bytes lie in the place, 8 bytes each, little-
    endian.
    """
    lengths: Runs
    """The bytes at each of them, likewise; one number if all are equal."""


class Staged(msgspec.Struct, frozen=True, tag="STAGED"):
    """The part is gathered, or scattered, and this is your slot. Without places: it is not, and will not
    be; copy these bytes directly.
    """

    sender: Sender
    """The owner."""
    key: TransferKey
    """The transfer."""
    sequence: Number
    """As in the STAGE."""
    place: Place
    """As in the STAGE."""
    slot_address: Number
    """Where the slot begins."""
    slot_places: Place
    """Its places, side by side; 0 if there is no slot."""
    place_bytes: Number
    """The bytes of a place."""


class Done(msgspec.Struct, frozen=True, tag="DONE"):
    """All my copies of this transfer have ended well. Repeated until acknowledged. A decode rank that reads
    nothing says it to the prefill ranks that it is named to release.
    """

    sender: Sender
    """The mover."""
    key: TransferKey
    """The transfer."""
    sequence: Number
    """The number of the mover's newest question; echoed by the ACK."""
    grant: Number
    """What was lent and has been copied; 0 if nothing had to be. The same transfer may be under way a
    second time, and was granted anew then (rule R8).
    """
    target_incarnation: Name
    """The owner that is meant."""
    mode: Name
    """Blockwise or layerwise."""
    layout_digest: Name
    """The mover's directory: from it the owner knows whom else to expect."""
    prompt_tokens: Number
    """Tokens of the prompt."""
    cached_tokens: Number
    """Tokens that the decode side had already."""


class Stopped(msgspec.Struct, frozen=True, tag="STOPPED"):
    """No copy of mine is in flight any more and none will come; the transfer failed or was cancelled.
    Repeated until acknowledged.
    """

    sender: Sender
    """The mover."""
    key: TransferKey
    """The transfer."""
    sequence: Number
    """The number of the mover's newest question: none up to this one is copied for any more, whether it was
    granted or not; echoed by the ACK.
    """
    target_incarnation: Name
    """The owner that is meant."""
    mode: Name
    """Blockwise or layerwise."""
    layout_digest: Name
    """As in DONE: the owner may never have heard a question."""
    cached_tokens: Number
    """As in DONE."""
    reason: Sentence
    """A sentence for the log."""


class Cancel(msgspec.Struct, frozen=True, tag="CANCEL"):
    """Nobody wants this transfer any more. To an owner: lend no more, release when the leases end. To a
    mover: end the copy in flight, issue no more, say STOPPED. Also sent by routers.
    """

    sender: Sender
    """Who cancels."""
    key: TransferKey
    """The transfer."""
    target_incarnation: Name
    """The rank that is meant."""
    target: Name
    """Owner or mover: the part that is meant."""
    mode: Name
    """Blockwise or layerwise."""
    reason: Sentence
    """A sentence for the log."""


class Ack(msgspec.Struct, frozen=True, tag="ACK"):
    """DONE, STOPPED or CANCEL is recorded: stop repeating it."""

    sender: Sender
    """Who acknowledges."""
    key: TransferKey
    """The transfer."""
    sequence: Number
    """The number of the DONE or STOPPED; 0 for a CANCEL."""


class Error(msgspec.Struct, frozen=True, tag="ERROR"):
    """What you sent cannot be read: for people and logs; no state depends on it."""

    reason: Sentence
    """What is wrong."""


Message = (
    LayoutQuery
    | Layout
    | Query
    | Metadata
    | Wait
    | Gone
    | Renew
    | Renewed
    | Stage
    | Staged
    | Done
    | Stopped
    | Cancel
    | Ack
    | Error
)
