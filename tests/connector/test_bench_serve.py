"""`bench serve`: what it makes of its measurements, and the two sides of HTTP that are its own."""

import asyncio
import io
import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from dfirst.connector.bench import serve
from dfirst.connector.bench.serve import ServeSettings, cells, in_turn
from dfirst.connector.bench.serve_cpu import CLIENT, CpuTime, used_between
from dfirst.connector.bench.serve_load import Load, LoadError, Sample, prompts, run_load
from dfirst.connector.bench.serve_mooncake_router import MooncakeRouter, make_app
from dfirst.connector.bench.serve_plot import picture
from dfirst.connector.bench.serve_report import (
    FIRST_TOKEN,
    THROUGHPUT,
    Cell,
    Measured,
    Row,
    ServeReport,
    rows_of,
)
from dfirst.connector.bench.serve_table import show
from dfirst.connector.bench.serve_ways import ALONE, BLOCKWISE, LAYERWISE, MOONCAKE, NIXL, TITLES, Way
from dfirst.connector.cli import app
from rich.console import Console
from typer.testing import CliRunner

LOAD = Load(prompt_tokens=1000, output_tokens=4, requests=2, at_once=2)
FIRST = Cell(what=FIRST_TOKEN, load=LOAD)
SPEED = Cell(what=THROUGHPUT, load=LOAD)


def measured(way: str, first: list[float], seconds: float = 1.0, cell: Cell = FIRST) -> Measured:
    samples = [Sample(first_token_seconds=one, seconds=one, tokens=4) for one in first]
    cpu = [CpuTime(process=f"{way}-prefill", seconds=3.0), CpuTime(process=CLIENT, seconds=9.0)]
    return Measured(cell=cell, way=way, samples=samples, seconds=seconds, cpu=cpu)


def by_way(rows: list[Row]) -> dict[str, Row]:
    return {row.way: row for row in rows}


def test_what_a_hand_over_adds_is_compared_within_a_round() -> None:
    # In the second round the machine is ten times as slow, and what is added stays the same share.
    rounds = [
        measured(ALONE, [1.0, 1.0]),
        measured(BLOCKWISE, [1.1, 1.1]),
        measured(MOONCAKE, [1.4, 1.4]),
        measured(MOONCAKE, [10.4, 10.4]),
        measured(ALONE, [10.0, 10.0]),
        measured(BLOCKWISE, [10.1, 10.1]),
    ]
    rows = by_way(rows_of(rounds))
    assert rows[ALONE].added_seconds is None
    assert rows[BLOCKWISE].added_seconds == pytest.approx(0.1)
    assert rows[MOONCAKE].added_seconds == pytest.approx(0.4)
    assert rows[BLOCKWISE].ratio == pytest.approx(0.25)
    assert rows[ALONE].ratio is None
    assert rows[MOONCAKE].ratio is None
    assert rows[BLOCKWISE].requests == 4


def test_throughput_is_compared_within_a_round() -> None:
    rounds = [
        measured(MOONCAKE, [1.0, 1.0], seconds=4.0, cell=SPEED),
        measured(LAYERWISE, [1.0, 1.0], seconds=2.0, cell=SPEED),
    ]
    rows = by_way(rows_of(rounds))
    assert rows[LAYERWISE].ratio == pytest.approx(2.0)
    assert rows[LAYERWISE].requests_per_second == pytest.approx(1.0)


def test_without_what_is_compared_with_there_is_no_ratio() -> None:
    only = by_way(rows_of([measured(ALONE, [1.0]), measured(BLOCKWISE, [1.1])]))
    assert only[BLOCKWISE].ratio is None
    assert only[BLOCKWISE].added_seconds == pytest.approx(0.1)
    free = [measured(ALONE, [1.0]), measured(BLOCKWISE, [1.1]), measured(MOONCAKE, [0.9])]
    assert by_way(rows_of(free))[BLOCKWISE].ratio is None


def test_cpu_time_is_that_of_a_request_without_the_client() -> None:
    (row,) = rows_of([measured(ALONE, [1.0, 1.0]), measured(ALONE, [1.0, 1.0])])
    assert row.cpu_seconds == pytest.approx(1.5)
    assert {time.process: time.seconds for time in row.cpu} == pytest.approx(
        {f"{ALONE}-prefill": 1.5, CLIENT: 4.5}
    )
    before = [CpuTime(process="p", seconds=2.0)]
    after = [CpuTime(process="p", seconds=2.5)]
    assert used_between(before, after) == [CpuTime(process="p", seconds=0.5)]


