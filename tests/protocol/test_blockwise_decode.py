"""Block-wise, the decode rank: it asks, reads inside leases, and tells vLLM one outcome."""

from dfirst.protocol.commands import Collected
from dfirst.protocol.modes import BLOCKWISE, OWNER
from dfirst.protocol.timing import Timing

from .forge import cancel
from .rows import takes
from .world import ALL_CACHED, KEY, World

PATIENT = Timing(hold_seconds=10_000.0)


def reading(prefill_tp: int = 1, decode_tp: int = 1) -> World:
    """Every decode rank has the prefill side's blocks lent and reads."""
    world = World(prefill_tp, decode_tp, met=True)
    world.offer()
    world.pull()
    world.deliver()
    assert {world.state(rank) for rank in world.ranks("D")} == {"PULLS_PENDING"}
    return world


def first_contact() -> World:
    world = World()
    world.offer()
    world.pull()
    assert world.state("D0") == "LAYOUT_QUERY"
    return world


@takes("DB1", "DB13", "DB16", "DB21")
def test_the_good_day_is_one_question_one_copy_and_one_word():
    world = World(met=True)
    world.collecting = False
    world.offer()
    world.pull()
    assert world.state("D0") == "METADATA_QUERY"
    assert world.deliver() == ["D0>P0 Query", "P0>D0 Metadata"]
    assert world.state("D0") == "PULLS_PENDING"
    [copy] = world.copies["D0"]
    assert copy.remote_blocks == copy.local_blocks == (5, 6, 7)
    world.finish_copies("D0")
    assert world.state("D0") == "DONE_RECEIVING"
    assert world.deliver() == ["D0>P0 Done", "P0>D0 Ack"]
    world.collect()
    assert (world.state("D0"), world.state("P0")) == ("FREED", "FREED")
    assert sorted(world.reports) == [("D0", "received"), ("P0", "sent")]


@takes("DB3", "DB6")
def test_two_engines_exchange_layouts_when_they_first_meet():
    world = first_contact()
    said = world.deliver()
    assert said[:3] == ["D0>P0 LayoutQuery", "P0>D0 Layout", "D0>P0 Query"]
    assert said[-1] == "P0>D0 Metadata"
    assert world.state("D0") == "PULLS_PENDING"


def test_a_second_transfer_between_the_same_engines_asks_for_no_layout():
    world = first_contact()
    world.deliver()
    second = KEY.__class__("t-2", 0)
    world.offer(second)
    world.pull(key=second)
    assert world.deliver() == ["D0>P0 Query", "P0>D0 Metadata"]


@takes("DB2")
def test_a_cached_prompt_is_reported_at_once_and_releases_the_prefill_rank():
    world = World(met=True)
    world.offer()
    world.pull(cached=ALL_CACHED)
    assert world.state("D0") == "FREED"
    assert world.deliver() == ["D0>P0 Done", "P0>D0 Ack"]
    assert sorted(world.reports) == [("D0", "received"), ("P0", "sent")]


@takes("DB7")
def test_a_cached_prompt_releases_the_prefill_rank_at_first_contact_too():
    world = World(prefill_tp=2)
    world.offer()
    world.pull(cached=ALL_CACHED)
    world.deliver()
    assert sorted(world.reports) == [("D0", "received"), ("P0", "sent"), ("P1", "sent")]
    assert not world.copies["D0"]


def test_a_request_that_vllm_does_not_wait_for_is_not_reported():
    world = World(met=True)
    world.offer()
    world.pull(cached=ALL_CACHED, request_id="")
    world.deliver()
    assert world.state("D0") == "FREED"
    assert world.reports == [("P0", "sent")]


@takes("DB4")
def test_engines_that_do_not_fit_fail_the_request_and_free_the_prefill_rank():
    world = World(prefill_tp=2, decode_model="other", met=True)
    world.offer()
    world.pull()
    assert world.reports == [("D0", "failed")]
    assert "cannot work together" in world.cores["D0"].movers[KEY].reason
    world.deliver()
    assert world.reports == [("D0", "failed"), ("P0", "sent"), ("P1", "sent")]


@takes("DB10")
def test_a_layout_that_does_not_fit_fails_the_request_when_it_comes():
    world = World(decode_model="other")
    world.offer()
    world.pull()
    world.deliver()
    assert world.reports == [("D0", "failed"), ("P0", "sent")]


def test_a_restarted_prefill_engine_is_not_taken_for_the_one_that_was_named():
    world = first_contact()
    world.restart("P", "2")
    world.deliver()
    assert world.reports == [("D0", "failed")]
    assert "restarted" in world.cores["D0"].movers[KEY].reason
    assert world.leg_states("D0") == ["FREED"]


@takes("DB5")
def test_a_renounced_request_frees_every_prefill_rank_without_a_read():
    world = World(prefill_tp=2)
    world.offer()
    world.renounce()
    assert world.state("D0") == "FREED"
    assert sorted(world.deliver()) == ["D0>P0 Cancel", "D0>P1 Cancel", "P0>D0 Ack", "P1>D0 Ack"]
    assert world.reports == [("P0", "sent"), ("P1", "sent")]


def test_renouncing_under_a_running_read_releases_nothing():
    world = reading()
    world.renounce()
    assert world.deliver() == []
    assert (world.state("D0"), world.reports) == ("PULLS_PENDING", [])


@takes("DB8")
def test_a_lost_question_for_the_layout_is_repeated():
    world = first_contact()
    world.network.clear()
    assert world.advance(1.0)[:2] == ["D0>P0 LayoutQuery", "P0>D0 Layout"]
    assert world.state("D0") == "PULLS_PENDING"


