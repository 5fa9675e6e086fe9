"""Layer-wise, the decode rank lends its blocks to writers and hands them back when none can reach them."""

from dfirst.protocol.messages import Sender
from dfirst.protocol.modes import LAYERWISE, OWNER
from dfirst.protocol.timing import Timing

from .forge import cancel, done, query, stop
from .rows import takes
from .world import KEY, PROMPT, World

SHORT_HOLD = Timing(hold_seconds=5.0)
SHORT_DEADLINE = Timing(transfer_deadline_seconds=8.0)
STRANGER = Sender("P", 0, "P0.earlier")


def accepted(prefill_tp: int = 1, timing: Timing | None = None, met: bool = True) -> World:
    world = World(prefill_tp=prefill_tp, timing=timing, met=met)
    world.accept()
    assert world.state("D0") == "METADATA_QUERY"
    return world


def lent(prefill_tp: int = 1, timing: Timing | None = None) -> World:
    """The first prefill rank may write; others have not asked yet."""
    world = accepted(prefill_tp, timing)
    query(world, "P0", "D0")
    assert world.state("D0") == "PUSHES_PENDING"
    world.network.clear()
    return world


def owner_seconds(timing: Timing) -> float:
    return timing.lease_seconds + timing.copy_timeout_seconds + timing.stall_allowance_seconds


@takes("DL1", "DL9", "DL22", "DL35")
def test_blocks_are_announced_lent_and_reported_by_the_writers_word():
    world = World(met=True)
    world.collecting = False
    world.accept()
    query(world, "P0", "D0")
    assert world.deliver() == ["D0>P0 Metadata"]
    done(world, "P0", "D0")
    assert (world.state("D0"), world.reports) == ("DONE_RECEIVING", [("D0", "received")])
    world.collect()
    assert world.state("D0") == "FREED"


@takes("DL2", "DL5", "DL6")
def test_a_writer_that_asks_early_waits_and_is_answered_when_the_blocks_are_there():
    world = World(met=True)
    query(world, "P0", "D0", sequence=1)
    query(world, "P0", "D0", sequence=2)
    assert world.deliver() == ["D0>P0 Wait", "D0>P0 Wait"]
    world.accept()
    [packet] = world.network
    assert packet.message.sequence == 2
    assert world.deliver() == ["D0>P0 Metadata"]


@takes("DL3", "DL13")
def test_a_writer_that_gave_up_before_the_blocks_were_known_fails_the_request():
    world = World(met=True)
    stop(world, "P0", "D0")
    assert (world.state("D0"), world.reports) == ("PARKED", [])
    world.accept()
    assert world.reports == [("D0", "failed")]


@takes("DL4", "DL40", "DL39")
def test_a_cancellation_before_the_blocks_is_final_and_still_reported():
    world = World(met=True)
    cancel(world, "D0", OWNER, LAYERWISE)
    assert (world.state("D0"), world.reports) == ("FREED", [])
    world.accept()
    assert (world.state("D0"), world.reports) == ("FREED", [("D0", "failed")])
    assert world.cores["D0"].owners[KEY].reason == "the client has gone"
    world.network.clear()
    query(world, "P0", "D0")
    assert world.deliver() == ["D0>P0 Gone"]


@takes("DL7")
def test_a_cancellation_refuses_the_writers_that_wait():
    world = World(met=True)
    query(world, "P0", "D0")
    cancel(world, "D0", OWNER, LAYERWISE)
    assert (world.state("D0"), world.reports) == ("FREED", [])


@takes("DL8")
def test_questions_for_blocks_that_never_come_are_given_up_after_the_hold_time():
    world = World(timing=SHORT_HOLD, met=True)
    query(world, "P0", "D0")
    world.advance(5)
    assert (world.state("D0"), world.reports) == ("FREED", [])


@takes("DL10", "DL12")
def test_an_unknown_writer_waits_until_its_layout_is_known():
    world = accepted(met=False)
    query(world, "P0", "D0")
    assert world.deliver() == ["D0>P0 Wait", "D0>P0 LayoutQuery", "P0>D0 Layout", "D0>P0 Metadata"]


@takes("DL11")
def test_a_writer_that_the_plan_does_not_name_is_refused_and_binds_nothing():
    world = accepted()
    query(world, "P0", "D0", sender=STRANGER)
    assert world.deliver() == ["D0>P0 Gone"]
    query(world, "P0", "D0")
    assert world.deliver() == ["D0>P0 Metadata"]


