"""``dfirst bench copies``: the data path against the engine alone, in one run, turn about.

A row's ratio is its bandwidth, from the request's start to the report that vLLM would take, over that of
large contiguous copies of as many bytes by the engine alone, between the same processes, just before and
after.
"""

import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from ...protocol.commands import StartPull, remote_of
from ...protocol.messages import TransferKey
from ...protocol.modes import BLOCKWISE
from ..endings import fail
from ..json_file import write_json
from ..mooncake_engine import MAX_TCP_RUN_BYTES
from .bars import bars
from .copies_cases import Case, cases
from .copies_prefill import serve
from .copies_reference import PIECES
from .far import Far
from .two_sides import Engines, TwoSides, memory_needed

SIZE, QUICK_SIZE = 128 << 20, 32 << 20
"""A prompt: 1,000 tokens of the model of ``COPIES.md``, and fewer."""
ROUNDS, QUICK_ROUNDS = 5, 3
FLOOR = 0.55


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured of one layout. Rates are bytes a second, of the median round."""

    name: str
    bytes: int
    piece_bytes: int
    """A direct copy's mean run."""
    rate: float
    engine_rate: float
    ratio: float
    target: float
    cpu_seconds_per_gb: float
    engine_cpu_seconds_per_gb: float


def run(quick: bool, only: str, json_file: Path | None, plot: Path | None) -> int:
    """Measure, print and write; return 1 if a row is below the least that is allowed."""
    chosen = [case for case in cases(quick) if only in case.name]
    if not chosen:
        names = "".join(f"\n  {case.name}" for case in cases(quick))
        fail(f"--only is {only!r}, which no row's name holds; give a part of one of these:{names}", 2)
    size = QUICK_SIZE if quick else SIZE
    console = Console()
    rows: list[Row] = []
    with Bench(serve, memory_needed(chosen, size)) as bench:
        console.print(bench.words())
        for case in chosen:
            row = bench.row(case, size, QUICK_ROUNDS if quick else ROUNDS)
            rows.append(row)
            console.print(_line(row))
    console.print(_table(rows))
    low = sum(row.ratio < FLOOR for row in rows)
    if low:
        console.print(f"{low} of {len(rows)} rows below {FLOOR}, the least that any should reach")
    if json_file is not None:
        document = {"rows": rows, "engine": bench.words()}
        write_json(json_file, document)
    if plot is not None:
        named = [(row.name, row.ratio, row.target) for row in rows]
        plot.write_text(bars("Bandwidth of the data path over the engine's own best", named))
    return int(low > 0)


class Bench(TwoSides):
    """Also knows what the engine alone is best at."""

    def __init__(self, serve: Callable[[Connection, int], None], size: int) -> None:
        super().__init__(serve, size)
        tried = min(size, SIZE)
        self._pieces = {direction: self._fastest(direction, tried) for direction in ("read", "write")}
        self._in_short_pieces = {
            direction: tried / self.least_engine_seconds(direction, tried, MAX_TCP_RUN_BYTES)
            for direction in self._pieces
        }
        """Bytes a second, in pieces as dfirst makes them."""

    def words(self) -> str:
        """Say what is compared with, and what the engine can do with pieces as dfirst makes them."""
        large = ", ".join(f"{direction}s of {piece >> 20} MiB" for direction, piece in self._pieces.items())
        short = " and ".join(
            f"{direction}s at {rate / 1e9:.2f} GB/s" for direction, rate in self._in_short_pieces.items()
        )
        return (
            f"compared with the engine alone: {large}\n(in pieces of {MAX_TCP_RUN_BYTES >> 10} KiB, into "
            f"which dfirst cuts longer runs over TCP, it {short})"
        )

    def row(self, case: Case, size: int, rounds: int) -> Row:
        """Measure one layout."""
        blocks = case.blocks(size)
        with self.engines(case, blocks) as engines:
            return self._measured(_Pair(case, blocks, engines, self.far), rounds)

    def _measured(self, pair: "_Pair", rounds: int) -> Row:
        direction = "read" if pair.case.mode == BLOCKWISE else "write"
        moved = pair.bytes
        pair.transfer(self.next_key())  # first contact, and the pages are touched
        ours: list[tuple[float, float]] = []
        engine: list[tuple[float, float]] = []
        for _ in range(rounds):
            engine.append(self._timed(lambda: self._engine_alone(direction, moved)))
            ours.append(self._timed(lambda: pair.transfer(self.next_key())))
        engine.append(self._timed(lambda: self._engine_alone(direction, moved)))
        self.memory[:] = 0
        pair.transfer(self.next_key())
        self.check_arrived(pair.case, pair.blocks, pair.engines)
        taken, alone = (statistics.median(each[0] for each in found) for found in (ours, engine))
        cpu, alone_cpu = (statistics.median(each[1] for each in found) for found in (ours, engine))
        return Row(
            name=pair.case.name,
            bytes=moved,
            piece_bytes=pair.piece_bytes,
            rate=moved / taken,
            engine_rate=moved / alone,
            ratio=alone / taken,
            target=pair.case.target,
            cpu_seconds_per_gb=cpu / moved * 1e9,
            engine_cpu_seconds_per_gb=alone_cpu / moved * 1e9,
        )

    def _timed(self, copy: Callable[[], None]) -> tuple[float, float]:
        cpu = time.process_time() + self.far("cpu")
        began = time.perf_counter()
        copy()
        taken = time.perf_counter() - began
        return taken, time.process_time() + self.far("cpu") - cpu

    def _engine_alone(self, direction: str, size: int) -> None:
        self.engine_seconds(direction, size, self._pieces[direction])

    def _fastest(self, direction: str, size: int) -> int:
        self.engine_seconds(direction, size, PIECES[0])
        return min(PIECES, key=lambda piece: self.least_engine_seconds(direction, size, piece))


