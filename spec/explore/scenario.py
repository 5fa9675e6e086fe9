"""A path as a file that people read and that replays: the world's name, the rule, and one line an action."""

from pathlib import Path

from .bytes_check import check_bytes
from .configuration import Configuration
from .search import Found
from .telling import Line, sentence, tell
from .violation import Violation
from .world import World


def write_scenario(path: Path, configuration: Configuration, found: Found, mutant: str = "") -> None:
    """Write what was found."""
    lines = [f"configuration: {configuration.name}"]
    if mutant:
        lines.append(f"mutant: {mutant}")
    lines += [f"violates: {found.rule}", "", f"# {found.text}", ""]
    path.write_text("\n".join([*lines, *found.sentences]) + "\n")


def read_head(path: Path) -> dict[str, str]:
    """Return what a scenario file says of itself."""
    head = {}
    for line in path.read_text().split("\n\n")[0].splitlines():
        name, _, value = line.partition(": ")
        head[name] = value
    return head


def replay(path: Path, world: World) -> tuple[list[Line], Violation | None]:
    """Take the steps of a scenario file; return them in words, and the violation that they end in.

    A path that ends because nothing changes any more, with something still not ended, violates rule L1.
    """
    body = path.read_text().split("\n\n", 1)[1].splitlines()
    state = world.first()
    lines: list[Line] = []
    try:
        check_bytes(world.sites)
    except Violation as violation:
        return lines, violation
    for line in body:
        if not line or line.startswith("#"):
            continue
        named = {sentence(world, state, action): (action, cost) for action, cost in world.choices(state)}
        if line not in named:
            raise ValueError(
                f"{path}: {line!r} cannot happen here, after {len(lines)} steps: the code behaves otherwise "
                f"than when the file was written. What can happen: {'; '.join(named) or 'nothing'}"
            )
        action, cost = named[line]
        lines.append(tell(world, state, action))
        try:
            state = world.apply(state, action, cost)
        except Violation as violation:
            return lines, violation
    if not world.ended(state):
        return lines, Violation("L1", world.unended(state))
    return lines, None