@takes("DL43")
def test_a_rank_to_which_nothing_is_to_come_is_complete_by_itself():
    world = World(met=True)
    world.accept(cached=PROMPT)
    assert (world.state("D0"), world.reports) == ("FREED", [("D0", "received")])


@takes("DL44")
def test_a_writer_whose_engine_can_never_write_here_fails_the_request_at_once():
    world = accepted()
    query(world, "P0", "D0", cached=4)
    [packet] = world.network
    assert "P/0 cannot write here: the asker speaks of 10 prompt tokens, 4 cached" in packet.message.reason
    assert world.reports == [("D0", "failed")]


@takes("DL14", "DL36")
def test_a_prefill_that_failed_before_it_wrote_is_reported_at_once():
    world = accepted()
    world.collecting = False
    cancel(world, "D0", OWNER, LAYERWISE)
    assert (world.state("D0"), world.reports) == ("FAILED", [("D0", "failed")])
    world.collect()
    assert world.state("D0") == "FREED"


@takes("DL15")
def test_an_abort_before_anybody_writes_is_reported_at_once():
    world = accepted()
    world.abort("D")
    assert world.reports == [("D0", "failed")]
    query(world, "P0", "D0")
    assert world.deliver() == ["D0>P0 Gone"]


@takes("DL16")
def test_a_request_that_no_prefill_engine_takes_fails_after_the_hold_time():
    world = accepted()
    world.advance(world.timing.hold_seconds)
    assert world.reports == [("D0", "failed")]
    assert "no prefill rank came in time" in world.cores["D0"].owners[KEY].reason


@takes("DL42")
def test_a_request_that_no_prefill_engine_takes_fails_at_the_deadline_if_it_comes_first():
    world = accepted(timing=SHORT_DEADLINE)
    world.advance(8)
    assert world.reports == [("D0", "failed")]
    assert "not over after 8 s" in world.cores["D0"].owners[KEY].reason


@takes("DL17", "DL22")
def test_every_expected_writer_must_say_done_once():
    world = lent(prefill_tp=2)
    query(world, "P1", "D0")
    done(world, "P0", "D0")
    done(world, "P0", "D0")
    assert (world.state("D0"), world.reports) == ("PUSHES_PENDING", [])
    done(world, "P1", "D0")
    assert world.reports == [("D0", "received")]


@takes("DL19")
def test_another_engine_may_not_write_into_a_transfer_that_is_lent():
    world = lent()
    world.restart("P", "2")
    query(world, "P0", "D0")
    assert world.deliver() == ["D0>P0 Gone"]
    assert world.state("D0") == "PUSHES_PENDING"


@takes("DL21")
def test_a_renewal_keeps_the_writer_going():
    world = World(met=True)
    world.accept()
    world.push()
    world.advance(3 * owner_seconds(world.timing))
    assert world.state("D0") == "PUSHES_PENDING"
    world.finish_copies("P0")
    world.deliver()
    assert world.reports == [("D0", "received")]


@takes("DL23", "DL33")
def test_when_one_writer_fails_the_other_is_stopped_before_the_blocks_go_back():
    world = lent(prefill_tp=2)
    query(world, "P1", "D0")
    world.network.clear()
    stop(world, "P0", "D0")
    assert (world.state("D0"), world.reports) == ("CANCELLING", [])
    assert "D0>P1 Cancel" in world.deliver()
    stop(world, "P1", "D0")
    assert world.reports == [("D0", "failed")]


@takes("DL24")
def test_the_only_writers_failure_fails_the_request():
    world = lent()
    stop(world, "P0", "D0")
    assert world.reports == [("D0", "failed")]
    assert "P/0 did not finish" in world.cores["D0"].owners[KEY].reason


def test_a_writer_that_dies_is_waited_for_until_no_write_of_its_can_land():
    world = lent()
    world.advance(owner_seconds(world.timing) - 0.5, deliver=False)
    assert world.reports == []
    world.advance(0.5, deliver=False)
    assert world.reports == [("D0", "failed")]


