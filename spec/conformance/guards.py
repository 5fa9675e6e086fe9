"""Guards as a trace shows them. A guard that depends on what no line tells is not judged: None."""

from collections.abc import Callable

from dfirst.protocol.specification import TransitionSpec
from dfirst.protocol.trace_lines import MessageLine, StepLine

from .picture import QUIET, Key, PeerKey, Picture
from .table import table
from .violation import BrokenRule

OVER = ("DONE", "STOPPED", "EXPIRED")
LOST = ("STOPPED", "EXPIRED")

Judge = Callable[[Picture, StepLine, MessageLine | None], "bool | None"]


def check_guards(picture: Picture, line: StepLine, row: TransitionSpec, cause: MessageLine | None) -> None:
    """Raise ``BrokenRule`` if a row was taken whose guards cannot have held."""
    for name in row.guards:
        wanted, bare = not name.startswith("not "), name.removeprefix("not ")
        rule = table().guards.get((line.machine, bare))
        if rule is None:
            continue
        held = JUDGES[bare](picture, line, cause)
        if held is not None and held is not wanted:
            raise BrokenRule(
                rule,
                f"{row.id} asks for {name!r}, and that was not so{_why(picture, line, bare)}",
                line.transfer,
            )


def past_hold(picture: Picture, line: StepLine) -> bool:
    """Return whether an owner has waited for as long as it holds its blocks."""
    held_at = picture.held_at.get(_key(line))
    hold_seconds = picture.timers["hold_seconds"]
    return held_at is not None and line.time >= held_at + hold_seconds - picture.tolerance_seconds


def _key(line: StepLine) -> Key:
    return Key(line.transfer, line.attempt)


def _why(picture: Picture, line: StepLine, name: str) -> str:
    lent = picture.lent_to(_key(line))
    if name in ("any_lent", "all_over") and lent:
        return f": lent to {', '.join(lent)}"
    if name in ("all_over", "all_done"):
        states = {peer: lease.state for peer, lease in picture.leases_of(_key(line)).items()}
        expected = picture.expected.get(_key(line))
        if expected is None:
            return ": nothing says whom it expects"
        return ": " + ", ".join(f"{peer} is {states.get(peer, 'not heard of')}" for peer in expected)
    return ""


def _outstanding(picture: Picture, line: StepLine, cause: MessageLine | None) -> bool | None:
    leg = picture.leg(PeerKey(_key(line), line.peer))
    return None if cause is None else leg.awaits(cause)


def _word_is_current(picture: Picture, line: StepLine, cause: MessageLine | None) -> bool | None:
    lease = picture.lease(PeerKey(_key(line), line.peer))
    if cause is None:
        return None
    return cause.grant == lease.grant if cause.message == "DONE" else cause.sequence >= lease.number


def _new_part(picture: Picture, line: StepLine, cause: MessageLine | None) -> bool | None:
    lease = picture.lease(PeerKey(_key(line), line.peer))
    taken = cause is None or cause.sequence in lease.parts or cause.sequence <= lease.number
    return False if taken else None  # whether another is at work in its place no line tells


def _part_ended(picture: Picture, line: StepLine, cause: MessageLine | None) -> bool | None:
    lease = picture.lease(PeerKey(_key(line), line.peer))
    return None if cause is not None and cause.sequence in lease.parts else False


def _ended_in_time(picture: Picture, line: StepLine, _cause: MessageLine | None) -> bool | None:
    late = line.time >= picture.leg(PeerKey(_key(line), line.peer)).lease_until + picture.tolerance_seconds
    return False if picture.reads(_key(line)) and late else None


def _any_lent(picture: Picture, line: StepLine, _cause: MessageLine | None) -> bool | None:
    return bool(picture.lent_to(_key(line)))


def _all_over(picture: Picture, line: StepLine, _cause: MessageLine | None) -> bool | None:
    if picture.lent_to(_key(line)):
        return False
    return past_hold(picture, line) or _expected_in(picture, line, OVER)


def _all_done(picture: Picture, line: StepLine, _cause: MessageLine | None) -> bool | None:
    return _expected_in(picture, line, ("DONE",))


def _expected_in(picture: Picture, line: StepLine, states: tuple[str, ...]) -> bool:
    expected = picture.expected.get(_key(line))
    leases = picture.leases_of(_key(line))
    return expected is not None and all(peer in leases and leases[peer].state in states for peer in expected)


def _writer_lost(picture: Picture, line: StepLine, _cause: MessageLine | None) -> bool | None:
    lost = any(lease.state in LOST for lease in picture.leases_of(_key(line)).values())
    return None if lost else False


def _leg_failed(picture: Picture, line: StepLine, _cause: MessageLine | None) -> bool | None:
    return any(leg.failed for leg in picture.legs_of(_key(line)).values())


def _all_lent(picture: Picture, line: StepLine, _cause: MessageLine | None) -> bool | None:
    return all(leg.lent for leg in picture.legs_of(_key(line)).values())


def _all_copied(picture: Picture, line: StepLine, _cause: MessageLine | None) -> bool | None:
    return all(leg.copied for leg in picture.legs_of(_key(line)).values())


def _all_quiet(picture: Picture, line: StepLine, _cause: MessageLine | None) -> bool | None:
    return all(leg.state in QUIET for leg in picture.legs_of(_key(line)).values())


JUDGES: dict[str, Judge] = {
    "outstanding": _outstanding,
    "part_outstanding": _outstanding,
    "word_is_current": _word_is_current,
    "new_part": _new_part,
    "part_ended": _part_ended,
    "ended_in_time": _ended_in_time,
    "any_lent": _any_lent,
    "all_over": _all_over,
    "all_done": _all_done,
    "writer_lost": _writer_lost,
    "leg_failed": _leg_failed,
    "all_lent": _all_lent,
    "all_copied": _all_copied,
    "all_quiet": _all_quiet,
}
