"""Numbers, ranges and sizes in few characters."""

from collections.abc import Iterable, Sequence

from .answer import Range, RankAnswer, SideAnswer

# Of more ranges than these, the first and the last are shown.
SHOWN_RANGES = 3


def numbers(values: Iterable[int], prefix: str = "") -> str:
    """`0-3, 7` for 0, 1, 2, 3, 7; with the prefix D `D0-3, D7`."""
    runs: list[list[int]] = []
    for value in sorted(values):
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return ", ".join(
        f"{prefix}{first}" if first == last else f"{prefix}{first}-{last}" for first, last in runs
    )


def count(number: int, one: str, many: str = "") -> str:
    """`1 rank`, `2 ranks`; ``many`` where it is not made with an s."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def counted(values: Sequence[int], one: str) -> str:
    """`head 3`, `heads 0-3`."""
    return f"{one if len(values) == 1 else one + 's'} {numbers(values)}"


def tokens(count: int, ranges: Sequence[Range]) -> str:
    """`256: 0-127, 2048-2175`; of many ranges the first and the last."""
    if not count:
        return "none"
    shown = [f"{first}-{end - 1}" if end - first > 1 else str(first) for first, end in ranges]
    if len(shown) > SHOWN_RANGES:
        return f"{count}: {shown[0]} ... {shown[-1]}"
    return f"{count}: {', '.join(shown)}"


def size(number: float) -> str:
    """Bytes for people, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000 or unit == "GB":
            break
        number /= 1000
    return f"{number:.0f} {unit}" if unit == "B" or number >= 100 else f"{number:.1f} {unit}"


def place(side: SideAnswer, rank: RankAnswer) -> str:
    """Where a rank is: `pcp 1, tp 3`; an axis of size 1 in its engine is left out."""
    return places(side, [rank])


def places(side: SideAnswer, ranks: Sequence[RankAnswer]) -> str:
    named = []
    for axis in ("pp", "pcp", "tp"):
        if len({getattr(rank, f"{axis}_rank") for rank in side.ranks}) > 1:
            named.append(f"{axis} {numbers({getattr(rank, f'{axis}_rank') for rank in ranks})}")
    return ", ".join(named) or "alone"