def test_every_way_is_first_and_last_at_some_time() -> None:
    ways = [Way(name=name, url="", servers=()) for name in TITLES]
    orders = [[way.name for way in in_turn(ways, turn)] for turn in range(10)]
    assert all(sorted(order) == sorted(TITLES) for order in orders)
    assert {order[0] for order in orders} == {order[-1] for order in orders} == set(TITLES)


def test_the_loads_are_those_of_the_settings(tmp_path: Path) -> None:
    loads = cells(ServeSettings(work_dir=tmp_path))
    sizes = [(cell.what, cell.load.prompt_tokens, cell.load.at_once) for cell in loads]
    assert sizes == [
        *((FIRST_TOKEN, tokens, at_once) for tokens in (1000, 4000) for at_once in (1, 4)),
        (THROUGHPUT, 1000, 16),
    ]
    assert all(cell.load.requests >= cell.load.at_once for cell in loads)


def test_prompts_have_their_length_and_share_no_block() -> None:
    asked = prompts(LOAD, "a title")
    assert [len(prompt) for prompt in asked] == [1000, 1000]
    assert asked[0][:16] != asked[1][:16]


def test_a_report_is_shown_drawn_and_written() -> None:
    rows = rows_of([measured(way, [1.0, 1.2], cell=cell) for cell in (FIRST, SPEED) for way in TITLES])
    report = ServeReport(
        model="a model", executor="uni", rounds=1, left_out=["something is left out"], rows=rows
    )
    root = ET.fromstring(picture(report))
    bars = list(root.iter("{http://www.w3.org/2000/svg}rect"))
    assert len(bars) == 1 + len(rows)
    written = io.StringIO()
    show(report, Console(file=written))
    text = written.getvalue()
    assert all(title in text for title in TITLES.values())
    assert "something is left out" in text
    assert msgspec.json.decode(report.encode(), type=ServeReport) == report


def test_an_interrupted_run_tells_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ways = [Way(name=name, url="", servers=()) for name in (ALONE, BLOCKWISE)]
    sent: list[str] = []

    def fake_send(way: Way, load: Load, title: str) -> tuple[list[Sample], float]:
        sent.append(title)
        # The warming up takes four, the first load two; the second load is broken off in its midst.
        if len(sent) == 8:
            raise KeyboardInterrupt
        return [Sample(first_token_seconds=1.0, seconds=1.0, tokens=4)] * load.requests, 2.0

    monkeypatch.setattr(serve, "_send", fake_send)
    monkeypatch.setattr(serve, "make_ways", lambda names, settings: ways)
    monkeypatch.setattr(serve, "end_on_sigterm_as_on_ctrl_c", lambda: None)
    settings = ServeSettings(work_dir=tmp_path, ways=(ALONE, BLOCKWISE))
    report = serve.run_serve(settings, Console(file=io.StringIO()))
    assert [(row.way, row.prompt_tokens) for row in report.rows] == [(ALONE, 1000), (BLOCKWISE, 1000)]
    assert report.left_out == ["interrupted after 1 of 25 loads"]
    # Before anything is whole there is nothing to tell.
    del sent[3:]
    sent += ["one more"] * 4
    with pytest.raises(KeyboardInterrupt):
        serve.run_serve(settings, Console(file=io.StringIO()))


class FakeEngine:
    """Answers completions as vLLM's stream does, and keeps what it was asked."""

    def __init__(self, tokens: int = 4, status: int = 200, engine_id: str = "p-engine") -> None:
        self.tokens = tokens
        self.status = status
        self.asked: list[dict[str, Any]] = []
        self.engine_id = engine_id
        self.at_once = self.most_at_once = self.answered = 0
        self.answered_before: list[int] = []
        """When each request came, how many had been answered."""

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/query":
            return httpx.Response(200, json={"0": {"engine_id": self.engine_id, "worker_addr": {}}})
        body = json.loads(request.content)
        self.asked.append(body)
        self.answered_before.append(self.answered)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0.01 * (1 + len(self.asked) % 2))
        self.at_once -= 1
        self.answered += 1
        if self.status != 200:
            return httpx.Response(self.status, text="it broke")
        events: list[dict[str, Any]] = [{"choices": [{"text": "x"}]} for _ in range(self.tokens)]
        events.append({"choices": [], "usage": {"prompt_tokens": 1000, "completion_tokens": self.tokens}})
        lines = [f"data: {json.dumps(event)}\n\n" for event in events] + ["data: [DONE]\n\n"]
        return httpx.Response(200, text="".join(lines))

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.MockTransport(self), base_url="http://fake")


