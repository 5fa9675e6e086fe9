"""A bar chart as SVG text, drawn without any library for it."""

from collections.abc import Sequence
from html import escape

_ROW, _LEFT, _WIDTH, _TOP = 20, 420, 420, 46


def bars(title: str, rows: Sequence[tuple[str, float, float]]) -> str:
    """Return a chart of (name, value, target) rows; a tick marks the target."""
    largest = max((max(value, target) for _, value, target in rows), default=1.0) or 1.0
    height = _TOP + _ROW * len(rows) + 12
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 70}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="12" y="24" font-size="15">{escape(title)}</text>',
    ]
    for number, (name, value, target) in enumerate(rows):
        y = _TOP + _ROW * number
        length, mark = _WIDTH * value / largest, _LEFT + _WIDTH * target / largest
        colour = "#3b7dd8" if value >= target else "#d8763b"
        lines += [
            f'<text x="{_LEFT - 8}" y="{y + 12}" text-anchor="end">{escape(name)}</text>',
            f'<rect x="{_LEFT}" y="{y + 2}" width="{length:.1f}" height="13" fill="{colour}"/>',
            f'<line x1="{mark:.1f}" x2="{mark:.1f}" y1="{y}" y2="{y + 17}" stroke="black"/>',
            f'<text x="{_LEFT + length + 6:.1f}" y="{y + 12}">{value:.2f}</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])
