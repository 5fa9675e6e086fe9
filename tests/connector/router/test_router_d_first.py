"""Block-wise D-first: both engines hear of a transfer at once, as soon as it is known where P's ranks are."""

import threading

from fake_engines import P_RANKS, FakeDecodeEngine, FakePrefillEngine, wait_until
from running_router import MakeRouter, Router

MODE = "blockwise-d-first"
DIGEST = {"layout_digest": "p-layout"}


def known(make_router: MakeRouter, p: FakePrefillEngine, **changes: object) -> Router:
    """A router that has learned from a first prompt where P's ranks are."""
    p.grant_changes = {**DIGEST, **changes}
    router = make_router()
    assert router.complete(MODE).status_code == 200
    return router


def test_the_first_prompt_goes_to_p_first(
    make_router: MakeRouter, p: FakePrefillEngine, d: FakeDecodeEngine
) -> None:
    known(make_router, p)
    assert d.params[0]["remote_request_id"] == "cmpl-p-0"


def test_the_next_prompt_goes_to_both_at_once(
    make_router: MakeRouter, p: FakePrefillEngine, d: FakeDecodeEngine
) -> None:
    router = known(make_router, p)
    p.hang = True
    asking = threading.Thread(target=router.complete, args=(MODE,))
    asking.start()
    wait_until(lambda: len(d.params) == 2 and len(p.params) == 2, "both engines have the prompt")
    p.hang = False
    asking.join()
    assert d.params[1] == {
        "transfer_id": p.params[1]["transfer_id"],
        "attempt": 0,
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "p_dp0",
        "remote_host": "10.0.0.1",
        "remote_port": 7000,
        "remote_ranks": P_RANKS,
        **DIGEST,
    }
    assert p.headers[1]["x-data-parallel-rank"] == "0"
    router.settle()
    assert router.canceller.calls == []


def test_a_prefill_that_fails_is_told_to_p_where_d_asks(
    make_router: MakeRouter, p: FakePrefillEngine, d: FakeDecodeEngine
) -> None:
    router = known(make_router, p)
    p.fail_with = (500, {"error": {"message": "out of luck"}})
    d.delay_seconds = 1.0
    assert router.complete(MODE).status_code == 200
    router.settle()
    ((ranks, transfer, attempt, mode, _),) = router.canceller.calls
    assert (ranks, transfer, attempt, mode) == (P_RANKS, p.params[1]["transfer_id"], 0, "blockwise")


def test_after_a_failure_the_next_prompt_goes_to_p_first_again(
    make_router: MakeRouter, p: FakePrefillEngine, d: FakeDecodeEngine
) -> None:
    router = known(make_router, p)
    p.fail_with = (500, {"error": {"message": "out of luck"}})
    d.delay_seconds = 0.5
    router.complete(MODE)
    router.settle()
    p.fail_with = None
    router.complete(MODE)
    assert d.params[2]["remote_request_id"] == "cmpl-p-0"


def test_a_restarted_prefill_engine_is_cancelled_at_its_old_and_its_new_ranks(
    make_router: MakeRouter, p: FakePrefillEngine, d: FakeDecodeEngine
) -> None:
    router = known(make_router, p)
    new_ranks = [{**rank, "incarnation": "new"} for rank in P_RANKS]
    p.grant_changes = {"layout_digest": "other", "remote_ranks": new_ranks}
    d.delay_seconds = 0.5
    router.complete(MODE)
    router.settle()
    told = [ranks for ranks, *_ in router.canceller.calls]
    assert sorted(told, key=str) == sorted([P_RANKS, new_ranks], key=str)


def test_an_engine_that_was_restarted_meanwhile_is_known_by_its_new_address(
    make_router: MakeRouter, p: FakePrefillEngine, d: FakeDecodeEngine
) -> None:
    router = known(make_router, p)
    p.grant_changes = {"layout_digest": "new", "remote_engine_id": "restarted_dp0", "remote_port": 7500}
    assert router.complete("blockwise").status_code == 200
    assert router.complete(MODE).status_code == 200
    assert (d.params[2]["remote_engine_id"], d.params[2]["remote_port"]) == ("restarted_dp0", 7500)


def test_engines_of_an_api_server_take_turns(
    make_router: MakeRouter, p: FakePrefillEngine, d: FakeDecodeEngine
) -> None:
    router = known(make_router, p)
    p.grant_changes = {**DIGEST, "remote_engine_id": "p_dp1"}
    router.complete("blockwise")
    p.grant_changes = DIGEST
    router.complete(MODE)
    router.complete(MODE)
    router.settle()
    assert [headers.get("x-data-parallel-rank") for headers in p.headers[2:]] == ["0", "1"]
