"""A path as a message sequence chart, in text for a terminal and in Mermaid for a page."""

from .post import ROUTER
from .telling import Line

COLUMN = 26


def text_chart(names: list[str], lines: list[Line], ending: str) -> str:
    """Return the path with one column for each rank; ``ending`` says what it breaks, if anything."""
    rows = ["".join(name.ljust(COLUMN) for name in names).rstrip()]
    for line in lines:
        if line.target is not None:
            rows.append(_arrow(line, len(names)))
        elif line.source < 0:
            rows.append(f"  {line.text}  ".center(COLUMN * (len(names) - 1) + 1, "-"))
        else:
            rows.append(_note(line, len(names)))
    return "\n".join([*rows, "", f"broken: {ending}" if ending else "every rule held"])


def mermaid_chart(names: list[str], lines: list[Line], ending: str) -> str:
    """Return the path as a Mermaid sequence diagram."""
    rows = ["sequenceDiagram"]
    if any(line.source < 0 and line.target is not None for line in lines):
        rows.append("    participant router")
    rows += [f"    participant {name}" for name in names]
    everyone = f"{names[0]},{names[-1]}"
    for line in lines:
        text = line.text.replace("#", "no. ").replace(";", ",")
        if line.target is not None:
            arrow = "-x" if line.lost else "->>"
            rows.append(
                f"    {ROUTER if line.source < 0 else names[line.source]}{arrow}{names[line.target]}: {text}"
            )
        elif line.source < 0:
            rows.append(f"    Note over {everyone}: {text}")
        else:
            rows.append(f"    Note over {names[line.source]}: {text}")
    rows.append(f"    Note over {everyone}: broken: {ending.replace(';', ',').replace('#', 'no. ')}")
    return "\n".join(rows)


def _arrow(line: Line, count: int) -> str:
    source = max(line.source, 0)
    left, right = sorted((source, line.target or 0))
    if left == right:
        return _note(line, count)
    width = COLUMN * (right - left) - 1
    body = f" {line.text} ".center(width - 1, "-")
    forward = source == left
    head = "x" if line.lost else ">" if forward else "<"
    drawn = body + head if forward else head + body
    return ("|".ljust(COLUMN) * left) + "|" + drawn + "|" + ((" " * (COLUMN - 1) + "|") * (count - 1 - right))


def _note(line: Line, count: int) -> str:
    before = "|".ljust(COLUMN) * line.source
    rest = "".join("|".ljust(COLUMN) for _ in range(count - 1 - line.source) if len(line.text) + 2 <= COLUMN)
    return (before + f"* {line.text}".ljust(COLUMN) + rest).rstrip()