class _Pair:
    """Both engines of one row."""

    def __init__(self, case: Case, blocks: int, engines: Engines, far: Far) -> None:
        self.case = case
        self.blocks = blocks
        self.engines = engines
        self._far = far
        self._tokens = blocks * case.block_size
        self._from, self._to = case.table(blocks, 1), case.table(blocks, 2)
        self.bytes = case.moved_bytes(blocks)

    @property
    def piece_bytes(self) -> int:
        """The mean run of a direct copy of the first leg."""
        from ...protocol.copies import copies
        from ...protocol.plan import plan_pair

        leg = plan_pair(self.engines.prefill, self.engines.decode).request("bench", self._tokens, 0).legs[0]
        shards = (
            self.engines.prefill.ranks[leg.prefill_rank].shard,
            self.engines.decode.ranks[leg.decode_rank].shard,
        )
        moved = copies(leg, *shards, self._from, self._to, range(self._tokens))
        return moved.bytes // max(len(moved), 1)

    def transfer(self, key: TransferKey) -> None:
        """Move the prompt once."""
        if self.case.mode == BLOCKWISE:
            self._far("offer", key, self._from, self._tokens)
            start = StartPull(
                key=key,
                request_id=key.transfer_id,
                remote=remote_of(self.engines.prefill),
                block_ids=self._to,
                prompt_tokens=self._tokens,
                cached_tokens=0,
            )
            for rank in self.engines.ranks:
                rank.step(start)
        else:
            self.engines.accept(key, self._to, self._tokens)
            self._far("push", key, remote_of(self.engines.decode), self._from, self._tokens)
        self.engines.wait_received(key)


def _line(row: Row) -> str:
    mark = "" if row.ratio >= row.target else f"  (asked for: {row.target:.2f})"
    return f"{row.ratio:5.2f}  {row.rate / 1e9:5.2f} of {row.engine_rate / 1e9:4.2f} GB/s  {row.name}{mark}"


def _table(rows: list[Row]) -> Table:
    table = Table(title="The data path against the engine alone")
    columns = ("layout", "MiB", "direct piece", "GB/s", "engine", "ratio", "asked", "CPU s/GB", "engine's")
    for column in columns:
        table.add_column(column, justify="left" if column == "layout" else "right")
    for row in rows:
        table.add_row(
            row.name,
            f"{row.bytes / 2**20:.0f}",
            f"{row.piece_bytes / 1024:.1f} KiB",
            f"{row.rate / 1e9:.2f}",
            f"{row.engine_rate / 1e9:.2f}",
            f"{row.ratio:.2f}",
            f"{row.target:.2f}",
            f"{row.cpu_seconds_per_gb:.2f}",
            f"{row.engine_cpu_seconds_per_gb:.2f}",
        )
    return table