def send(client: httpx.AsyncClient, load: Load) -> tuple[list[Sample], float]:
    return asyncio.run(run_load(client, "bench", prompts(load, "t"), load))


def test_a_load_keeps_so_many_requests_at_once() -> None:
    engine = FakeEngine()
    load = msgspec.structs.replace(LOAD, requests=10, at_once=3)
    samples, seconds = send(engine.client(), load)
    assert len(samples) == len(engine.asked) == 10
    assert engine.most_at_once == 3
    assert all(0 < sample.first_token_seconds <= sample.seconds <= seconds for sample in samples)
    assert len({body["prompt"] for body in engine.asked}) == 10


def test_in_bursts_nothing_is_sent_before_all_are_answered() -> None:
    engine = FakeEngine()
    samples, _ = send(engine.client(), msgspec.structs.replace(LOAD, requests=8, at_once=3, in_bursts=True))
    assert len(samples) == 8
    assert engine.answered_before == [0, 0, 0, 3, 3, 3, 6, 6]
    steady = FakeEngine()
    send(steady.client(), msgspec.structs.replace(LOAD, requests=8, at_once=3))
    assert steady.answered_before[:3] == [0, 0, 0]
    assert 0 < steady.answered_before[3] < 3


@pytest.mark.parametrize(
    ("engine", "named"), [(FakeEngine(status=500), "HTTP 500"), (FakeEngine(tokens=3), "3 tokens")]
)
def test_a_wrong_answer_is_no_measurement(engine: FakeEngine, named: str) -> None:
    with pytest.raises(LoadError, match=named):
        send(engine.client(), LOAD)


def test_the_mooncake_router_gives_both_engines_one_transfer() -> None:
    prefill, decode = FakeEngine(), FakeEngine()
    router = MooncakeRouter(prefill.client(), decode.client(), "http://fake:1")
    client = httpx.AsyncClient(transport=httpx.ASGITransport(make_app(router)), base_url="http://router")
    samples, _ = send(client, LOAD)
    assert len(samples) == 2
    to_prefill = {body["kv_transfer_params"]["transfer_id"]: body for body in prefill.asked}
    to_decode = {body["kv_transfer_params"]["transfer_id"]: body for body in decode.asked}
    assert len(to_prefill) == 2
    assert to_prefill.keys() == to_decode.keys()
    for transfer, body in to_prefill.items():
        assert body["max_tokens"] == 1
        assert "stream" not in body
        assert body["kv_transfer_params"]["do_remote_decode"] is True
        assert body["prompt"] == to_decode[transfer]["prompt"]
        assert to_decode[transfer]["max_tokens"] == LOAD.output_tokens
        assert to_decode[transfer]["kv_transfer_params"] == {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "transfer_id": transfer,
            "remote_bootstrap_addr": "http://fake:1",
            "remote_engine_id": "p-engine",
        }


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--way", "magic"], "--way magic"),
        (["--rounds", "0"], "--rounds is 0"),
        (["--tokens", "0"], "--tokens is 0"),
        (["--tokens", "100000"], "--tokens 100000"),
        (["--at-once", "-1"], "--at-once is -1"),
    ],
)
def test_bad_values_are_named(words: list[str], named: str) -> None:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["bench", "serve", *words])
    assert result.exit_code == 2
    assert named in result.stderr


def test_a_way_that_cannot_run_here_is_left_out_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    from dfirst.connector.bench import serve_ways

    monkeypatch.setattr(serve_ways, "find_spec", lambda name: None)
    assert serve_ways.missing_for(NIXL) == "the package nixl is not installed"
    assert serve_ways.missing_for(BLOCKWISE) is None
