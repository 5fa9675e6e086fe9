"""A plan follows from its seed and length alone, and holds every kind of fault."""

from collections import Counter
from itertools import pairwise

import pytest
from dfirst.connector.chaos.load import LONG_PROMPT_TOKENS, Pool, question
from dfirst.connector.chaos.orders import COPY_FAULTS, MESSAGE_FAULTS
from dfirst.connector.chaos.plan import (
    ENGINES,
    MODES,
    MOST_REQUESTS,
    Abort,
    Crowd,
    DeafPeer,
    HangUp,
    Kill,
    Pause,
    Tamper,
    make_plan,
)
from dfirst.protocol.specification import load_machine, machine_names

WANTED_FAULTS = 500


def test_a_seed_replays_its_plan() -> None:
    assert make_plan(1, 8) == make_plan(1, 8)
    assert make_plan(1, 8) != make_plan(2, 8)


def test_a_seed_replays_its_questions() -> None:
    pools = Pool(1), Pool(1), Pool(2)
    assert pools[0].prompts == pools[1].prompts
    assert pools[0].prompts != pools[2].prompts
    drawn = [[question(pool, 1, number) for number in range(50)] for pool in pools[:2]]
    assert drawn[0] == drawn[1]
    assert drawn[0] != [question(pools[0], 2, number) for number in range(50)]


def test_eight_minutes_hold_every_kind_of_fault_in_all_modes() -> None:
    plan = make_plan(1, 8)
    assert len(plan.events) > WANTED_FAULTS
    tampers = [event for event in plan.events if isinstance(event, Tamper)]
    assert {(event.engine, event.fault) for event in tampers} == {
        (engine, fault) for engine in ENGINES for fault in (*MESSAGE_FAULTS, *COPY_FAULTS)
    }
    kills = [event.server for event in plan.events if isinstance(event, Kill)]
    assert set(kills) == {"prefill", "decode", "router"}
    for kind in (HangUp, Abort):
        assert {event.mode for event in plan.events if isinstance(event, kind)} == set(MODES)
    for kind in (Abort, Pause, DeafPeer):
        assert {event.engine for event in plan.events if isinstance(event, kind)} == set(ENGINES)
    assert {event.past_lease for event in plan.events if isinstance(event, Pause)} == {True, False}
    assert any(isinstance(event, Crowd) for event in plan.events)


@pytest.mark.parametrize("minutes", [0.1, 1.5, 8])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_plan_stays_within_its_time(seed: int, minutes: float) -> None:
    plan = make_plan(seed, minutes)
    times = [event.at for event in plan.events]
    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1] <= plan.seconds
    assert all(1 <= plan.requests_at(second) <= MOST_REQUESTS for second in range(int(plan.seconds)))


def test_a_short_run_kills_no_engine_and_a_long_one_has_room_for_restarts() -> None:
    assert {event.server for event in make_plan(1, 1.5).events if isinstance(event, Kill)} == {"router"}
    engines = [
        event.at for event in make_plan(1, 8).events if isinstance(event, Kill) and event.server != "router"
    ]
    assert min(later - earlier for earlier, later in pairwise(engines)) > 120
    assert engines[-1] < 8 * 60 - 120


def test_hang_ups_name_states_of_the_spec_and_come_to_each() -> None:
    plan = make_plan(1, 30)
    moments = Counter(
        (event.mode, event.machine, event.state) for event in plan.events if isinstance(event, HangUp)
    )
    for _, machine, state in moments:
        assert machine in machine_names()
        assert state in {one.name for one in load_machine(machine).states}
    for machine, state in (("prefill_blockwise", "METADATA_QUERY"), ("decode_layerwise", "PUSHES_PENDING")):
        assert any((machine, state) == moment[1:] for moment in moments)


def test_questions_are_of_every_kind() -> None:
    pool = Pool(1)
    drawn = [question(pool, 1, number) for number in range(300)]
    assert {one.mode for one in drawn} == set(MODES)
    assert {one.stream for one in drawn} == {True, False}
    assert {one.prompt for one in drawn} == set(range(len(pool.prompts)))
    lengths = [len(pool.prompts[one.prompt].prompt) for one in drawn]
    assert min(lengths) < 32
    assert max(lengths) > LONG_PROMPT_TOKENS
    by_salt = Counter(one.salt for one in drawn)
    assert max(by_salt.values()) > 1
    beginnings = {pool.prompts[one.prompt].prompt[:32] for one in drawn if by_salt[one.salt] > 1}
    assert len(beginnings) <= 3


def test_a_mode_a_long_prompt_and_a_long_answer_can_be_asked_for() -> None:
    pool = Pool(1)
    assert all(question(pool, 1, number, mode="layerwise").mode == "layerwise" for number in range(20))
    long = question(pool, 1, 1, long=True)
    assert len(pool.prompts[long.prompt].prompt) >= LONG_PROMPT_TOKENS
    assert question(pool, 1, 1, crowd=True).prompt in pool.long_answers
