"""What happens in a world, in words: one line for each action, the same in charts and in scenario files."""

from typing import NamedTuple

from .sites import NAMES
from .state import COMPUTE_LATE, D_LATE, P_LATE, Action, State
from .world import World

LETTERS = frozenset(("deliver", "lose", "repeat", "delay"))
STORIES = {
    "prefill": (0, "{} takes {}"),
    "compute": (0, "{} computes a layer of {}"),
    "finish": (0, "{} finishes {}"),
    "decode": (1, "{} allocates blocks for {}"),
    "prefill_again": (0, "{} is given {} a second time"),
    "decode_again": (1, "{} is given {} a second time"),
    "prefill_twice": (0, "{} is given {} twice at once"),
    "decode_twice": (1, "{} is given {} twice at once"),
    "drop_decode": (1, "{} drops {} from its queue"),
    "cached_decode": (1, "{} has all of {} cached"),
    "abort_decode": (1, "{} aborts {}"),
    "abort_prefill": (0, "{} aborts {}"),
    "preempt": (0, "{} preempts {}"),
    "no_decode": (1, "{} never gets {}"),
    "no_prefill": (0, "{} never gets {}"),
    "announce_fails": (1, "{} cannot announce {}"),
}
LATE = {P_LATE: "P's start of", D_LATE: "D's start of", COMPUTE_LATE: "the computing of"}
JOBS = {
    "want": "{} asks for a part of {}",
    "give_up": "{} waits no longer for a part of {}",
    "begin": "{} begins a batch of copies of {}",
    "land": "a batch of copies of {} lands at {}",
    "end": "{} sees the end of its copies of {}",
    "slow": "the copies of {} by {} take their time",
    "break": "a batch of copies of {} by {} fails",
}


PARTS = {
    "staged": "{} is through with {}",
    "slow_part": "{} takes its time with {}",
    "break_part": "{} cannot stage {}",
}


class Line(NamedTuple):
    """An action: a message if it has a target, else something at a site, or (site -1) for all."""

    text: str
    source: int
    target: int | None
    lost: bool = False


def tell(world: World, state: State, action: Action) -> Line:
    """Return an action in words."""
    name, *arguments = action
    if name in LETTERS:
        letter = world.post.letters[arguments[0] >> 1]
        late = "late " if arguments[0] & 1 else ""
        verb = {"deliver": "", "lose": "lost: ", "repeat": "repeated: ", "delay": "delayed: "}[name]
        text = f"{verb}{late}{world.post.title(letter.message)}"
        return Line(text, letter.source, letter.target, name == "lose")
    if name in STORIES:
        engine, text = STORIES[name]
        key = named(world, arguments[0])
        return Line(text.format(NAMES[engine], key), world.sites.of_engine[engine].start, None)
    if name in PARTS:
        owner, leg, part, _ = state.parts[arguments[0]]
        moved = f"part {part} of {named(world, world.ranks.legs[leg].number)}"
        return Line(PARTS[name].format(world.sites.names[owner], moved), owner, None)
    if name in JOBS:
        return _job(world, state, name, arguments[0])
    return _other(world, state, name, arguments)


def sentence(world: World, state: State, action: Action) -> str:
    """Return an action in one line that names it among all that can happen."""
    line = tell(world, state, action)
    if line.target is None:
        return line.text
    return f"{world.post.name(line.source)} -> {world.post.name(line.target)}  {line.text}"


def named(world: World, key: int) -> str:
    """Return what a transfer is called."""
    return f"{world.sites.keys[key].transfer_id}.{world.sites.keys[key].attempt}"


def _job(world: World, state: State, name: str, place: int) -> Line:
    mover, leg, *_ = state.jobs[place]
    site = world.ranks.legs[leg]
    moved = f"{named(world, site.number)} with {world.sites.names[site.owner]}"
    by = world.sites.names[site.mover] + (" (which is gone)" if mover < 0 else "")
    words = (by, moved) if name in ("want", "give_up", "begin", "end") else (moved, by)
    return Line(JOBS[name].format(*words), site.mover, None)


def _other(world: World, state: State, name: str, arguments: list[int]) -> Line:
    names = world.sites.names
    if name == "tick":
        return Line("a step of time", -1, None)
    if name == "step":
        site = arguments[0]
        command = world.ranks.commands[state.queues[site][0]]
        return Line(f"{names[site]} is told {type(command).__name__}", site, None)
    if name in ("timers", "collect", "late_step", "mute"):
        site = arguments[0]
        text = {
            "timers": "{}'s timers fire",
            "collect": "vLLM takes the reports of {}",
            "late_step": "{}'s next step is late",
            "mute": "what {} sends is lost from now on",
        }[name]
        return Line(text.format(names[site]), site, None)
    if name in ("die", "restart", "suspend"):
        verb = {"die": "dies", "restart": "is restarted", "suspend": "stands still for a step of time"}[name]
        return Line(f"{NAMES[arguments[0]]} {verb}", world.sites.of_engine[arguments[0]].start, None)
    key = named(world, arguments[0])
    if name == "stray":
        _, mover, owner = arguments
        return Line(f"{names[mover]} asks {names[owner]} for {key} though it is not to", mover, None)
    if name == "cancel":
        return Line(
            f"the router cancels {key} at {NAMES[arguments[1]]}",
            world.sites.of_engine[arguments[1]].start,
            None,
        )
    if name == "late":
        return Line(f"{LATE[arguments[1]]} {key} is late", -1, None)
    raise ValueError(f"{name} is no action")
