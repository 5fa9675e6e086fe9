"""Messages that a test makes up: early, late, repeated, or from somebody who should not have spoken."""

from dfirst.protocol import messages as wire
from dfirst.protocol.messages import Sender, TransferKey
from dfirst.protocol.modes import BLOCKWISE, LAYERWISE
from dfirst.protocol.shards import layout_digest

from .world import KEY, PROMPT, World

ROUTER = Sender("router", -1, "r")
NEWEST = 99
"""A number that no question in a test has: it comes after all of them."""


def query(
    world: World,
    mover: str,
    owner: str,
    sequence: int = 1,
    cached: int = 0,
    prompt: int = PROMPT,
    sender: Sender | None = None,
    digest: str = "",
    tail: float = 0.0,
) -> None:
    """Let ``owner`` hear a QUERY of ``mover``."""
    message = wire.Query(
        sender=sender or world.sender(mover),
        key=KEY,
        sequence=sequence,
        target_incarnation=world.sender(owner).incarnation,
        mode=mode_of(mover),
        layout_digest=digest or layout_digest(world.engines[mover[0]]),
        prompt_tokens=prompt,
        cached_tokens=cached,
        tail_seconds=tail,
    )
    world.hear(owner, message, mover)


def done(
    world: World,
    mover: str,
    owner: str,
    cached: int = 0,
    sender: Sender | None = None,
    grant: int | None = None,
) -> None:
    """Let ``owner`` hear a DONE of ``mover``, for what is lent to it now unless another grant is named."""
    known = world.cores[owner].owners.get(KEY)
    lease = known.leases.get(sender or world.sender(mover)) if known else None
    message = wire.Done(
        sender=sender or world.sender(mover),
        key=KEY,
        sequence=NEWEST,
        grant=(lease.grant if lease else 0) if grant is None else grant,
        target_incarnation=world.sender(owner).incarnation,
        mode=mode_of(mover),
        layout_digest=layout_digest(world.engines[mover[0]]),
        prompt_tokens=PROMPT,
        cached_tokens=cached,
    )
    world.hear(owner, message, mover)


def stop(
    world: World,
    mover: str,
    owner: str,
    sender: Sender | None = None,
    sequence: int = NEWEST,
    digest: str = "",
) -> None:
    """Let ``owner`` hear a STOPPED of ``mover``, for all questions so far unless a number is named."""
    message = wire.Stopped(
        sender=sender or world.sender(mover),
        key=KEY,
        sequence=sequence,
        target_incarnation=world.sender(owner).incarnation,
        mode=mode_of(mover),
        layout_digest=digest or layout_digest(world.engines[mover[0]]),
        cached_tokens=0,
        reason="it gave up",
    )
    world.hear(owner, message, mover)


def cancel(world: World, rank: str, target: str, mode: str, key: TransferKey = KEY) -> None:
    """Let a rank hear a router's CANCEL."""
    incarnation = world.sender(rank).incarnation
    world.hear(rank, wire.Cancel(ROUTER, key, incarnation, target, mode, "the client has gone"), "router")


def mode_of(mover: str) -> str:
    """Decode ranks move block-wise, prefill ranks layer-wise."""
    return BLOCKWISE if mover.startswith("D") else LAYERWISE
