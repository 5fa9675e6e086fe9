"""Traces of transfers that went well, and of some that did not: recorded anew from real cores for every test
run, the same each time.
"""

from pathlib import Path

from dfirst.protocol.commands import PartWanted
from dfirst.protocol.timing import Timing

from .traced_world import TracedWorld

SECONDS = 1.0
RUN = (64).to_bytes(8, "little")
"""The length of a run."""


def pull(directory: Path) -> None:
    """Block-wise: first contact, two decode ranks read one prefill rank."""
    world = TracedWorld(directory, 1, 2)
    world.offer()
    world.pull()
    world.deliver()
    world.advance(SECONDS)
    for rank in ("D0", "D1"):
        world.finish_copies(rank)
        world.advance(SECONDS)
    world.end()


def push(directory: Path) -> None:
    """Layer-wise: first contact, two prefill ranks write into one decode rank."""
    world = TracedWorld(directory, 2, 1)
    world.accept()
    world.push()
    world.deliver()
    for rank in ("P0", "P1"):
        world.advance(SECONDS)
        world.finish_copies(rank)
    world.advance(SECONDS)
    world.finish()
    world.advance(SECONDS)
    world.end()


def parked_and_renewed(directory: Path) -> None:
    """Block-wise: asked before the prompt was computed, and copied for longer than one lease."""
    world = TracedWorld(directory, 1, 1, timing=Timing(lease_seconds=6.0, copy_timeout_seconds=3.0), met=True)
    world.pull()
    world.deliver()
    world.advance(SECONDS)
    world.offer()
    world.deliver()
    world.advance(9 * SECONDS)
    world.finish_copies("D0")
    world.advance(SECONDS)
    world.end()


def push_cancelled(directory: Path) -> None:
    """Layer-wise: aborted on the decode side while two writers write."""
    world = TracedWorld(directory, 2, 1, met=True)
    world.accept()
    world.push()
    world.deliver()
    world.advance(SECONDS)
    world.abort("D")
    world.deliver()
    for rank in ("P0", "P1"):
        world.finish_copies(rank, ok=False, reason="stopped")
        world.advance(SECONDS)
    world.finish()
    world.advance(SECONDS)
    world.end()


def copy_failed(directory: Path) -> None:
    """Block-wise: one of two reads fails."""
    world = TracedWorld(directory, 2, 1, met=True)
    world.offer()
    world.pull()
    world.deliver()
    world.advance(SECONDS)
    world.copies["D0"], later = world.copies["D0"][:1], world.copies["D0"][1:]
    world.finish_copies("D0", ok=False, reason="it broke")
    world.advance(SECONDS)
    world.copies["D0"] = later
    world.finish_copies("D0", ok=False, reason="stopped")
    world.advance(SECONDS)
    world.end()


def staged(directory: Path) -> None:
    """Block-wise: gathered in two places; the answer for one is lost once, and it is answered again."""
    world = TracedWorld(directory, 1, 1, met=True)
    world.offer()
    world.pull()
    world.deliver()
    [started] = world.copies["D0"]
    for place in (0, 1):
        world.give("D0", PartWanted(leg=started.leg, place=place, starts=bytes(8), lengths=RUN))
    world.deliver()
    world.lose("Staged")
    world.finish_part("P0")
    world.deliver()
    world.lose_nothing()
    world.advance(world.timing.query_retry_seconds)
    world.finish_part("P0")
    world.deliver()
    world.advance(SECONDS)
    world.finish_copies("D0")
    world.advance(SECONDS)
    world.end()


RECORDINGS = {
    "pull": pull,
    "push": push,
    "parked_and_renewed": parked_and_renewed,
    "push_cancelled": push_cancelled,
    "copy_failed": copy_failed,
    "staged": staged,
}