@takes("DL25")
def test_a_writer_that_never_comes_stops_the_one_that_did():
    world = lent(prefill_tp=2, timing=SHORT_HOLD)
    world.advance(5, deliver=False)
    assert (world.state("D0"), world.reports) == ("CANCELLING", [])
    stop(world, "P0", "D0")
    assert world.reports == [("D0", "failed")]


@takes("DL26")
def test_a_writer_that_never_comes_fails_the_request_after_the_hold_time():
    world = lent(prefill_tp=2, timing=SHORT_HOLD)
    done(world, "P0", "D0")
    world.advance(5)
    assert world.reports == [("D0", "failed")]


def test_the_hold_time_ends_nothing_once_every_writer_has_come():
    world = lent(timing=SHORT_HOLD)
    world.advance(6, deliver=False)
    assert world.state("D0") == "PUSHES_PENDING"
    done(world, "P0", "D0")
    assert world.reports == [("D0", "received")]


@takes("DL27", "DL34")
def test_a_cancelled_push_waits_for_its_writer_and_lends_no_more():
    world = lent(prefill_tp=2)
    cancel(world, "D0", OWNER, LAYERWISE)
    assert (world.state("D0"), world.reports) == ("CANCELLING", [])
    world.network.clear()
    query(world, "P1", "D0")
    assert world.deliver() == ["D0>P1 Gone"]
    done(world, "P0", "D0")
    assert world.reports == [("D0", "failed")]


@takes("DL28")
def test_a_cancellation_between_two_writers_is_reported_at_once():
    world = lent(prefill_tp=2)
    done(world, "P0", "D0")
    cancel(world, "D0", OWNER, LAYERWISE)
    assert world.reports == [("D0", "failed")]


@takes("DL29")
def test_an_aborted_requests_blocks_are_not_given_away_under_a_writer():
    world = lent()
    world.abort("D")
    assert (world.state("D0"), world.reports) == ("CANCELLING", [])
    world.advance(owner_seconds(world.timing), deliver=False)
    assert world.reports == [("D0", "failed")]


@takes("DL30")
def test_an_abort_between_two_writers_is_reported_at_once():
    world = lent(prefill_tp=2)
    done(world, "P0", "D0")
    world.abort("D")
    assert world.reports == [("D0", "failed")]


@takes("DL31")
def test_the_deadline_bounds_renewals():
    world = lent(timing=SHORT_DEADLINE)
    world.advance(8, deliver=False)
    assert (world.state("D0"), world.reports) == ("CANCELLING", [])
    assert "not over after 8 s" in world.cores["D0"].owners[KEY].reason
    stop(world, "P0", "D0")
    assert world.reports == [("D0", "failed")]


@takes("DL32")
def test_the_deadline_ends_the_wait_for_the_next_writer():
    world = lent(prefill_tp=2, timing=SHORT_DEADLINE)
    done(world, "P0", "D0")
    world.advance(8)
    assert world.reports == [("D0", "failed")]


@takes("DL37")
def test_a_question_after_the_last_word_is_refused_before_the_report_is_taken():
    world = lent()
    world.collecting = False
    done(world, "P0", "D0")
    world.network.clear()
    query(world, "P0", "D0")
    assert (world.state("D0"), world.deliver()) == ("DONE_RECEIVING", ["D0>P0 Gone"])


@takes("DL38")
def test_a_question_after_a_failure_is_refused_before_the_report_is_taken():
    world = lent()
    world.collecting = False
    stop(world, "P0", "D0")
    world.network.clear()
    query(world, "P0", "D0")
    assert (world.state("D0"), world.deliver()) == ("FAILED", ["D0>P0 Gone"])


@takes("DL41")
def test_a_tombstone_answers_late_words_and_ends():
    world = lent()
    done(world, "P0", "D0")
    world.network.clear()
    done(world, "P0", "D0")
    assert world.deliver() == ["D0>P0 Ack"]
    world.advance(world.timing.tombstone_seconds, step=10)
    assert world.state("D0") == "-"
    assert world.reports == [("D0", "received")]


def test_the_word_of_an_earlier_incarnation_ends_no_running_push():
    world = lent()
    stop(world, "P0", "D0", sender=STRANGER)
    done(world, "P0", "D0", sender=STRANGER)
    assert (world.state("D0"), world.reports) == ("PUSHES_PENDING", [])
    done(world, "P0", "D0")
    assert world.reports == [("D0", "received")]
