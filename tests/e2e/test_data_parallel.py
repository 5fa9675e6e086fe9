"""With two data-parallel ranks on P, one whose peer is dead does not hold up the other (rule L2)."""

from functools import partial

from dfirst.protocol.timing import Timing

from .engines import EngineHouse, assert_equal, prompts
from .http_json import complete
from .probing import MOST_RATIO, probe_seconds, ratio_beside_stuck_pushes

RANK_HEADER = "X-data-parallel-rank"
STUCK_SECONDS = 0.8 * Timing().query_timeout_seconds


def test_a_dead_peer_of_one_rank_does_not_slow_the_other_down(engines: EngineHouse) -> None:
    pair = engines.pair("gqa", prefill_dp=2, decode_tp=2)
    ranks = [partial(complete, pair.prefill.url, headers={RANK_HEADER: str(rank)}) for rank in (0, 1)]
    for number, rank in enumerate(ranks):
        list(probe_seconds(rank, f"warm {number}"))
    ratio = ratio_beside_stuck_pushes(pair, ranks[1], ranks[0], STUCK_SECONDS)
    print(f"latency on the rank beside: {ratio:.2f} times that without")
    assert ratio < MOST_RATIO
    requests = prompts("layerwise", 90, 300, title="after a dead peer of one rank")
    assert_equal(requests, pair.ask(requests), engines.references("gqa", requests))
