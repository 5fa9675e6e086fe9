"""The scheduler side inside vLLM's own scheduler: what the ranks and the router are told, and that every
block comes back.
"""

import logging
from typing import Any

import pytest
from dfirst.connector import scheduler_side
from dfirst.protocol.commands import (
    AbortTransfer,
    AcceptPush,
    FinishPush,
    OfferBlocks,
    RemoteEngine,
    RemoteRank,
    Renounce,
    StartPull,
    StartPush,
)
from dfirst.protocol.messages import TransferKey
from vllm.v1.request import RequestStatus

from .vllm_scheduler import BLOCK_SIZE, CHUNK_TOKENS, Engine

KEY = TransferKey("t", 0)
PREFILL = RemoteEngine("P", "d", (RemoteRank("10.0.0.1", 4000, "p0"),))
RANKS = [{"host": "10.0.0.1", "port": 4000, "incarnation": "p0"}]
OFFERED = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "transfer_id": "t",
    "remote_engine_id": "P",
    "remote_host": "10.0.0.1",
    "remote_port": 4000,
    "remote_ranks": RANKS,
    "layout_digest": "d",
    "remote_block_ids": [[1, 2]],
}
METASERVER = {"do_remote_prefill": True, "transfer_id": "t", "metaserver": "http://router/m"}
TO_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "t"}
ANNOUNCED = OFFERED | {"do_remote_prefill": False, "do_remote_decode": True}
PROMPT = range(100)
"""Six blocks and a quarter: it ends inside a block, and takes two chunks."""
PROMPT_BLOCKS = 7
LOADS = {"blockwise": OFFERED, "layerwise": METASERVER}
MODES = pytest.mark.parametrize("mode", ["blockwise", "layerwise"])


@pytest.fixture
def engine() -> Engine:
    return Engine()


def status(engine: Engine, name: str) -> RequestStatus:
    return engine.scheduler.requests[name].status


# Decode


def test_a_pulled_prompt_is_decoded_from_the_blocks_that_were_filled(engine: Engine) -> None:
    engine.add("r", PROMPT, OFFERED)
    [pull] = engine.step()
    assert isinstance(pull, StartPull)
    assert (pull.key, pull.request_id) == (KEY, "r")
    assert (pull.prompt_tokens, pull.cached_tokens) == (len(PROMPT), 0)
    assert pull.block_ids == engine.blocks("r")
    assert len(pull.block_ids) == PROMPT_BLOCKS
    assert pull.remote.ranks == (RemoteRank("10.0.0.1", 4000, "p0"),)
    assert status(engine, "r") == RequestStatus.WAITING_FOR_REMOTE_KVS
    assert engine.step() == [], "the ranks are told once"
    engine.step(received=["r"])
    assert engine.blocks("r")[:PROMPT_BLOCKS] == pull.block_ids
    engine.step()
    assert engine.offered == {"r": None}
    engine.assert_nothing_is_left()


def test_a_pushed_prompt_is_announced_with_its_blocks(engine: Engine) -> None:
    engine.add("r", PROMPT, METASERVER)
    [accept] = engine.step()
    assert isinstance(accept, AcceptPush)
    assert (accept.key, accept.request_id, accept.block_ids) == (KEY, "r", engine.blocks("r"))
    [(url, announced)] = engine.announcer.posted
    assert url == "http://router/m"
    assert announced.remote_block_ids == (accept.block_ids,)
    assert (announced.do_remote_prefill, announced.do_remote_decode) == (False, True)
    assert (announced.transfer_id, announced.attempt, announced.request_id) == ("t", 0, "r")
    assert announced.remote_ranks == (RemoteRank("10.0.0.7", 4321, "i0"),)
    assert (announced.remote_host, announced.remote_port) == ("10.0.0.7", 4321)
    engine.step(received=["r"])
    engine.step()
    engine.assert_nothing_is_left()
    assert len(engine.announcer.posted) == 1