@takes("DB9")
def test_a_prefill_engine_that_gives_no_layout_fails_the_request_after_the_query_timeout():
    world = first_contact()
    world.lose()
    world.advance(world.timing.query_timeout_seconds)
    assert world.reports == [("D0", "failed")]
    assert "did not give its layout within 10 s" in world.cores["D0"].movers[KEY].reason


@takes("DB11")
def test_an_abort_before_the_layout_is_known_is_reported_and_frees_the_prefill_rank():
    world = first_contact()
    world.network.clear()
    world.abort("D")
    assert world.reports == [("D0", "failed")]
    assert world.deliver() == ["D0>P0 Cancel", "P0>D0 Ack"]
    assert world.reports == [("D0", "failed"), ("P0", "sent")]


@takes("DB12", "DB20", "DB22")
def test_one_refusal_fails_the_request_only_after_the_other_reads_have_ended():
    world = World(prefill_tp=2, met=True)
    world.collecting = False
    world.offer()
    cancel(world, "P1", OWNER, BLOCKWISE)
    world.pull()
    world.deliver()
    assert world.state("D0") == "CANCELLING"
    assert world.leg_states("D0") == ["DRAINING", "FREED"]
    assert len(world.stopped["D0"]) == 1
    assert ("D0", "failed") not in world.reports
    world.finish_copies("D0")
    assert world.state("D0") == "FAILED"
    assert world.deliver() == ["D0>P0 Stopped", "P0>D0 Ack"]
    world.collect()
    assert world.state("D0") == "FREED"
    assert sorted(world.reports) == [("D0", "failed"), ("P0", "sent"), ("P1", "sent")]


def test_nothing_is_copied_after_a_refused_question():
    world = World(met=True)
    world.offer()
    cancel(world, "P0", OWNER, BLOCKWISE)
    assert world.deliver() == ["P0>router Ack"]
    world.pull()
    assert world.deliver() == ["D0>P0 Query", "P0>D0 Gone"]
    assert not world.copies["D0"]
    assert world.reports == [("P0", "sent"), ("D0", "failed")]


@takes("DB14")
def test_an_abort_while_p_still_computes_is_reported_at_once():
    world = World(met=True)
    world.pull()
    world.deliver()
    world.abort("D")
    assert world.reports == [("D0", "failed")]
    assert world.deliver() == ["D0>P0 Stopped", "P0>D0 Ack"]


@takes("DB15")
def test_a_prefill_rank_that_answers_wait_for_ever_is_given_up_at_the_deadline():
    world = World(timing=PATIENT, met=True)
    world.pull()
    world.advance(world.timing.transfer_deadline_seconds - 1)
    assert world.state("D0") == "METADATA_QUERY"
    world.advance(1)
    assert world.reports == [("D0", "failed")]
    assert "not over after 300 s" in world.cores["D0"].movers[KEY].reason


@takes("DB17")
def test_one_failed_read_fails_the_request_when_the_others_have_ended():
    world = reading(prefill_tp=2)
    first, second = world.copies["D0"]
    world.copies["D0"] = [first]
    world.finish_copies("D0", ok=False, reason="the link broke")
    assert (world.state("D0"), world.reports) == ("CANCELLING", [])
    assert [stop.leg for stop in world.stopped["D0"]] == [second.leg]
    world.copies["D0"] = [second]
    world.finish_copies("D0")
    assert world.reports == [("D0", "failed")]
    assert "the link broke" in world.cores["D0"].movers[KEY].reason


@takes("DB18")
def test_an_aborted_read_hands_its_blocks_back_only_when_it_has_ended():
    world = reading()
    world.abort("D")
    assert (world.state("D0"), world.reports, len(world.stopped["D0"])) == ("CANCELLING", [], 1)
    world.finish_copies("D0", ok=False)
    assert world.reports == [("D0", "failed")]
    world.deliver()
    assert world.reports == [("D0", "failed"), ("P0", "sent")]


@takes("DB19")
def test_the_deadline_ends_a_read_that_renewals_keep_alive():
    world = reading()
    world.advance(world.timing.transfer_deadline_seconds)
    assert world.state("D0") == "CANCELLING"
    world.finish_copies("D0")
    world.deliver()
    assert sorted(world.reports) == [("D0", "failed"), ("P0", "sent")]


@takes("DB23")
def test_a_freed_transfer_is_forgotten_in_the_end():
    world = reading()
    world.finish_copies("D0")
    world.deliver()
    world.advance(world.timing.tombstone_seconds, step=5.0)
    assert (world.state("D0"), world.state("P0")) == ("-", "-")
    assert world.cores["D0"].next_deadline() is None
    assert world.cores["P0"].next_deadline() is None


@takes("DB24")
def test_a_second_request_with_an_ended_transfer_fails_at_once():
    world = reading()
    world.finish_copies("D0")
    world.deliver()
    world.reports.clear()
    world.pull(request_id="again")
    assert world.reports == [("D0", "failed")]
    assert world.deliver() == []
    world.advance(world.timing.tombstone_seconds, step=5.0)
    assert world.state("D0") == "-"


def test_a_renounced_transfer_that_comes_after_all_fails_at_once():
    world = World(met=True)
    world.offer()
    world.renounce()
    world.deliver()
    world.pull()
    assert world.reports == [("P0", "sent"), ("D0", "failed")]


def test_a_start_that_is_repeated_opens_no_second_leg():
    world = reading()
    world.pull(request_id="again")
    assert world.deliver() == []
    world.finish_copies("D0")
    assert world.reports == [("D0", "received")]


def test_a_report_that_is_taken_twice_frees_once():
    world = reading()
    world.finish_copies("D0")
    world.give("D0", Collected(KEY))
    assert world.state("D0") == "FREED"
