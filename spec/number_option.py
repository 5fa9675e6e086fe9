"""Options of the command line that take a number: held to their range, and refused in one sentence."""

import math
import re
from typing import Any, NoReturn

import typer

from .endings import fail

_WHOLE = re.compile(r"[+-]?[0-9]+")
_DECIMAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_MOST_SHOWN = 40


def whole_number(
    option: str, help: str, *, least: int | None = None, most: int | None = None, panel: str | None = None
) -> Any:
    """Return the option of an ``Annotated[int, ...]``, or of a list of them."""

    def read(text: str) -> int:
        try:
            value = int(text) if _WHOLE.fullmatch(str(text)) else None
        except ValueError:  # more digits than Python reads
            value = None
        if value is None or not _is_within(value, least, most):
            _refuse(option, text, value is not None, "a whole number", least, most)
        return value

    return _option(option, read, help, least, most, panel)


def number(option: str, help: str, *, least: float, most: float) -> Any:
    """Return the option of an ``Annotated[float, ...]``."""

    def read(text: str) -> float:
        value = float(text) if _DECIMAL.fullmatch(str(text)) else math.nan
        if not _is_within(value, least, most):
            _refuse(option, text, math.isfinite(value), "a number", least, most)
        return value

    return _option(option, read, help, least, most, None)


def _is_within(value: float, least: float | None, most: float | None) -> bool:
    return (least is None or value >= least) and (most is None or value <= most)


def _refuse(
    option: str, text: str, is_number: bool, kind: str, least: float | None, most: float | None
) -> NoReturn:
    shown = str(text)[:_MOST_SHOWN]
    bounds = [f"at least {least}"] if least is not None else []
    bounds += [f"at most {most}"] if most is not None else []
    wanted = f"{kind} of {' and '.join(bounds)}" if bounds else kind
    fail(f"{option} is {shown if is_number else repr(shown)}; give {wanted}", 2)


def _option(
    option: str, read: Any, help: str, least: float | None, most: float | None, panel: str | None
) -> Any:
    # In the help in place of the kind of value: without it a user learns the range by being refused.
    if least is not None and most is not None:
        metavar = f"{least}-{most}"
    else:
        metavar = "N" if least is None else f"N>={least}"
    return typer.Option(option, parser=read, metavar=metavar, help=help, rich_help_panel=panel)
