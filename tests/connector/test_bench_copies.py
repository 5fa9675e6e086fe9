"""The layouts of the benchmark are what their names say, and every byte of a prompt is counted once."""

import pytest
from dfirst.connector.bench.bars import bars
from dfirst.connector.bench.copies_cases import LAYERS, Case, cases
from dfirst.protocol.copies import copies
from dfirst.protocol.plan import plan_pair
from dfirst.protocol.shards import Directory, RankEntry

BASE = {"P": 1 << 40, "D": 1 << 44}
EVERY_CASE = list(cases(quick=False))


def engine(name: str, case: Case, tp: int, blocks: int) -> Directory:
    size = case.bytes_of_rank(tp, blocks)
    ranks = tuple(
        RankEntry(
            rank=rank,
            host=name,
            port=rank + 1,
            incarnation=f"{name}{rank}",
            data_address=name,
            shard=case.shard(tp, rank, BASE[name] + rank * size, blocks),
        )
        for rank in range(tp)
    )
    return Directory(engine_id=name, model="m", layout=name, ranks=ranks)


@pytest.mark.parametrize("case", EVERY_CASE, ids=lambda case: case.name)
def test_the_ranks_that_take_part_move_the_bytes_that_are_counted(case):
    blocks = case.blocks(1 << 20)
    tokens = blocks * case.block_size
    prefill, decode = engine("P", case, case.prefill_tp, blocks), engine("D", case, case.decode_tp, blocks)
    request = plan_pair(prefill, decode).request("bench", tokens, 0)
    moved = 0
    for rank in case.decode_ranks:
        for leg in request.legs_of_decode(rank):
            assert leg.prefill_rank in case.prefill_ranks
            shards = prefill.ranks[leg.prefill_rank].shard, decode.ranks[rank].shard
            made = copies(leg, *shards, case.table(blocks, 1), case.table(blocks, 2), range(tokens))
            end = BASE["D"] + len(decode.ranks) * case.bytes_of_rank(case.decode_tp, blocks)
            assert int((made.target_addresses + made.lengths).max()) <= end
            moved += made.bytes
    assert moved == LAYERS * tokens * case.content_bytes * case.moved_heads


def test_the_table_has_every_kind_that_is_asked_for_in_both_modes():
    for mode in ("blockwise", "layerwise"):
        rows = [case for case in EVERY_CASE if case.mode == mode]
        assert {case.block_size for case in rows} >= {16, 32, 64, 128}
        assert {(case.prefill_tp, case.decode_tp) for case in rows} == {(1, 1), (4, 2), (2, 4)}
        assert {case.heads_inside for case in rows if case.prefill_tp > 1} == {False, True}
        sizes = [case.block_bytes for case in rows if case.prefill_tp == 1]
        assert min(sizes) == 4096
        assert max(sizes) == 128 * 1024
        assert any("MLA" in case.name for case in rows)
        assert {case.scattered for case in rows} == {False, True}
    assert len({case.name for case in EVERY_CASE}) == len(EVERY_CASE)
    assert {case.name for case in cases(quick=True)} <= {case.name for case in EVERY_CASE}


def test_a_chart_shows_each_row_with_its_value():
    drawn = bars("Ratios & more", [("a <row>", 0.5, 0.9), ("another", 1.25, 0.9)])
    assert drawn.startswith("<svg")
    for text in ("Ratios &amp; more", "a &lt;row&gt;", ">0.50<", ">1.25<"):
        assert text in drawn
