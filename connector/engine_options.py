"""Reads what a user writes for an engine: `tp=2,dp=1,devices=0+1`."""

from collections.abc import Sequence

import msgspec


class EngineLayout(msgspec.Struct, frozen=True, kw_only=True):
    """How many ranks an engine has, and on which accelerators (empty: the next free ones)."""

    tp: int = 1
    dp: int = 1
    devices: tuple[int, ...] = ()

    @property
    def ranks(self) -> int:
        return self.tp * self.dp

    def __str__(self) -> str:
        return f"TP {self.tp}" + (f", DP {self.dp}" if self.dp > 1 else "")


def parse_layout(text: str) -> EngineLayout:
    """Raises ValueError with one sentence that names the part that is wrong."""
    values = read_settings(text, ("tp", "dp", "devices"), "tp=2,dp=1")
    named = values["devices"].split("+") if "devices" in values else []
    devices = tuple(whole_number("devices", device, text, 0) for device in named)
    layout = EngineLayout(
        tp=whole_number("tp", values.get("tp", "1"), text, 1),
        dp=whole_number("dp", values.get("dp", "1"), text, 1),
        devices=devices,
    )
    if devices and len(devices) != layout.ranks:
        raise ValueError(
            f"{text!r} names {len(devices)} devices for {layout.ranks} ranks (tp x dp); name one for each"
        )
    return layout


def read_settings(text: str, known: Sequence[str], example: str) -> dict[str, str]:
    """Read `key=value,key=value`; raises ValueError with one sentence that names the part that is wrong."""
    if not text.strip():
        raise ValueError(f"{text!r} says nothing of an engine; write {example}")
    values: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not value:
            raise ValueError(f"{part.strip()!r} in {text!r} is not of the form key=value; write {example}")
        if key not in known:
            raise ValueError(
                f"there is no setting {key!r} for an engine (in {text!r}); known are {', '.join(known)}"
            )
        if key in values:
            raise ValueError(f"{key} is given twice in {text!r}; give it once")
        values[key] = value
    return values


def place(layouts: list[EngineLayout]) -> list[tuple[int, ...]]:
    """The devices of each engine: those it names, else the next ones that no engine has named or got."""
    named = {device for layout in layouts for device in layout.devices}
    places: list[tuple[int, ...]] = []
    following = 0
    for layout in layouts:
        chosen = list(layout.devices)
        while len(chosen) < layout.ranks:
            if following not in named:
                chosen.append(following)
            following += 1
        places.append(tuple(chosen))
    return places


def whole_number(key: str, value: str, text: str, least: int) -> int:
    """Read one value of a text; raises ValueError with one sentence that names it."""
    # isdecimal alone would accept digits that are not ASCII.
    if not (value.isascii() and value.isdecimal()) or int(value) < least:
        raise ValueError(f"{key} is {value!r} in {text!r}; give a whole number of at least {least}")
    return int(value)
