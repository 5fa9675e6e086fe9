"""A plan on the screen: the ranks of each side and the legs. What differs in the rank alone is one row."""

from collections import defaultdict
from collections.abc import Callable, Sequence

from dfirst.protocol.modes import BLOCKWISE
from rich import box
from rich.console import Console
from rich.table import Table

from . import words
from .answer import LegAnswer, PlanAnswer, RankAnswer, SideAnswer

# A file or a pipe has no width of its own.
WIDTH_WITHOUT_TERMINAL = 140

Column = tuple[str, Callable[[RankAnswer], str]]
RIGHT = ("bytes", "copies", "load", "bytes of each", "copies of each")


def show(answer: PlanAnswer, console: Console) -> None:
    """Print an answer that is no refusal."""
    assert answer.prefill is not None
    assert answer.decode is not None
    narrow = console.is_terminal and console.width < WIDTH_WITHOUT_TERMINAL
    if not console.is_terminal:
        console = Console(file=console.file, width=WIDTH_WITHOUT_TERMINAL)

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False)

    for line in _head(answer, answer.prefill, answer.decode):
        say(line)
    console.print(_ranks("prefill ranks", "P", answer.prefill, _prefill_columns(answer), narrow))
    console.print(_ranks("decode ranks", "D", answer.decode, _decode_columns(answer, answer.decode), narrow))
    if answer.legs:
        console.print(_legs(answer, narrow))
    for line in _foot(answer):
        say(line)


def _head(answer: PlanAnswer, prefill: SideAnswer, decode: SideAnswer) -> list[str]:
    cached = f", {answer.cached_tokens} of them cached on D" if answer.cached_tokens else ""
    return [
        f"prefill: {_engine(prefill)}",
        f"decode: {_engine(decode)}",
        f"{answer.mode}, {answer.prompt_tokens} tokens{cached}, transfer id {answer.transfer_id!r}: "
        f"{_moved_in_all(answer)}",
    ]


def _moved_in_all(answer: PlanAnswer) -> str:
    if not answer.legs:
        return "nothing moves"
    legs, copies = words.count(len(answer.legs), "leg"), words.count(answer.copies, "copy", "copies")
    return f"{words.size(answer.bytes)} in {legs} and at most {copies}, before small ones are gathered"


def _engine(side: SideAnswer) -> str:
    interleave = f", interleave {side.interleave}" if side.cp_size > 1 else ""
    return f"{side.layout}{interleave}; {words.count(len(side.ranks), 'rank')}{_one_of(side)}"


def _one_of(side: SideAnswer) -> str:
    if side.replicas_of_engine == 1:
        return ""
    return f" (one of {side.replicas_of_engine} data-parallel replicas; each is an engine of its own)"


def _prefill_columns(answer: PlanAnswer) -> list[Column]:
    owns = answer.mode == BLOCKWISE
    columns: list[Column] = [
        ("is read by" if owns else "writes to", lambda rank: words.numbers(rank.peers, "D") or "nobody"),
        *_moved(),
        ("load", lambda rank: f"{rank.load:.2f}"),
    ]
    if owns:
        columns.append(("frees after DONE of", lambda rank: words.numbers(rank.waits_for, "D")))
    return columns


def _decode_columns(answer: PlanAnswer, decode: SideAnswer) -> list[Column]:
    owns = answer.mode != BLOCKWISE
    columns: list[Column] = [
        ("is written by" if owns else "reads from", lambda rank: words.numbers(rank.peers, "P") or "nobody"),
        *_moved(),
    ]
    if owns:
        columns.append(
            ("complete after DONE of", lambda rank: words.numbers(rank.waits_for, "P") or "nobody")
        )
    elif any(rank.releases for rank in decode.ranks):
        columns.append(("releases unread", lambda rank: words.numbers(rank.releases, "P")))
    return columns


def _moved() -> list[Column]:
    return [("bytes", lambda rank: words.size(rank.bytes)), ("copies", lambda rank: str(rank.copies))]


def _ranks(title: str, prefix: str, side: SideAnswer, columns: Sequence[Column], narrow: bool) -> Table:
    held: list[Column] = [
        ("layers", lambda rank: words.numbers(rank.layers)),
        ("heads", lambda rank: words.numbers(rank.heads)),
        ("tokens held", lambda rank: words.tokens(rank.tokens, rank.token_ranges)),
    ]
    shown = [*held, *columns]
    rows: dict[tuple[str, ...], list[RankAnswer]] = defaultdict(list)
    for rank in side.ranks:
        rows[tuple(cell(rank) for _, cell in shown)].append(rank)
    table = _table(title, ["", "place", *(name for name, _ in shown)], narrow)
    for row, ranks in rows.items():
        table.add_row(words.numbers([rank.rank for rank in ranks], prefix), words.places(side, ranks), *row)
    return table


def _legs(answer: PlanAnswer, narrow: bool) -> Table:
    """Legs of equal size as one row, which names their tokens only where all have the same."""
    alike: dict[tuple[str, ...], list[LegAnswer]] = defaultdict(list)
    for leg in answer.legs:
        row = (words.numbers(leg.layers), words.numbers(leg.heads), str(leg.tokens), words.size(leg.bytes))
        alike[(*row, str(leg.copies))].append(leg)
    table = _table(
        "legs",
        ["from and to", "layers", "heads", "tokens of each", "bytes of each", "copies of each"],
        narrow,
    )
    for (layers, heads, tokens, *moved), legs in alike.items():
        one, *others = legs
        if all(leg.token_ranges == one.token_ranges for leg in others):
            tokens = words.tokens(one.tokens, one.token_ranges)
        table.add_row(_pairs(legs), layers, heads, tokens, *moved)
    return table


def _table(title: str, columns: Sequence[str], narrow: bool) -> Table:
    """``narrow``: the terminal may be too small; what is wide wraps then, and nothing is cut off."""
    padding = (0, 0) if narrow else (0, 1)
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=padding)
    for name in columns:
        table.add_column(name, justify="right" if name in RIGHT else "left", overflow="fold")
    return table


def _pairs(legs: Sequence[LegAnswer]) -> str:
    """`P0-P1 to D0`, one line for all decode ranks that read from the same prefill ranks."""
    by_decode: dict[int, list[int]] = defaultdict(list)
    for leg in legs:
        by_decode[leg.decode_rank].append(leg.prefill_rank)
    by_prefills: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for decode_rank, prefill_ranks in by_decode.items():
        by_prefills[tuple(sorted(prefill_ranks))].append(decode_rank)
    return "\n".join(
        f"{words.numbers(prefill_ranks, 'P')} to {words.numbers(decode_ranks, 'D')}"
        for prefill_ranks, decode_ranks in by_prefills.items()
    )


def _foot(answer: PlanAnswer) -> list[str]:
    lines = ["load: bytes relative to the mean of the ranks that hold the same."]
    if answer.mode == BLOCKWISE:
        lines.append("A decode rank is complete when its own reads have ended.")
    else:
        lines.append("A prefill rank frees its blocks when its own writes have ended.")
    if answer.load is not None:
        least, most = min(answer.load.load, default=1.0), max(answer.load.load, default=1.0)
        lines.append(
            f"Over {answer.load.transfers} random transfer ids the load of a prefill rank is between "
            f"{least:.2f} and {most:.2f}."
        )
    return lines
