"""Replicas on the prefill side carry even load: within one transfer if it can be, over many in any case."""

import random
from collections import defaultdict

import pytest
from dfirst.protocol.plan import PairPlan, plan_pair

from .definition import BOTH_SPLIT, DCP_SPANS_PCP, Parallel
from .request import Side, build, directory, places
from .table import PAIRS, Pair

TRANSFERS = 1000
MOST = 1.2
"""The most that a replica may carry, in means of its replicas."""
PROMPT = 131


def plan_of(prefill: Side, decode: Side) -> PairPlan:
    return plan_pair(directory(build(prefill, 0), "P"), directory(build(decode, 0), "D"))


def replicas(parallel: Parallel) -> list[list[int]]:
    """Return the ranks that hold the same layers, heads and tokens."""
    found = defaultdict(list)
    for rank in range(parallel.rank_count):
        found[parallel.layers_of(rank), parallel.heads_of(rank), parallel.cp_rank(rank)].append(rank)
    return list(found.values())


def carried(plan: PairPlan, prefill: Parallel, decode: Parallel, ids: list[str]) -> dict[int, int]:
    """Return how many (layer, head, token) are read of each prefill rank over these transfers."""
    tokens = {
        engine: [set(places(engine, 0, rank, 0, PROMPT)[0].tolist()) for rank in range(engine.rank_count)]
        for engine in (prefill, decode)
    }
    load = dict.fromkeys(range(prefill.rank_count), 0)
    for transfer_id in ids:
        for leg in plan.request(transfer_id, PROMPT, 0).legs:
            common = tokens[prefill][leg.prefill_rank] & tokens[decode][leg.decode_rank]
            load[leg.prefill_rank] += len(leg.layers) * leg.head_count * len(common)
    return load


def random_ids(seed: int) -> list[str]:
    generator = random.Random(seed)
    return [f"{generator.getrandbits(128):032x}" for _ in range(TRANSFERS)]


MORE_PAIRS = (
    Pair(1, (8, 1, 1), (1, 1, 1)),
    Pair(1, (8, 1, 1), (3, 1, 1)),
    Pair(1, (4, 2, 2), (2, 1, 1)),
    Pair(1, (8, 2, 1), (2, 1, 2)),
    Pair(2, (8, 1, 2), (2, 1, 1)),
    Pair(4, (16, 1, 1), (4, 1, 1)),
    Pair(4, (16, 1, 2), (2, 1, 1)),
)


@pytest.mark.parametrize(
    ("pair", "convention"),
    [
        (pair, convention)
        for pair in (*PAIRS, *MORE_PAIRS)
        for convention in (BOTH_SPLIT, DCP_SPANS_PCP)
        if pair.allowed(convention)
    ],
    ids=str,
)
def test_over_many_transfers_no_replica_carries_much_more_than_the_mean(pair: Pair, convention: str) -> None:
    prefill, decode = pair.sides(convention, convention)
    load = carried(plan_of(prefill, decode), prefill.parallel, decode.parallel, random_ids(20))
    for group in replicas(prefill.parallel):
        mean = sum(load[rank] for rank in group) / len(group)
        assert mean > 0, f"nobody reads from any of {group}"
        assert max(load[rank] for rank in group) <= MOST * mean, {rank: load[rank] for rank in group}


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_readers_of_one_transfer_spread_over_the_replicas(pair: Pair) -> None:
    prefill, decode = pair.sides()
    plan = plan_of(prefill, decode)
    for transfer_id in random_ids(21)[:50]:
        readers: dict[int, set[int]] = defaultdict(set)
        for leg in plan.request(transfer_id, PROMPT, 0).legs:
            readers[leg.prefill_rank].add(leg.decode_rank)
        for group in replicas(prefill.parallel):
            counts = [len(readers[rank]) for rank in group]
            asked = len(set().union(*(readers[rank] for rank in group)))
            assert max(counts) == -(-asked // len(group)), (group, counts)
