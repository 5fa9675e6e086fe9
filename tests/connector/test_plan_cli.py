"""`dfirst plan`: its JSON is checked by the definition of the layouts alone, with nothing of the planner."""

import itertools
import xml.etree.ElementTree as ET
from collections import Counter
from functools import cache
from io import StringIO
from pathlib import Path

import msgspec
import pytest
from dfirst.connector.cli import app
from dfirst.connector.what_if import work_out
from dfirst.connector.what_if.answer import LegAnswer, PlanAnswer, SideAnswer
from dfirst.connector.what_if.tables import show
from rich.console import Console
from typer.testing import CliRunner, Result

from tests.plan.definition import Group, Parallel

LAYERS = 3
SMALL = ["--layers", str(LAYERS), "--head-size", "1", "--dtype", "fp8", "--block-size", "4"]
MLA, GQA = ["--mla"], ["--kv-heads", "4"]

PAIRS = [
    pytest.param("tp=2", "tp=2", GQA, id="equal"),
    pytest.param("tp=4", "tp=2", GQA, id="fewer on D"),
    pytest.param("tp=2", "tp=4", GQA, id="more on D"),
    pytest.param("tp=2", "tp=4", [*GQA, "--kv-layout", "hnd"], id="heads outside"),
    pytest.param("tp=2", "tp=4", [*GQA, "--whole-blocks"], id="whole blocks"),
    pytest.param("tp=8", "tp=2", ["--kv-heads", "2"], id="replicas on P"),
    pytest.param("tp=3", "tp=2", ["--kv-heads", "6"], id="heads that overlap"),
    pytest.param("tp=2,pp=2", "tp=1", [*GQA, "--prefill-layers", "2,1"], id="uneven stages on P"),
    pytest.param("tp=1,pp=3", "pp=2", [*GQA, "--decode-layers", "1,2"], id="stages on both"),
    pytest.param("tp=4,dp=2", "tp=4,dp=2", MLA, id="MLA replicas"),
    pytest.param("tp=8,pcp=2,dcp=8", "tp=8,dcp=4,dp=2", MLA, id="MLA, context parallel on both"),
    pytest.param("tp=8,pcp=2,dcp=2", "tp=4,dcp=4,dp=4", MLA, id="MLA, wider on D"),
    pytest.param("tp=8,pcp=2", "tp=4,dcp=2", MLA, id="MLA, PCP to DCP"),
    pytest.param("tp=8,pcp=2,dcp=2", "tp=4,dp=4", GQA, id="GQA, context parallel on P"),
    pytest.param("tp=16,dcp=2", "tp=8,dcp=2,dp=2", GQA, id="GQA, DCP on both"),
    pytest.param("tp=4,pcp=2,dcp=8", "tp=4,dcp=2", [*MLA, "--convention", "b"], id="convention b"),
    pytest.param("tp=2", "tp=2", [*GQA, "--prefill-block-size", "8"], id="larger blocks on P"),
    pytest.param("tp=2", "tp=2", [*GQA, "--decode-block-size", "16"], id="larger blocks on D"),
    pytest.param("tp=4,dcp=4", "tp=2,dcp=2", [*MLA, "--interleave", "1"], id="token by token"),
    pytest.param(
        "tp=4,dcp=4", "tp=2", [*MLA, "--prefill-block-size", "8", "--interleave", "2"], id="all at once"
    ),
]
CACHED = ["--tokens", "70", "--cached", "32"]
REQUESTS = [
    pytest.param(["--tokens", "70"], id="inside a block"),
    pytest.param(CACHED, id="cached prefix"),
    pytest.param(["--tokens", "3"], id="short"),
]


def dfirst(*words: str) -> Result:
    return CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}).invoke(app, words)


def plan(prefill: str, decode: str, *words: str) -> Result:
    return dfirst("plan", "--prefill", prefill, "--decode", decode, *words)


@cache
def answer(prefill: str, decode: str, *words: str) -> PlanAnswer:
    result = plan(prefill, decode, *words, "--json", "-")
    assert result.exit_code == 0, result.output
    return msgspec.json.decode(result.stdout, type=PlanAnswer)


