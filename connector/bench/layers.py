"""``dfirst bench layers``: what a layer-wise push hides behind a forward pass, and what it costs it.

A forward pass that really computes, on one thread, is timed with a push and without one, in turns. It lasts
several times as long as the engine alone needs for the bytes, as prefill does wherever it pays to hand over.
"""

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from ...protocol.commands import remote_of
from ...protocol.modes import LAYERWISE
from ..json_file import write_json
from .bars import bars
from .copies_cases import HEAD_BYTES, KIB, Case
from .layers_prefill import Pass, Pushed, serve
from .two_sides import Engines, TwoSides, memory_needed

SIZE, QUICK_SIZE = 64 << 20, 32 << 20
ROUNDS, QUICK_ROUNDS = 9, 3
COMPUTE_SHARE = 4.0
"""A forward pass takes so many times what the engine alone takes for its bytes."""
MOST_UNSENT, MOST_FORWARD = 0.15, 1.05
REFERENCE_PIECE = 4 << 20
"""Of the engine alone."""


@dataclass(frozen=True)
class LayersCase:
    """A layout, and in how many steps the prompt is computed."""

    case: Case
    chunks: int = 1

    @property
    def name(self) -> str:
        steps = "" if self.chunks == 1 else f", {self.chunks} chunks"
        return f"{self.case.layers} layers{steps}, {self.case.name}"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One layout, medians of all rounds."""

    name: str
    bytes: int
    unsent: float
    """Share of the bytes that had not arrived when the last layer was computed."""
    tail_seconds: float
    """From then until the decode side reports the whole prompt."""
    forward_seconds: float
    """Without a push."""
    ratio: float
    """Wall time of the forward pass with a push over that without one."""
    cpu_ratio: float
    """The same of the forward thread's CPU time."""


def layers_cases(quick: bool) -> list[LayersCase]:
    """Return the rows."""

    def equal(layers: int) -> Case:
        name = "TP 1 to 1, 16 tokens, 64 KiB, scattered"
        return Case(name, LAYERWISE, 16, 1, 64 * KIB // 16, layers=layers)

    inside = Case(
        "TP 2 to 4, 16 tokens, heads inside, scattered", LAYERWISE, 16, 8, HEAD_BYTES, 2, 4, heads_inside=True
    )
    found = [LayersCase(equal(8)), LayersCase(inside)]
    if not quick:
        found += [LayersCase(equal(8), 4), LayersCase(equal(32)), LayersCase(equal(32), 4)]
    return found


def run(quick: bool, json_file: Path | None, plot: Path | None) -> int:
    """Measure, print and write; return 1 if anything is above what is asked for."""
    chosen, size = layers_cases(quick), QUICK_SIZE if quick else SIZE
    console = Console()
    with _Bench(serve, memory_needed([one.case for one in chosen], size)) as bench:
        rows = [bench.row(one, size, QUICK_ROUNDS if quick else ROUNDS) for one in chosen]
    console.print(_table(rows))
    above = sum(row.unsent > MOST_UNSENT or row.ratio > MOST_FORWARD for row in rows)
    if above:
        console.print(
            f"{above} of {len(rows)} rows above what is asked for; whatever else this host does disturbs both"
        )
    if json_file is not None:
        write_json(json_file, {"rows": rows})
    if plot is not None:
        named = [(row.name, row.unsent, MOST_UNSENT) for row in rows]
        plot.write_text(bars("Unsent when the last layer is computed", named))
    return int(above > 0)


class _Bench(TwoSides):
    """Times forward passes over there."""

    def row(self, one: LayersCase, size: int, rounds: int) -> Row:
        """Measure one layout."""
        blocks = one.case.blocks(size)
        with self.engines(one.case, blocks) as engines:
            return self._measured(one, blocks, engines, rounds)

    def _measured(self, one: LayersCase, blocks: int, engines: Engines, rounds: int) -> Row:
        moved = one.case.moved_bytes(blocks)
        seconds = (
            COMPUTE_SHARE
            * self.least_engine_seconds("write", moved, REFERENCE_PIECE)
            / (one.case.layers * one.chunks)
        )
        self.far("set_layer_seconds", seconds)
        self._pushed(one, blocks, engines)  # first contact, and the pages are touched
        alone: list[Pass] = []
        pushed: list[tuple[Pass, float]] = []
        for _ in range(rounds):
            alone.append(self._forward(one, None))
            pushed.append(self._pushed(one, blocks, engines))
        alone.append(self._forward(one, None))
        self.check_arrived(one.case, blocks, engines)
        return Row(
            name=one.name,
            bytes=moved,
            unsent=statistics.median(1 - each.sent_bytes / moved for each, _ in pushed),
            tail_seconds=statistics.median(tail for _, tail in pushed),
            forward_seconds=statistics.median(each.wall for each in alone),
            ratio=statistics.median(each.wall for each, _ in pushed)
            / statistics.median(each.wall for each in alone),
            cpu_ratio=statistics.median(each.cpu for each, _ in pushed)
            / statistics.median(each.cpu for each in alone),
        )

    def _forward(self, one: LayersCase, pushed: Pushed | None) -> Pass:
        found: Pass = self.far("forward", one.case.layers, one.chunks, pushed)
        return found

    def _pushed(self, one: LayersCase, blocks: int, engines: Engines) -> tuple[Pass, float]:
        """Return the pass, and the seconds from its end to the last decode rank's report."""
        key, tokens = self.next_key(), blocks * one.case.block_size
        engines.accept(key, one.case.table(blocks, 2), tokens)
        prompt = Pushed(key, remote_of(engines.decode), one.case.table(blocks, 1), tokens)
        forward = self._forward(one, prompt)
        engines.wait_received(key)
        return forward, max(0.0, time.perf_counter() - forward.ended_at)


def _table(rows: list[Row]) -> Table:
    title = f"Layer-wise; asked for: unsent at most {MOST_UNSENT:g}, forward pass at most {MOST_FORWARD:g}"
    table = Table(title=title)
    columns = (
        "layout",
        "MiB",
        "unsent",
        "then until received",
        "forward alone",
        "with push / alone",
        "its CPU",
    )
    for column in columns:
        table.add_column(column, justify="left" if column == "layout" else "right")
    for row in rows:
        table.add_row(
            row.name,
            f"{row.bytes / 2**20:.0f}",
            f"{row.unsent:.3f}",
            f"{row.tail_seconds * 1e3:.1f} ms",
            f"{row.forward_seconds * 1e3:.0f} ms",
            f"{row.ratio:.3f}",
            f"{row.cpu_ratio:.3f}",
        )
    return table
