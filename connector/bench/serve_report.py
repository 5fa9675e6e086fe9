"""From what was measured to rows: medians, what a hand-over adds, and ratios to what is compared with."""

from collections.abc import Sequence
from statistics import median, quantiles

import msgspec
from dfirst.spec.output_file import as_json

from ..engine_spec import Executor
from .serve_cpu import CLIENT, CpuTime
from .serve_load import Load, Sample
from .serve_ways import ALONE, MOONCAKE, TITLES

FIRST_TOKEN, THROUGHPUT = "time to first token", "throughput"


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One load, and what it is measured for."""

    what: str
    """``FIRST_TOKEN`` or ``THROUGHPUT``."""
    load: Load


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One load sent one way in one round."""

    cell: Cell
    way: str
    samples: list[Sample]
    seconds: float
    cpu: list[CpuTime]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One load sent one way, all rounds together."""

    name: str
    what: str
    way: str
    prompt_tokens: int
    output_tokens: int
    at_once: int
    requests: int
    first_token_seconds: float
    """Median of all requests."""
    first_token_quartiles: tuple[float, float]
    added_seconds: float | None
    """Beyond the time of one engine alone: the median over the rounds of what its medians differ by. None
    where that was not measured.
    """
    requests_per_second: float
    """Of the median round."""
    cpu_seconds: float
    """Of all servers together, a request; the client is left out."""
    cpu: list[CpuTime]
    """Of each server and of the client, a request."""
    ratio: float | None
    """To vLLM's ``MooncakeConnector``: of what is added to the time to the first token, or of the throughput,
    round by round.
    """


class ServeReport(msgspec.Struct, frozen=True, kw_only=True):
    """The whole run. ``left_out`` names the ways that this host could not run, each with the reason."""

    model: str
    executor: Executor
    rounds: int
    left_out: list[str]
    rows: list[Row]

    def encode(self) -> bytes:
        return as_json(self)


Groups = dict[tuple[Cell, str], list[Measured]]


def rows_of(measured: Sequence[Measured]) -> list[Row]:
    """Return a row for each load and way: loads as they were first measured, ways as ``TITLES`` has them."""
    groups: Groups = {}
    for one in measured:
        groups.setdefault((one.cell, one.way), []).append(one)
    cells = dict.fromkeys(cell for cell, _ in groups)
    return [_row(cell, way, groups) for cell in cells for way in TITLES if (cell, way) in groups]


def load_name(what: str, prompt_tokens: int, at_once: int) -> str:
    """Return what a load is called."""
    return f"{what}, {prompt_tokens} tokens, {at_once} at once"


def _row(cell: Cell, way: str, groups: Groups) -> Row:
    group = groups[cell, way]
    first = [sample.first_token_seconds for one in group for sample in one.samples]
    low, _, high = quantiles(first, n=4) if len(first) > 1 else first * 3
    cpu = _cpu_of_a_request(group, len(first))
    load = cell.load
    return Row(
        name=f"{load_name(cell.what, load.prompt_tokens, load.at_once)}, {TITLES[way]}",
        what=cell.what,
        way=way,
        prompt_tokens=load.prompt_tokens,
        output_tokens=load.output_tokens,
        at_once=load.at_once,
        requests=len(first),
        first_token_seconds=median(first),
        first_token_quartiles=(low, high),
        added_seconds=_added(cell, way, groups),
        requests_per_second=median(_speed(one) for one in group),
        cpu_seconds=sum(time.seconds for time in cpu if time.process != CLIENT),
        cpu=cpu,
        ratio=_ratio(cell, way, groups),
    )


def _cpu_of_a_request(group: Sequence[Measured], requests: int) -> list[CpuTime]:
    used: dict[str, float] = {}
    for one in group:
        for time in one.cpu:
            used[time.process] = used.get(time.process, 0.0) + time.seconds
    return [CpuTime(process=process, seconds=seconds / requests) for process, seconds in used.items()]


def _added(cell: Cell, way: str, groups: Groups) -> float | None:
    """Round by round, since a machine that others use too is not as fast in one as in the next."""
    alone = groups.get((cell, ALONE))
    if alone is None or way == ALONE:
        return None
    return median(_first(one) - _first(other) for one, other in zip(groups[cell, way], alone, strict=True))


def _ratio(cell: Cell, way: str, groups: Groups) -> float | None:
    """None where there is nothing to divide by: what is compared with was not measured, or added nothing."""
    peer = groups.get((cell, MOONCAKE))
    if peer is None or way in (ALONE, MOONCAKE):
        return None
    if cell.what == THROUGHPUT:
        mine = groups[cell, way]
        return median(_speed(one) / _speed(other) for one, other in zip(mine, peer, strict=True))
    added, peer_added = _added(cell, way, groups), _added(cell, MOONCAKE, groups)
    return None if added is None or peer_added is None or peer_added <= 0 else added / peer_added


def _first(one: Measured) -> float:
    return median(sample.first_token_seconds for sample in one.samples)


def _speed(one: Measured) -> float:
    return len(one.samples) / one.seconds