def defined(sizes: str, words: list[str], side: str) -> Parallel:
    """Return an engine of these sizes by definition."""
    values = {axis: int(size) for axis, size in (part.split("=") for part in sizes.split(","))}
    options = dict(itertools.pairwise(words))
    block_size = int(options.get(f"--{side}-block-size", 4))
    split, pp = options.get(f"--{side}-layers"), values.get("pp", 1)
    return Parallel(
        heads=int(options.get("--kv-heads", 1)),
        stages=tuple(map(int, split.split(","))) if split else (LAYERS // pp,) * pp,
        groups=(Group(tuple(range(LAYERS)), block_size),),
        tp=values.get("tp", 1),
        pcp=values.get("pcp", 1),
        dcp=values.get("dcp", 1),
        interleave=int(options.get("--interleave", 1 if options.get("--convention") == "b" else block_size)),
        convention=options.get("--convention", "a"),
    )


def tokens_of(parallel: Parallel, rank: int, tokens: int) -> list[int]:
    """Return the tokens of a prompt of so many that a rank holds."""
    return [token for token in range(tokens) if parallel.holds_token(rank, token)]


def ranges(tokens: list[int]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for token in tokens:
        if found and found[-1][1] == token:
            found[-1] = (found[-1][0], token + 1)
        else:
            found.append((token, token + 1))
    return found


def slots(side: SideAnswer, rank: int) -> dict[int, tuple[int, int]]:
    """The (head, place in the block) of each offset of a block at which one begins."""
    return {
        number * side.head_stride_bytes + place * side.token_stride_bytes: (head, place)
        for number, head in enumerate(side.ranks[rank].heads)
        for place in range(side.block_tokens)
    }


def moved(found: PlanAnswer, leg: LegAnswer, source: Parallel, target: Parallel) -> list[tuple[int, int]]:
    """What a leg moves of each layer, copy by copy: (head, token). Both ends must mean the same."""
    assert found.prefill is not None
    assert found.decode is not None
    content = found.prefill.content_bytes
    here, there = slots(found.prefill, leg.prefill_rank), slots(found.decode, leg.decode_rank)
    source_tokens = tokens_of(source, leg.prefill_rank, found.prompt_tokens)
    target_tokens = tokens_of(target, leg.decode_rank, found.prompt_tokens)
    pieces = []
    for copy in leg.copies_of_a_layer:
        for step in range(0, copy.bytes, content):
            head, place = here[copy.source_offset + step]
            other_head, other_place = there[copy.target_offset + step]
            assert head == other_head
            number = copy.source_block * found.prefill.block_tokens + place
            other_number = copy.target_block * found.decode.block_tokens + other_place
            behind_the_end = number >= len(source_tokens)
            assert behind_the_end == (other_number >= len(target_tokens))
            if not behind_the_end:
                assert source_tokens[number] == target_tokens[other_number]
                pieces.append((head, source_tokens[number]))
    return pieces


@pytest.mark.parametrize("request_words", REQUESTS)
@pytest.mark.parametrize(("prefill", "decode", "words"), PAIRS)
def test_every_layer_head_and_token_arrives_once_and_in_its_place(
    prefill: str, decode: str, words: list[str], request_words: list[str]
) -> None:
    found = answer(prefill, decode, *SMALL, *words, *request_words)
    source, target = defined(prefill, words, "prefill"), defined(decode, words, "decode")
    arrived: Counter[tuple[int, int, int, int]] = Counter()
    for leg in found.legs:
        pieces = moved(found, leg, source, target)
        tokens = sorted({token for _, token in pieces})
        assert leg.token_ranges == ranges(tokens)
        assert leg.tokens == len(tokens)
        assert leg.heads == sorted({head for head, _ in pieces})
        assert leg.copies == len(leg.copies_of_a_layer) * len(leg.layers)
        assert leg.bytes == sum(copy.bytes for copy in leg.copies_of_a_layer) * len(leg.layers)
        for layer in leg.layers:
            assert layer in source.layers_of(leg.prefill_rank)
            arrived.update((leg.decode_rank, layer, head, token) for head, token in pieces)
    wanted = Counter(
        (rank, layer, head, token)
        for rank in range(target.rank_count)
        for layer in target.layers_of(rank)
        for head in target.heads_of(rank)
        for token in tokens_of(target, rank, found.prompt_tokens)
        if token >= found.cached_tokens
    )
    assert arrived == wanted


@pytest.mark.parametrize(("prefill", "decode", "words"), PAIRS)
def test_ranks_are_told_as_they_are(prefill: str, decode: str, words: list[str]) -> None:
    found = answer(prefill, decode, *SMALL, *words, *CACHED)
    for name, sizes, side in (("prefill", prefill, found.prefill), ("decode", decode, found.decode)):
        assert side is not None
        parallel = defined(sizes, words, name)
        places = [parallel.place(rank) for rank in range(parallel.rank_count)]
        assert [(rank.pp_rank, rank.pcp_rank, rank.tp_rank) for rank in side.ranks] == places
        for rank in side.ranks:
            assert rank.layers == list(parallel.layers_of(rank.rank))
            assert rank.heads == list(parallel.heads_of(rank.rank))
            assert rank.token_ranges == ranges(tokens_of(parallel, rank.rank, found.prompt_tokens))
            like = (rank.layers, rank.heads, rank.token_ranges)
            assert rank.replicas == [
                other.rank for other in side.ranks if (other.layers, other.heads, other.token_ranges) == like
            ]


@pytest.mark.parametrize(("prefill", "decode", "words"), PAIRS)
def test_every_prefill_rank_is_waited_out_or_released_by_somebody(
    prefill: str, decode: str, words: list[str]
) -> None:
    found = answer(prefill, decode, *SMALL, *words, *CACHED)
    assert found.prefill is not None
    assert found.decode is not None
    released = Counter(rank for one in found.decode.ranks for rank in one.releases)
    for rank in found.prefill.ranks:
        readers = sorted({leg.decode_rank for leg in found.legs if leg.prefill_rank == rank.rank})
        assert rank.peers == readers
        assert released[rank.rank] == (not readers)
        releasers = [one.rank for one in found.decode.ranks if rank.rank in one.releases]
        assert rank.waits_for == (readers or releasers)


def test_in_layerwise_decode_ranks_wait_for_their_writers() -> None:
    found = answer("tp=8,pcp=2", "tp=4", *SMALL, *MLA, "--tokens", "70", "--mode", "layerwise")
    assert found.prefill is not None
    assert found.decode is not None
    for rank in found.decode.ranks:
        writers = sorted({leg.prefill_rank for leg in found.legs if leg.decode_rank == rank.rank})
        assert rank.waits_for == rank.peers == writers
        assert writers
    assert not any(rank.waits_for for rank in found.prefill.ranks)
    assert not any(rank.releases for rank in found.decode.ranks)


def test_the_load_is_relative_to_the_replicas() -> None:
    found = answer("tp=4", "tp=1", *SMALL, *MLA, "--tokens", "64", "--transfers", "1000")
    assert found.prefill is not None
    assert sorted(rank.load for rank in found.prefill.ranks) == [0, 0, 0, 4]
    assert found.load is not None
    assert sum(found.load.bytes) == 1000 * found.bytes
    mean = 1000 * found.bytes / 4
    assert found.load.load == [sent / mean for sent in found.load.bytes]
    assert max(found.load.load) < 1.2


def test_the_transfer_id_chooses_among_replicas() -> None:
    servers = {
        answer("tp=4", "tp=1", *SMALL, *MLA, "--transfer-id", f"t{number}").legs[0].prefill_rank
        for number in range(40)
    }
    assert servers == {0, 1, 2, 3}


def test_the_sizes_of_a_token_are_those_of_the_model() -> None:
    mla = answer("tp=1", "tp=1", "--mla", "--layers", "61", "--tokens", "10")
    assert mla.bytes in (10 * 61 * 576 * 2, 128 * 61 * 576 * 2)
    assert mla.prefill is not None
    assert mla.prefill.content_bytes == 576 * 2
    gqa = answer("tp=1", "tp=1", "--kv-heads", "8", "--dtype", "fp8")
    assert gqa.prefill is not None
    assert gqa.prefill.content_bytes == 2 * 128


def test_the_tables_fold_what_is_alike_and_fit_on_a_screen() -> None:
    shown = plan("tp=8,pcp=2,dcp=8", "tp=8,dcp=4,dp=2", "--mla").stdout
    assert "P0, P4, P8, P12 to D0, D4" in shown
    assert "one of 2 data-parallel replicas" in shown
    assert len(shown.splitlines()) < 60
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= 140


def test_a_rank_that_nobody_reads_is_seen_to_be_released() -> None:
    shown = plan("tp=4", "tp=1", "--mla").output
    assert "nobody" in shown
    assert "releases unread" in shown


def test_a_pair_that_cannot_work_is_refused_in_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    words = ["--kv-heads", "4", "--whole-blocks", "--decode-block-size", "64"]
    result = plan("tp=2", "tp=2", *words, "--json", str(file), "--svg", str(tmp_path / "plan.svg"))
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert "TP 2, GQA with 4 KV heads, block size 128" in result.stderr
    assert "TP 2, GQA with 4 KV heads, block size 64" in result.stderr
    assert "cannot work together" in result.stderr
    found = msgspec.json.decode(file.read_bytes(), type=PlanAnswer)
    assert result.stderr == f"error: {found.refusal}\n"
    assert not (tmp_path / "plan.svg").exists()


@pytest.mark.parametrize(
    ("prefill", "words", "named"),
    [
        ("tp=x", ["--mla"], ["--prefill", "'x'"]),
        ("tp=2,ep=4", ["--mla"], ["--prefill", "'ep'", "tp, pp, pcp, dcp, dp"]),
        ("tp=3", ["--kv-heads", "4"], ["--prefill", "4 KV heads", "TP 3"]),
        ("tp=4,dcp=3", ["--mla"], ["--prefill", "DCP 3"]),
        ("tp=2", [], ["--mla", "--kv-heads"]),
        ("tp=2", ["--mla", "--kv-heads", "7"], ["--mla", "--kv-heads 7"]),
        ("tp=2", ["--mla", "--interleave", "3"], ["--interleave 3", "128"]),
        ("pp=2", ["--mla", "--prefill-layers", "40,20"], ["61 layers", "40, 20"]),
        ("pp=2", ["--mla", "--prefill-layers", "40,x"], ["--prefill-layers", "'x'"]),
        ("tp=2", ["--mla", "--cached", "100"], ["100"]),
        ("tp=2", ["--mla", "--tokens", "0"], ["--tokens is 0", "at least 1"]),
        ("tp=2", ["--mla", "--tokens", "99999999999"], ["--tokens is 99999999999", "at most"]),
        ("tp=2", ["--mla", "--cached", "8192"], ["--cached is 8192", "at most 4096"]),
        ("tp=2", ["--mla", "--transfers", "1000000000"], ["--transfers is 1000000000", "at most"]),
        ("tp=2", ["--mla", "--layers", "1000000"], ["--layers is 1000000", "at most"]),
        ("tp=8,pcp=1000000000", ["--mla"], ["--prefill", "8000000000 ranks", "1024"]),
        ("tp=2", ["--mla", "--tokens", "x"], ["--tokens is 'x'", "at least 1 and at most 16777216"]),
        (
            "tp=2",
            ["--mla", "--head-size", "999999999999999"],
            ["--head-size is 999999999999999", "at most 65536"],
        ),
        ("tp=2", ["--mla", "--block-size", "99999999999"], ["--block-size is 99999999999", "at most 65536"]),
        ("tp=2", ["--mla", "--decode-block-size", "0"], ["--decode-block-size is 0", "at least 1"]),
        ("tp=2", ["--kv-heads", "5000"], ["--kv-heads is 5000", "at most 4096"]),
        (
            "tp=2",
            ["--mla", "--tokens", "16777216", "--block-size", "1"],
            ["--tokens is 16777216", "16777216 pieces of 1 on the prefill side", "--block-size"],
        ),
        (
            "tp=2,dcp=2",
            ["--mla", "--tokens", "16777216", "--interleave", "1"],
            ["--tokens is 16777216", "pieces of 1 on the prefill side", "--interleave"],
        ),
        ("", ["--mla"], ["--prefill: '' says nothing of an engine; write tp=8"]),
        ("tp=2", ["--mla", "--transfer-id", ""], ["--transfer-id is ''"]),
        ("tp=2", ["--mla", "--svg", "x.png"], ["--svg is x.png", "end its name in .svg"]),
        ("tp=2", ["--mla", "--svg", "x.svg", "--json", "./x.svg"], ["--svg and --json are both x.svg"]),
        ("tp=2", ["--mla", "--convention", "c"], ["--convention", "'c'"]),
        ("tp=2", ["--mla", "--json", "/dev/null/plan.json"], ["--json", "/dev/null/plan.json"]),
    ],
)
def test_bad_values_are_named(prefill: str, words: list[str], named: list[str]) -> None:
    result = plan(prefill, "tp=2", *words)
    assert result.exit_code == 2
    assert result.stdout == ""
    for word in named:
        assert word in result.stderr


@pytest.mark.parametrize(
    ("prefill", "words", "noted"),
    [
        ("tp=4,dcp=2", [], ["--convention b", "--cp-kv-cache-interleave-size"]),
        ("tp=4,pcp=2,dcp=2", [], ["--convention b"]),
        ("tp=4,pcp=2", ["--convention", "a"], ["PCP 2 without DCP"]),
        ("tp=4,dcp=2", ["--convention", "a"], []),
        ("tp=4", [], []),
        ("tp=4,pcp=2", ["--convention", "b"], ["PCP 2 without DCP", "dcp=2 in --prefill"]),
        ("tp=4,pcp=2,dcp=2", ["--convention", "b"], []),
    ],
)
def test_what_running_engines_do_otherwise_is_said_beside_the_plan(
    prefill: str, words: list[str], noted: list[str]
) -> None:
    result = plan(prefill, "tp=2", "--mla", "--tokens", "200", "--layers", "1", *words)
    assert result.exit_code == 0
    assert result.stderr.count("note: ") == (1 if noted else 0)
    for word in noted:
        assert word in result.stderr
    assert "note: " not in result.stdout


def test_the_interleave_of_an_engine_is_shown_and_is_vllms_own_in_convention_b() -> None:
    words = ["--mla", "--tokens", "200", "--layers", "1"]
    assert "interleave 128; 4 ranks" in plan("tp=4,dcp=2", "tp=2", *words).stdout
    assert "interleave 1; 4 ranks" in plan("tp=4,dcp=2", "tp=2", *words, "--convention", "b").stdout
    assert "interleave" not in plan("tp=4", "tp=2", *words).stdout


def test_more_copies_than_can_be_listed_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_out, "MAX_LISTED", 100)
    words = [*GQA, "--tokens", "101"]
    assert plan("tp=2", "tp=1", *words).exit_code == 0
    result = plan("tp=2", "tp=1", *words, "--json", "-")
    assert result.exit_code == 2
    assert result.stdout == ""
    for word in ("--tokens is 101", "more than 100 copies of a layer", "with --json"):
        assert word in result.stderr


def test_the_readme_shows_what_is_printed() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    command, *lines = readme.partition("$ dfirst plan ")[2].partition("```")[0].splitlines()
    shown = [line.rstrip() for line in dfirst("plan", *command.split()).stdout.splitlines()]
    assert len(lines) > 10
    assert [line for line in lines if line != "..." and line.rstrip() not in shown] == []


def test_where_nothing_moves_there_is_no_table_of_legs() -> None:
    words = [*SMALL, *MLA, "--tokens", "8", "--cached", "8"]
    shown = plan("tp=2", "tp=1", *words).output
    assert "8 of them cached on D, transfer id 'what-if': nothing moves" in shown
    assert "1 rank\n" in shown
    assert "legs" not in shown


def test_on_a_narrow_terminal_nothing_is_cut_off() -> None:
    found = answer("tp=4,dcp=2", "tp=2,dcp=2", *SMALL, *MLA, "--tokens", "70")
    stream = StringIO()
    show(found, Console(file=stream, width=80, force_terminal=True, color_system=None))
    shown = stream.getvalue()
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_the_titles_of_the_picture_do_not_meet(tmp_path: Path) -> None:
    file = tmp_path / "plan.svg"
    assert plan("tp=16,dcp=2", "tp=8,dcp=2", *SMALL, *GQA, "--svg", str(file)).exit_code == 0
    root = ET.parse(file).getroot()
    texts = [each for each in root.iter("{http://www.w3.org/2000/svg}text") if each.text]
    [left] = [each for each in texts if each.text.startswith("prefill: ")]
    [right] = [each for each in texts if each.text.startswith("decode: ")]
    assert left.get("y") != right.get("y")
    assert right.get("text-anchor") == "end"
    assert float(right.get("x", 0)) < float(root.get("width", 0))


def test_the_picture_has_every_rank_and_leg(tmp_path: Path) -> None:
    file = tmp_path / "pictures" / "plan.svg"
    words = [*SMALL, *MLA, "--tokens", "70"]
    assert plan("tp=8,pcp=2", "tp=4,dcp=2", *words, "--svg", str(file)).exit_code == 0
    found = answer("tp=8,pcp=2", "tp=4,dcp=2", *words)
    assert found.decode is not None
    root = ET.parse(file).getroot()
    name = "{http://www.w3.org/2000/svg}"
    tooltips = [title.text or "" for title in root.iter(f"{name}title")]
    for leg in found.legs:
        assert sum(text.startswith(f"P{leg.prefill_rank} to D{leg.decode_rank}:") for text in tooltips) == 1
    releases = sum(len(rank.releases) for rank in found.decode.ranks)
    assert len(list(root.iter(f"{name}path"))) == len(found.legs) + releases
    boxes = {text.split()[0] for text in tooltips if " holds " in text}
    assert boxes == {f"P{rank}" for rank in range(16)} | {f"D{rank}" for rank in range(4)}