@pytest.mark.parametrize("tokens", [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 4 * BLOCK_SIZE])
@MODES
def test_prompts_of_any_length_get_exactly_their_blocks(engine: Engine, mode: str, tokens: int) -> None:
    engine.add("r", range(tokens), LOADS[mode])
    [start] = engine.step()
    assert len(start.block_ids) == -(-tokens // BLOCK_SIZE)
    engine.step(received=["r"])
    engine.step()
    engine.assert_nothing_is_left()


@MODES
def test_one_block_id_stands_for_a_block_on_every_rank_that_splits_the_tokens(mode: str) -> None:
    engine = Engine(dcp=2)
    engine.add("before", range(70))
    engine.step()
    engine.step()
    engine.add("r", PROMPT, LOADS[mode])
    [start] = engine.step()
    assert start.cached_tokens == 64, "two blocks of 32 tokens of the seventy before"
    assert len(start.block_ids) == 4
    engine.step(received=["r"])
    engine.step()
    engine.assert_nothing_is_left()


@MODES
def test_a_step_may_wait_if_it_computes_nothing_and_nobody_waits_for_it(mode: str) -> None:
    for engine, may_wait in ((Engine(), True), (Engine(dp=2), False)):
        engine.add("r", PROMPT, LOADS[mode])
        engine.step()
        assert engine.may_wait is may_wait
        engine.add("computed here", PROMPT)
        engine.step()
        assert not engine.may_wait


@MODES
def test_blocks_that_are_cached_here_are_not_asked_for(engine: Engine, mode: str) -> None:
    engine.add("before", range(70))
    engine.step()
    engine.step()
    engine.add("r", PROMPT, LOADS[mode])
    [start] = engine.step()
    assert start.cached_tokens == 64, "four whole blocks of the seventy tokens before"
    assert start.block_ids == engine.blocks("r")
    for _, announced in engine.announcer.posted:
        assert announced.remote_cached_tokens == 64
    engine.step(received=["r"])
    engine.step()
    engine.assert_nothing_is_left()


@MODES
def test_of_a_prompt_that_is_cached_whole_the_last_block_is_brought(engine: Engine, mode: str) -> None:
    for name in ("before", "r"):
        engine.add(name, range(64), None if name == "before" else LOADS[mode])
        commands = engine.step()
    assert commands[0].cached_tokens == 48, "vLLM computes at least one token itself"
    engine.step(received=["r"])
    engine.step()
    engine.assert_nothing_is_left()


def test_a_request_that_may_not_read_the_cache_releases_the_prefill_side(engine: Engine) -> None:
    request = engine.add("r", range(20), OFFERED)
    request.skip_reading_prefix_cache = True
    assert engine.step() == [Renounce(KEY, PREFILL)]
    engine.assert_nothing_is_left()


def test_an_abort_in_the_queue_releases_the_prefill_side(engine: Engine) -> None:
    engine.add("r", PROMPT, OFFERED)
    engine.abort("r")
    assert engine.step() == [Renounce(KEY, PREFILL)]
    engine.assert_nothing_is_left()


def test_an_abort_in_the_queue_has_nothing_to_release_layer_wise(engine: Engine) -> None:
    engine.add("r", PROMPT, METASERVER)
    engine.abort("r")
    assert engine.step() == []
    assert engine.announcer.posted == []
    engine.assert_nothing_is_left()


@pytest.mark.parametrize("outcome", ["received", "failed"])
@MODES
def test_an_abort_while_loading_keeps_the_blocks_until_the_ranks_report(
    engine: Engine, mode: str, outcome: str
) -> None:
    engine.add("r", PROMPT, LOADS[mode])
    engine.step()
    engine.abort("r")
    assert engine.free_blocks == engine.free_at_start - PROMPT_BLOCKS
    [abort] = engine.step()
    assert isinstance(abort, AbortTransfer)
    assert abort.key == KEY
    assert engine.free_blocks == engine.free_at_start - PROMPT_BLOCKS
    assert engine.step(**{outcome: ["r"]}) == []
    engine.assert_nothing_is_left()


def test_an_abort_after_the_load_frees_at_once(engine: Engine) -> None:
    engine.add("r", PROMPT, OFFERED, max_tokens=50)
    engine.step()
    engine.step(received=["r"])
    engine.abort("r")
    assert engine.step() == []
    engine.assert_nothing_is_left()


def test_an_abort_in_the_step_that_decodes_frees_at_once(engine: Engine) -> None:
    engine.add("r", PROMPT, OFFERED, max_tokens=50)
    engine.step()
    engine.step(received=["r"])
    engine.step()
    engine.abort("r")
    assert engine.step() == []
    engine.assert_nothing_is_left()


@MODES
def test_a_ghost_touches_no_load_that_runs(engine: Engine, mode: str) -> None:
    engine.add("r", PROMPT, LOADS[mode])
    engine.step()
    engine.add("ghost", PROMPT, LOADS[mode])
    engine.abort("ghost")
    assert engine.step() == []
    assert status(engine, "r") == RequestStatus.WAITING_FOR_REMOTE_KVS
    engine.step(received=["r"])
    engine.step()
    engine.assert_nothing_is_left()


def test_a_ghost_after_the_end_releases_once_more(engine: Engine) -> None:
    engine.add("r", PROMPT, OFFERED)
    engine.step()
    engine.step(received=["r"])
    engine.step()
    engine.add("ghost", PROMPT, OFFERED)
    engine.abort("ghost")
    assert engine.step() == [Renounce(KEY, PREFILL)]
    engine.assert_nothing_is_left()


@MODES
def test_a_second_request_with_a_transfer_that_runs_is_computed_here(engine: Engine, mode: str) -> None:
    engine.add("r", PROMPT, LOADS[mode])
    engine.step()
    engine.add("second", range(200, 230), LOADS[mode])
    assert engine.step() == []
    assert "second" in engine.offered
    engine.step(received=["r"])
    engine.step()
    engine.assert_nothing_is_left()


@MODES
def test_a_load_that_failed_is_computed_here_where_that_is_the_policy(engine: Engine, mode: str) -> None:
    engine.add("r", PROMPT, LOADS[mode])
    engine.step()
    assert engine.step(failed=["r"]) == []
    assert engine.step() == [], "nobody is asked a second time"
    engine.step()
    assert engine.offered == {"r": None}
    engine.assert_nothing_is_left()


@MODES
def test_a_load_that_failed_fails_the_request_where_that_is_the_policy(mode: str) -> None:
    engine = Engine(policy="fail")
    engine.add("r", PROMPT, LOADS[mode])
    engine.step()
    engine.step(failed=["r"])
    assert "r" in engine.offered
    assert [type(command) for command in engine.step()] in ([], [AbortTransfer])
    engine.assert_nothing_is_left()


def test_a_router_that_is_away_fails_the_load_by_the_ranks(engine: Engine) -> None:
    engine.add("r", PROMPT, METASERVER)
    engine.step()
    engine.announcer.failures.append(("r", "the metaserver could not be told"))
    assert engine.step() == [AbortTransfer(KEY, "the metaserver could not be told")]
    engine.announcer.failures.append(("r", "again"))
    engine.announcer.failures.append(("unknown", "of nobody"))
    engine.step(failed=["r"])
    engine.step()
    engine.step()
    engine.assert_nothing_is_left()


# Prefill


def test_a_prompt_that_is_computed_is_offered_with_its_blocks(engine: Engine) -> None:
    engine.add("r", PROMPT, TO_PREFILL)
    assert engine.step() == []
    blocks = engine.blocks("r")
    engine.step()
    [offer] = engine.step()
    assert isinstance(offer, OfferBlocks)
    assert (offer.key, offer.request_id, offer.prompt_tokens) == (KEY, "r", len(PROMPT))
    assert len(offer.block_ids) == PROMPT_BLOCKS
    assert offer.block_ids[: len(blocks)] == blocks
    told = engine.offered["r"]
    assert told is not None
    assert [tuple(group) for group in told["remote_block_ids"]] == [offer.block_ids]
    assert (told["do_remote_prefill"], told["do_remote_decode"]) == (True, False)
    assert (told["remote_engine_id"], told["transfer_id"], told["attempt"]) == ("E", "t", 0)
    assert engine.free_blocks == engine.free_at_start - PROMPT_BLOCKS
    engine.step(sent=["r"])
    engine.assert_nothing_is_left()


def test_what_one_engine_offers_another_one_can_read(engine: Engine) -> None:
    engine.add("p", range(20), TO_PREFILL)
    engine.step()
    decode = Engine("kv_consumer")
    decode.add("d", range(20), engine.offered["p"])
    [pull] = decode.step()
    assert pull.key == KEY
    assert pull.remote.ranks == (RemoteRank("10.0.0.7", 4321, "i0"),)


def test_what_one_engine_announces_another_one_can_push(engine: Engine) -> None:
    engine.add("d", range(20), METASERVER)
    engine.step()
    [(_, announced)] = engine.announcer.posted
    prefill = Engine("kv_producer")
    prefill.add("p", range(20), {name: getattr(announced, name) for name in announced.__struct_fields__})
    [push] = prefill.step()
    assert isinstance(push, StartPush)
    assert push.remote.ranks == (RemoteRank("10.0.0.7", 4321, "i0"),)


def test_a_prompt_is_pushed_chunk_by_chunk(engine: Engine) -> None:
    engine.add("r", PROMPT, ANNOUNCED | {"remote_cached_tokens": 16})
    [push] = engine.step()
    assert isinstance(push, StartPush)
    assert (push.key, push.request_id, push.prompt_tokens, push.cached_tokens) == (KEY, "r", 100, 16)
    [first] = engine.chunks
    assert (first.key, first.end_token, first.last) == (KEY, CHUNK_TOKENS, False)
    assert len(first.block_ids) == 4
    assert engine.step() == []
    [second] = engine.chunks
    assert (second.end_token, second.last) == (100, True)
    assert second.block_ids[:4] == first.block_ids
    assert len(second.block_ids) == PROMPT_BLOCKS
    assert engine.step() == [FinishPush(KEY)]
    assert engine.chunks == []
    assert engine.offered == {"r": None}
    assert engine.free_blocks == engine.free_at_start - PROMPT_BLOCKS
    engine.step(sent=["r"])
    engine.assert_nothing_is_left()


def test_tokens_behind_the_prompt_are_not_pushed(engine: Engine) -> None:
    engine.add("r", range(20), ANNOUNCED, max_tokens=3)
    engine.step()
    assert [chunk.end_token for chunk in engine.chunks] == [20]
    engine.step()
    assert engine.chunks == []
    engine.step()
    assert engine.step(sent=[]) == [FinishPush(KEY)]
    engine.step(sent=["r"])
    engine.assert_nothing_is_left()


def test_blocks_that_the_prefill_side_had_cached_are_in_the_chunk(engine: Engine) -> None:
    engine.add("before", range(64))
    engine.step()
    engine.add("r", range(80), ANNOUNCED)
    engine.step()
    [chunk] = engine.chunks
    assert (chunk.end_token, chunk.last) == (80, True)
    assert len(chunk.block_ids) == 5
    engine.step()
    engine.step(sent=["r"])
    engine.assert_nothing_is_left()


def test_a_preempted_prompt_is_said_to_be_and_pushed_anew(engine: Engine) -> None:
    engine.add("r", PROMPT, ANNOUNCED)
    engine.step()
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.step()
    assert engine.preempted == {KEY}
    [chunk] = engine.chunks
    assert (chunk.end_token, chunk.last) == (CHUNK_TOKENS, False)
    assert chunk.block_ids == engine.blocks("r")
    engine.step()
    assert engine.preempted == frozenset()
    assert engine.chunks[0].last
    assert engine.step() == [FinishPush(KEY)]
    engine.step(sent=["r"])
    engine.assert_nothing_is_left()


def test_a_preempted_prompt_is_offered_when_it_is_computed_anew(engine: Engine) -> None:
    engine.add("r", PROMPT, TO_PREFILL)
    engine.step()
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    for _ in range(2):
        assert engine.step() == []
    [offer] = engine.step()
    assert len(offer.block_ids) == PROMPT_BLOCKS
    engine.step(sent=["r"])
    engine.assert_nothing_is_left()


def test_a_push_that_is_aborted_keeps_its_blocks_until_the_ranks_report(engine: Engine) -> None:
    engine.add("r", PROMPT, ANNOUNCED)
    engine.step()
    engine.abort("r")
    abort, finish = engine.step()
    assert isinstance(abort, AbortTransfer)
    assert finish == FinishPush(KEY)
    assert engine.free_blocks < engine.free_at_start
    engine.step(sent=["r"])
    engine.assert_nothing_is_left()


@pytest.mark.parametrize("params", [TO_PREFILL, ANNOUNCED])
def test_a_prefill_that_is_aborted_in_the_queue_leaves_nothing(engine: Engine, params: dict) -> None:
    engine.add("r", PROMPT, params)
    engine.abort("r")
    assert engine.step() == []
    engine.assert_nothing_is_left()


def test_a_prefill_that_is_aborted_half_way_is_not_offered(engine: Engine) -> None:
    engine.add("r", PROMPT, TO_PREFILL)
    engine.step()
    engine.abort("r")
    assert engine.step() == []
    engine.assert_nothing_is_left()


@pytest.mark.parametrize("params", [TO_PREFILL, ANNOUNCED])
def test_a_second_prefill_of_a_transfer_that_runs_takes_no_part(engine: Engine, params: dict) -> None:
    engine.add("r", range(20), params)
    engine.add("second", range(30, 50), params)
    engine.step()
    engine.step()
    assert engine.offered["second"] is None
    engine.step(sent=["r"])
    engine.assert_nothing_is_left()


# Requests that take no part


@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        {"do_remote_prefill": False, "do_remote_decode": False},
        {"a router": "of another kind"},
        {"do_remote_prefill": True},
        {"do_remote_prefill": True, "remote_engine_id": "P", "remote_host": "h", "remote_port": 1},
        {"do_remote_prefill": 3},
        OFFERED | {"attempt": "one"},
        OFFERED | {"remote_ranks": [{"host": "h", "port": -1, "incarnation": "i"}]},
        OFFERED | {"do_remote_decode": True},
    ],
)
def test_a_request_without_usable_parameters_is_answered_here(engine: Engine, params: dict | None) -> None:
    engine.add("r", range(20), params)
    assert engine.step() == []
    assert engine.offered == {"r": None}
    engine.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("made", "params", "words"),
    [
        ({"role": "kv_producer"}, OFFERED, "never decodes for others"),
        ({"role": "kv_consumer"}, TO_PREFILL, "never prefills for others"),
        ({"modes": ["layerwise"]}, OFFERED, "asks for blockwise, and modes is layerwise"),
        ({"modes": ["blockwise"]}, METASERVER, "asks for layerwise, and modes is blockwise"),
        ({"ranks_known": False}, OFFERED, "the ranks have not said where they are"),
        ({}, OFFERED | {"transfer_id": 5}, "kv_transfer_params cannot be read"),
    ],
)
def test_a_request_that_this_engine_does_not_serve_is_answered_here_and_logged(
    made: dict[str, Any], params: dict, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(scheduler_side.logger, "warning", lambda text, *values: lines.append(text % values))
    engine = Engine(**made)
    engine.add("r", range(20), params)
    assert engine.step() == []
    assert engine.offered == {"r": None}
    [line] = lines
    assert line.startswith("request r is computed here: ")
    assert words in line
    engine.assert_nothing_is_left()


def test_the_directory_is_told_with_the_first_step(engine: Engine) -> None:
    first, second = (engine.scheduler.schedule().kv_connector_metadata for _ in range(2))
    assert first.directory.ranks[0].host == "10.0.0.7"
    assert second.directory is None


def test_the_end_is_quiet(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, scheduler_side.logger.name):
        engine.scheduler.shutdown()
    assert caplog.records == []
