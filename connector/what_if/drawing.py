"""A plan as a picture: prefill ranks left, decode ranks right, a line for each leg.

Drawn here and not by Graphviz, whose layouts of 16 x 8 ranks with all their lines nobody can read: two plain
columns, one colour for each decode rank, width by bytes. Every line and box tells its numbers as a tooltip.
"""

import colorsys
import xml.etree.ElementTree as ET
from collections.abc import Sequence

from . import words
from .answer import LegAnswer, PlanAnswer, RankAnswer, SideAnswer

BOX_WIDTH, BOX_HEIGHT, GAP = 330, 40, 10
MARGIN, TITLE_HEIGHT, FOOT_HEIGHT, BETWEEN = 24, 64, 50, 420
LINE_HEIGHT = 16
THINNEST, WIDEST = 1.0, 5.0
UNREAD_COLOUR, INK, PAPER, BOX_COLOUR = "#999999", "#222222", "#ffffff", "#eef3fa"
STYLE = "font-family: Helvetica, Arial, sans-serif; font-size: 12px"


def svg(answer: PlanAnswer) -> bytes:
    """Return the picture of an answer that is no refusal."""
    assert answer.prefill is not None
    assert answer.decode is not None
    rows = max(len(answer.prefill.ranks), len(answer.decode.ranks))
    inner = rows * (BOX_HEIGHT + GAP) - GAP
    width = 2 * (MARGIN + BOX_WIDTH) + BETWEEN
    height = TITLE_HEIGHT + inner + FOOT_HEIGHT + MARGIN
    root = ET.Element(
        "svg",
        xmlns="http://www.w3.org/2000/svg",
        width=str(width),
        height=str(height),
        viewBox=f"0 0 {width} {height}",
        style=STYLE,
    )
    ET.SubElement(root, "rect", width=str(width), height=str(height), fill=PAPER)
    left = MARGIN
    right = width - MARGIN - BOX_WIDTH
    _text(root, left, 26, f"prefill: {answer.prefill.layout}", bold=True)
    # A line of its own, that ends at the edge: layouts in words can be longer than a box.
    decode_title = f"decode: {answer.decode.layout}"
    _text(root, width - MARGIN, 26 + LINE_HEIGHT, decode_title, bold=True, anchor="end")
    prefill_y = _places(len(answer.prefill.ranks), inner)
    decode_y = _places(len(answer.decode.ranks), inner)
    prefill_place = {rank.rank: y for rank, y in zip(answer.prefill.ranks, prefill_y, strict=True)}
    decode_place = {rank.rank: y for rank, y in zip(answer.decode.ranks, decode_y, strict=True)}
    colours = _colours([rank.rank for rank in answer.decode.ranks])
    start, end = left + BOX_WIDTH, right
    _release_lines(root, answer, prefill_place, decode_place, start, end)
    most = max((leg.bytes for leg in answer.legs), default=1)
    for leg in answer.legs:
        line = _line(
            root,
            start,
            prefill_place[leg.prefill_rank],
            end,
            decode_place[leg.decode_rank],
            stroke=colours[leg.decode_rank],
            width=max(THINNEST, WIDEST * leg.bytes / most),
        )
        _tooltip(line, _leg_words(leg))
    busiest = max((rank.bytes for rank in (*answer.prefill.ranks, *answer.decode.ranks)), default=0) or 1
    for side, x, places, prefix in (
        (answer.prefill, left, prefill_place, "P"),
        (answer.decode, right, decode_place, "D"),
    ):
        for rank in side.ranks:
            colour = colours[rank.rank] if prefix == "D" else INK
            _box(root, side, rank, f"{prefix}{rank.rank}", x, places[rank.rank], colour, busiest)
    for line, text in enumerate(_foot(answer)):
        _text(root, left, height - MARGIN - LINE_HEIGHT + line * LINE_HEIGHT, text)
    picture: bytes = ET.tostring(root, encoding="utf-8", xml_declaration=True)
    return picture


def _foot(answer: PlanAnswer) -> tuple[str, str]:
    unread = any(rank.releases for rank in answer.decode.ranks) if answer.decode is not None else False
    return (
        f"{answer.mode}, {answer.prompt_tokens} tokens, {answer.cached_tokens} of them cached on D, "
        f"transfer id {answer.transfer_id!r}: "
        f"{words.size(answer.bytes)} in {words.count(len(answer.legs), 'leg')}.",
        "A line is as wide as its bytes, and a bar under a rank as long."
        + (" Dashed: released without having been read." if unread else ""),
    )


