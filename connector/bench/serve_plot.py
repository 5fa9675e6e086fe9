"""What `bench serve` measured, as bars in an SVG: one group for each load, one bar for each way."""

import xml.etree.ElementTree as ET
from collections.abc import Sequence

from .serve_report import FIRST_TOKEN, Row, ServeReport
from .serve_table import by_load
from .serve_ways import TITLES

COLOURS = dict(zip(TITLES, ("#777777", "#2b6cb0", "#319795", "#38a169", "#dd6b20", "#805ad5"), strict=True))
WIDTH, LEFT, RIGHT, BAR, GAP, GROUP_GAP, MARGIN = 900, 330, 110, 16, 3, 30, 20
STYLE = "font-family: Helvetica, Arial, sans-serif; font-size: 12px"


def picture(report: ServeReport) -> bytes:
    """Bars of the added time to the first token in ms (one engine alone: all of it), and of requests/s."""
    groups = by_load(report.rows)
    bars = sum(len(rows) for rows in groups.values())
    height = 2 * MARGIN + bars * (BAR + GAP) + len(groups) * (GROUP_GAP + BAR)
    root = ET.Element(
        "svg", xmlns="http://www.w3.org/2000/svg", width=str(WIDTH), height=str(height), style=STYLE
    )
    ET.SubElement(root, "rect", width=str(WIDTH), height=str(height), fill="#ffffff")
    y = MARGIN
    for title, rows in groups.items():
        _text(root, MARGIN, y + BAR - 4, title, bold=True)
        y += BAR + GAP
        y = _bars(root, y, rows) + GROUP_GAP
    return ET.tostring(root, encoding="utf-8", xml_declaration=True)


def _bars(root: ET.Element, y: int, rows: Sequence[Row]) -> int:
    longest = max((_value(row) for row in rows), default=1.0) or 1.0
    for row in rows:
        length = max(0.0, (WIDTH - LEFT - RIGHT) * _value(row) / longest)
        _text(root, MARGIN + 16, y + BAR - 4, _name(row))
        bar = {"x": str(LEFT), "y": str(y), "width": f"{length:.1f}", "height": str(BAR)}
        ET.SubElement(root, "rect", bar, fill=COLOURS[row.way])
        ratio = "" if row.ratio is None else f" (ratio {row.ratio:.2f})"
        _text(root, LEFT + length + 6, y + BAR - 4, f"{_words(row)}{ratio}")
        y += BAR + GAP
    return y


def _value(row: Row) -> float:
    if row.what != FIRST_TOKEN:
        return row.requests_per_second
    return row.first_token_seconds if row.added_seconds is None else row.added_seconds


def _name(row: Row) -> str:
    added = "adds, " if row.what == FIRST_TOKEN and row.added_seconds is not None else ""
    return f"{added}{TITLES[row.way]}"


def _words(row: Row) -> str:
    return f"{_value(row) * 1000:.0f} ms" if row.what == FIRST_TOKEN else f"{_value(row):.2f} requests/s"


def _text(parent: ET.Element, x: float, y: float, text: str, *, bold: bool = False) -> None:
    element = ET.SubElement(parent, "text", x=f"{x:.1f}", y=str(y), fill="#222222")
    if bold:
        element.set("font-weight", "bold")
    element.text = text
