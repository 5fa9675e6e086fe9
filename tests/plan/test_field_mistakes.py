"""What went wrong in the connectors of the field, each by its name.

First the mistakes that were measured there: each test is a layout or a request that brought one of them out.
Then four mistakes that are put back here, one at a time: a check of this directory fails.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import msgspec
import pytest
from dfirst.protocol import copies as copying
from dfirst.protocol.copies import Copies
from dfirst.protocol.plan import Leg, RequestPlan
from dfirst.protocol.shards import Shard
from dfirst.spec.explore.memory import Habits
from dfirst.spec.explore.mistakes import mistakes

from .cores import Cores, pull_with_cores, push_with_cores
from .definition import Group, Parallel
from .feeds import PushingEngine, with_id
from .judge import Wrong, pull, push
from .memory import Form, Part
from .request import Side
from .table import PAIRS, prompts, request_for

BLOCK_SIZE = 4
LAYERS = 4


def side(
    heads: int = 4, stages: tuple[int, ...] = (LAYERS,), block_size: int = BLOCK_SIZE, **sizes: int
) -> Side:
    group = Group(tuple(range(sum(stages))), block_size)
    parallel = Parallel(heads=heads, stages=stages, groups=(group,), interleave=block_size)
    form = Form(parts=(Part("kv", 3, 2),), block_count=64)
    return Side(replace(parallel, **sizes), form)


def both_ways(prefill: Side, decode: Side, tokens: int, cached: int = 0) -> None:
    """Move a prompt in both modes, by the plan alone and between real cores."""
    step = prefill.parallel.prefix_step
    request = request_for(prefill, decode, tokens, cached, "field")
    pull(prefill, decode, request)
    push(prefill, decode, request, [*range(step, tokens, step), tokens])
    pull_with_cores(prefill, decode, request)
    push_with_cores(prefill, decode, request)


# Measured in the field


@pytest.mark.parametrize("stages", [(2, 2), (3, 1), (1, 2, 1)])
def test_every_stages_layers_arrive_where_prefill_has_pp_and_dcp(stages: tuple[int, ...]) -> None:
    both_ways(side(stages=stages, tp=8, dcp=2), side(tp=4), 39)
    both_ways(side(heads=1, stages=stages, tp=4, dcp=4), side(heads=1, tp=2, dcp=2), 39)


@pytest.mark.parametrize("cached", [4, 12, 20, 28])
def test_no_token_is_shifted_where_blocks_differ_and_the_prefix_ends_inside_a_prefill_block(
    cached: int,
) -> None:
    prefill = side(block_size=8, tp=4, pcp=2)
    assert cached % 8
    both_ways(prefill, side(block_size=4, tp=4), 39, cached)
    both_ways(side(heads=1, block_size=16, tp=4, dcp=2, pcp=2), side(heads=1, block_size=4, tp=2), 61, cached)


def test_heads_that_overlap_without_one_side_containing_the_other_arrive() -> None:
    both_ways(side(heads=6, tp=3), side(heads=6, tp=2), 22)
    both_ways(side(heads=6, tp=2), side(heads=6, tp=3), 22, cached=8)
    both_ways(side(heads=12, tp=4), side(heads=12, tp=3), 22)


def test_layer_wise_a_decode_rank_that_receives_no_block_completes() -> None:
    prefill, decode = side(heads=1, tp=2), side(heads=1, tp=4, dcp=4)
    for tokens in (1, 3, 5, 12):
        push_with_cores(prefill, decode, request_for(prefill, decode, tokens, 0, "few tokens"))


def test_layer_wise_nobody_waits_for_what_the_cached_prefix_makes_unnecessary() -> None:
    prefill, decode = side(heads=1, tp=4, dcp=4), side(heads=1, tp=2)
    for cached in (0, 4, 8, 12, 16, 20):
        request = request_for(prefill, decode, 21, cached, "mostly cached")
        push_with_cores(prefill, decode, request)
        pull_with_cores(prefill, decode, request)


def test_layer_wise_a_request_keeps_its_replicas_when_its_place_in_the_batch_changes() -> None:
    prefill, decode = side(heads=1, tp=8), side(heads=1, tp=2)
    first = request_for(prefill, decode, 23, 0, "first")
    others = [with_id(first, f"other {number}", 8 * (number + 1), 64) for number in range(4)]
    prompts_ = [first, *others]
    engine = PushingEngine(prefill, decode, first, *others)
    for request in prompts_:
        engine.start(request)
        engine.lend(request)
    done = dict.fromkeys(prompts_, 0)
    for number, end in enumerate((5, 9, 16, 23)):
        order = prompts_[number:] + prompts_[:number]
        # The later prompts join later, so that places move; what they missed comes in one chunk.
        batch = [request for request in order if prompts_.index(request) <= number + 1 or end == 23]
        engine.step([(request, done[request], end) for request in batch])
        done.update(dict.fromkeys(batch, end))
    engine.check(*prompts_)


# Put back


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, value)
        yield


def mistake_of_the_explorer(name: str) -> AbstractContextManager[None]:
    """Return a mistake in the machines that the explorer knows too."""
    (mutant,) = [mutant for mutant in mistakes() if mutant.name == name]
    return mutant.change(Habits())


def readers_of_the_base_port() -> AbstractContextManager[None]:
    real = RequestPlan.readers
    return replaced(RequestPlan, "readers", lambda plan, _rank: real(plan, 0))


def swapped_copies() -> AbstractContextManager[None]:
    real = copying.copies

    def swapped(*arguments: object, **named: object) -> Copies:
        made = real(*arguments, **named)
        return Copies(made.target_addresses, made.source_addresses, made.lengths)

    return replaced(copying, "copies", swapped)


def copies_without_the_offset_in_the_block() -> AbstractContextManager[None]:
    real = copying.copies

    def without_offset(leg: Leg, source: Shard, *rest: object) -> Copies:
        # As if the piece began where the rank's block begins.
        return real(leg, msgspec.structs.replace(source, first_kv_head=leg.first_kv_head), *rest)

    return replaced(copying, "copies", without_offset)


def pairs_with_fewer_decode_ranks_are_pulled_and_released() -> None:
    for pair in PAIRS[-2:]:
        prefill, decode = pair.sides()
        for name, (tokens, cached) in list(prompts(prefill, decode).items())[:3]:
            pull_with_cores(prefill, decode, request_for(prefill, decode, tokens, cached, name))


def the_plan_names_the_readers_of_every_rank() -> None:
    for pair in PAIRS:
        prefill, decode = pair.sides()
        pull(prefill, decode, request_for(prefill, decode, 21, 0, "readers"))


def a_rank_that_is_read_twice_is_released_after_the_last_reader() -> None:
    prefill, decode = side(tp=2), side(tp=4)
    pull_with_cores(prefill, decode, request_for(prefill, decode, 21, 0, "two readers"))


def a_block_that_is_read_in_pieces_of_heads_arrives() -> None:
    prefill, decode = side(tp=1), side(tp=4)
    pull(prefill, decode, request_for(prefill, decode, 21, 0, "pieces"))


def a_refused_query_is_followed_by_no_copy() -> None:
    prefill, decode = side(tp=2), side(tp=2)
    cores = Cores(prefill, decode, request_for(prefill, decode, 21, 0, "refused"))
    cores.pull(offered_tokens=20)
    cores.check_failed()


@pytest.mark.parametrize(
    ("mistake", "check"),
    [
        pytest.param(
            readers_of_the_base_port,
            the_plan_names_the_readers_of_every_rank,
            id="readers of the base port, plan",
        ),
        pytest.param(
            lambda: mistake_of_the_explorer("field port"),
            pairs_with_fewer_decode_ranks_are_pulled_and_released,
            id="readers of the base port, machine",
        ),
        pytest.param(
            lambda: mistake_of_the_explorer("field first"),
            a_rank_that_is_read_twice_is_released_after_the_last_reader,
            id="freed at the first DONE",
        ),
        pytest.param(
            swapped_copies,
            a_block_that_is_read_in_pieces_of_heads_arrives,
            id="source and destination swapped",
        ),
        pytest.param(
            copies_without_the_offset_in_the_block,
            a_block_that_is_read_in_pieces_of_heads_arrives,
            id="the offset inside the block left out",
        ),
        pytest.param(
            lambda: mistake_of_the_explorer("field refused"),
            a_refused_query_is_followed_by_no_copy,
            id="a failed query's result used",
        ),
    ],
)
def test_a_mistake_put_back_is_noticed(
    mistake: Callable[[], AbstractContextManager[None]], check: Callable[[], None]
) -> None:
    check()
    with mistake(), pytest.raises(Wrong):
        check()
    check()