def _places(count: int, height: float) -> list[float]:
    """The upper edges of ``count`` boxes, spread over the height."""
    pitch = height / max(count, 1)
    return [TITLE_HEIGHT + pitch * place + (pitch - BOX_HEIGHT) / 2 for place in range(count)]


def _colours(ranks: Sequence[int]) -> dict[int, str]:
    """Hues as far apart as they can be, for neighbours too: every other one lighter."""
    return {
        rank: _hex(colorsys.hls_to_rgb(place / len(ranks), 0.36 if place % 2 else 0.54, 0.65))
        for place, rank in enumerate(ranks)
    }


def _hex(colour: tuple[float, float, float]) -> str:
    return "#" + "".join(f"{round(255 * part):02x}" for part in colour)


def _release_lines(
    root: ET.Element,
    answer: PlanAnswer,
    prefill_place: dict[int, float],
    decode_place: dict[int, float],
    start: float,
    end: float,
) -> None:
    assert answer.decode is not None
    for rank in answer.decode.ranks:
        for released in rank.releases:
            line = _line(
                root,
                start,
                prefill_place[released],
                end,
                decode_place[rank.rank],
                stroke=UNREAD_COLOUR,
                width=THINNEST,
            )
            line.set("stroke-dasharray", "4 4")
            _tooltip(line, f"D{rank.rank} releases P{released} without having read it")


def _line(
    root: ET.Element, x1: float, y1: float, x2: float, y2: float, *, stroke: str, width: float
) -> ET.Element:
    middle, half = (x1 + x2) / 2, BOX_HEIGHT / 2
    path = (
        f"M {x1} {y1 + half:.1f} C {middle} {y1 + half:.1f}, {middle} {y2 + half:.1f}, {x2} {y2 + half:.1f}"
    )
    look = {"d": path, "fill": "none", "stroke": stroke, "stroke-width": f"{width:.1f}", "opacity": "0.8"}
    return ET.SubElement(root, "path", look)


def _box(
    root: ET.Element,
    side: SideAnswer,
    rank: RankAnswer,
    name: str,
    x: float,
    y: float,
    colour: str,
    busiest: int,
) -> None:
    group = ET.SubElement(root, "g", transform=f"translate({x} {y:.1f})")
    box = {"width": str(BOX_WIDTH), "height": str(BOX_HEIGHT), "rx": "5", "fill": BOX_COLOUR}
    ET.SubElement(group, "rect", box, stroke=colour if rank.bytes else UNREAD_COLOUR)
    bar = BOX_WIDTH * rank.bytes / busiest
    ET.SubElement(
        group, "rect", y=str(BOX_HEIGHT - 4), width=f"{bar:.1f}", height="4", fill=colour, opacity="0.6"
    )
    _text(group, 8, 16, f"{name}: {words.place(side, rank)}", bold=True)
    held = f"{words.counted(rank.layers, 'layer')}, {words.counted(rank.heads, 'head')}, {rank.tokens} tokens"
    _text(group, 8, 31, held)
    _tooltip(
        group, f"{name} holds {held}; {words.size(rank.bytes)} move, {rank.load:.2f} of its replicas' mean"
    )


def _leg_words(leg: LegAnswer) -> str:
    return (
        f"P{leg.prefill_rank} to D{leg.decode_rank}: {words.counted(leg.layers, 'layer')}, "
        f"{words.counted(leg.heads, 'head')}, tokens {words.tokens(leg.tokens, leg.token_ranges)}; "
        f"{words.size(leg.bytes)} in {words.count(leg.copies, 'copy', 'copies')}"
    )


def _text(parent: ET.Element, x: float, y: float, text: str, *, bold: bool = False, anchor: str = "") -> None:
    element = ET.SubElement(parent, "text", x=str(x), y=str(y), fill=INK)
    if bold:
        element.set("font-weight", "bold")
    if anchor:
        element.set("text-anchor", anchor)
    element.text = text


def _tooltip(element: ET.Element, text: str) -> None:
    title = ET.Element("title")
    title.text = text
    element.insert(0, title)
