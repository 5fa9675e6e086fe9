"""Block-wise, the prefill rank lends the blocks of a prompt and frees them when nobody can read them."""

from dfirst.protocol.messages import Sender
from dfirst.protocol.modes import BLOCKWISE, OWNER
from dfirst.protocol.timing import Timing

from .forge import cancel, done, query, stop
from .rows import takes
from .world import ALL_CACHED, KEY, World

SHORT_HOLD = Timing(hold_seconds=5.0)
SHORT_DEADLINE = Timing(transfer_deadline_seconds=8.0)


def offered(decode_tp: int = 1, timing: Timing | None = None, met: bool = True) -> World:
    world = World(decode_tp=decode_tp, timing=timing, met=met)
    world.offer()
    assert world.state("P0") == "METADATA_QUERY"
    return world


def lent(decode_tp: int = 1, timing: Timing | None = None) -> World:
    """The first decode rank has the blocks lent; others have not asked yet."""
    world = offered(decode_tp, timing)
    query(world, "D0", "P0")
    assert world.state("P0") == "PULLS_PENDING"
    world.network.clear()
    return world


@takes("PB1", "PB9", "PB21", "PB29")
def test_blocks_are_held_lent_and_freed_by_the_readers_word():
    world = World(met=True)
    world.collecting = False
    world.offer()
    query(world, "D0", "P0")
    assert world.deliver() == ["P0>D0 Metadata"]
    done(world, "D0", "P0")
    assert (world.state("P0"), world.reports) == ("DONE_SENDING", [("P0", "sent")])
    world.collect()
    assert world.state("P0") == "FREED"
    assert world.cores["P0"].owners[KEY].block_ids == ()


@takes("PB2", "PB5", "PB6")
def test_who_asks_early_waits_and_is_answered_when_the_prompt_is_computed():
    world = World(met=True)
    query(world, "D0", "P0", sequence=1)
    query(world, "D0", "P0", sequence=2)
    assert world.state("P0") == "PARKED"
    assert world.deliver() == ["P0>D0 Wait", "P0>D0 Wait"]
    world.offer()
    [packet] = world.network
    assert packet.message.sequence == 2
    assert world.deliver() == ["P0>D0 Metadata"]


@takes("PB3", "PB6", "PB13")
def test_a_last_word_that_comes_before_the_blocks_frees_them_when_they_come():
    world = World(met=True)
    done(world, "D0", "P0", cached=ALL_CACHED)
    assert (world.state("P0"), world.reports) == ("PARKED", [])
    world.offer()
    assert (world.state("P0"), world.reports) == ("FREED", [("P0", "sent")])


def test_a_word_before_the_layout_frees_the_blocks_when_the_layout_comes():
    world = offered(met=False)
    done(world, "D0", "P0", cached=ALL_CACHED)
    assert world.state("P0") == "METADATA_QUERY"
    assert world.deliver() == ["P0>D0 Ack", "P0>D0 LayoutQuery", "D0>P0 Layout"]
    assert world.reports == [("P0", "sent")]


@takes("PB4", "PB32")
def test_a_cancellation_before_the_blocks_is_final():
    world = World(met=True)
    cancel(world, "P0", OWNER, BLOCKWISE)
    assert (world.state("P0"), world.reports) == ("FREED", [])
    world.offer()
    assert (world.state("P0"), world.reports) == ("FREED", [("P0", "sent")])
    world.network.clear()
    query(world, "D0", "P0")
    assert world.deliver() == ["P0>D0 Gone"]


@takes("PB7")
def test_a_cancellation_refuses_the_questions_that_wait():
    world = World(met=True)
    world.pull()
    world.deliver()
    cancel(world, "P0", OWNER, BLOCKWISE)
    assert world.state("P0") == "FREED"
    world.advance(10)
    assert world.reports == [("D0", "failed")]


@takes("PB8")
def test_questions_for_blocks_that_never_come_are_refused_after_the_hold_time():
    world = World(timing=SHORT_HOLD, met=True)
    world.pull()
    world.deliver()
    world.advance(5)
    assert world.state("P0") == "FREED"
    world.advance(5)
    assert world.reports == [("D0", "failed")]


@takes("PB10", "PB12")
def test_an_unknown_engine_waits_until_its_layout_is_known():
    world = offered(met=False)
    query(world, "D0", "P0")
    assert world.state("P0") == "METADATA_QUERY"
    assert world.deliver() == ["P0>D0 Wait", "P0>D0 LayoutQuery", "D0>P0 Layout", "P0>D0 Metadata"]
    assert world.state("P0") == "PULLS_PENDING"


@takes("PB11")
def test_a_rank_that_the_plan_does_not_name_is_refused_and_binds_nothing():
    world = offered()
    query(world, "D0", "P0", sender=Sender("D", 7, "D7.1"))
    query(world, "D0", "P0", prompt=11)
    query(world, "D0", "P0", cached=3)
    assert world.deliver() == ["P0>D0 Gone"] * 3
    query(world, "D0", "P0")
    assert world.deliver() == ["P0>D0 Metadata"]


@takes("PB14")
def test_a_cancellation_frees_blocks_that_nobody_reads_at_once():
    world = offered()
    cancel(world, "P0", OWNER, BLOCKWISE)
    assert world.reports == [("P0", "sent")]


@takes("PB15")
def test_blocks_that_nobody_asks_for_are_freed_after_the_hold_time():
    world = offered()
    world.advance(world.timing.hold_seconds - 1)
    assert world.reports == []
    world.advance(1)
    assert world.reports == [("P0", "sent")]


@takes("PB34")
def test_the_deadline_frees_blocks_that_nobody_asks_for_if_it_comes_first():
    world = offered(timing=SHORT_DEADLINE)
    world.advance(8)
    assert world.reports == [("P0", "sent")]


@takes("PB35", "PB36")
def test_the_layout_of_a_reader_that_has_everything_cached_is_asked_for_again():
    world = World()
    world.offer()
    done(world, "D0", "P0", cached=ALL_CACHED)
    assert [type(packet.message).__name__ for packet in world.network] == ["Ack", "LayoutQuery"]
    world.network.clear()
    done(world, "D0", "P0", cached=ALL_CACHED)
    assert world.deliver() == ["P0>D0 Ack"]
    said = world.advance(world.timing.query_retry_seconds)
    assert said == ["P0>D0 LayoutQuery", "D0>P0 Layout"]
    assert world.reports == [("P0", "sent")]


def test_a_layout_that_has_come_is_not_asked_for_again():
    world = World(decode_tp=2)
    world.offer()
    done(world, "D0", "P0", cached=0)
    world.deliver()
    query(world, "D1", "P0")
    world.network.clear()
    assert "LayoutQuery" not in str(world.advance(2 * world.timing.query_retry_seconds))
    assert world.observer.unexpected == []


def test_a_reader_that_gives_up_before_its_question_was_heard_frees_the_blocks_at_once():
    world = offered()
    stop(world, "D0", "P0")
    assert world.reports == [("P0", "sent")]


def test_a_reader_that_gives_up_before_its_question_was_heard_is_met_first():
    world = World()
    world.offer()
    stop(world, "D0", "P0")
    assert world.deliver() == ["P0>D0 Ack", "P0>D0 LayoutQuery", "D0>P0 Layout"]
    assert world.reports == [("P0", "sent")]


@takes("PB16", "PB21")
def test_a_rank_that_two_read_is_freed_after_the_second_not_the_first():
    world = lent(decode_tp=2)
    query(world, "D1", "P0")
    assert world.deliver() == ["P0>D1 Metadata"]
    done(world, "D0", "P0")
    done(world, "D0", "P0")
    assert (world.state("P0"), world.reports) == ("PULLS_PENDING", [])
    done(world, "D1", "P0")
    assert world.reports == [("P0", "sent")]


@takes("PB18")
def test_another_engine_gets_nothing_of_a_transfer_that_is_lent():
    world = lent(decode_tp=2)
    world.restart("D", "2")
    query(world, "D0", "P0")
    assert world.state("P0") == "PULLS_PENDING"
    assert world.deliver() == ["P0>D0 Gone"]
    query(world, "D1", "P0")
    assert world.deliver() == ["P0>D1 Gone"]
    assert world.reports == []


@takes("PB20")
def test_a_renewal_keeps_the_blocks_lent():
    world = World(met=True)
    world.offer()
    world.pull()
    world.advance(3 * world.timing.lease_seconds)
    assert (world.state("P0"), world.state("D0")) == ("PULLS_PENDING", "PULLS_PENDING")
    world.finish_copies("D0")
    world.deliver()
    assert sorted(world.reports) == [("D0", "received"), ("P0", "sent")]


def test_a_reader_that_dies_frees_the_blocks_at_lease_end_and_not_before():
    world = lent()
    world.advance(world.timing.lease_seconds - 0.5, deliver=False)
    assert world.reports == []
    world.advance(0.5, deliver=False)
    assert world.reports == [("P0", "sent")]


@takes("PB22")
def test_readers_that_never_come_are_waited_for_until_the_hold_time():
    world = lent(decode_tp=2)
    done(world, "D0", "P0")
    world.advance(world.timing.hold_seconds - 1)
    assert world.reports == []
    world.advance(1)
    assert world.reports == [("P0", "sent")]


def test_a_lease_that_outlives_the_hold_time_is_waited_for():
    world = lent(decode_tp=2, timing=SHORT_HOLD)
    world.advance(6, deliver=False)
    assert (world.state("P0"), world.reports) == ("PULLS_PENDING", [])
    done(world, "D0", "P0")
    assert world.reports == [("P0", "sent")]


def test_nothing_is_lent_when_the_hold_time_ends_in_the_same_moment():
    world = offered(met=False)
    query(world, "D0", "P0")
    world.network.clear()
    world.now += world.timing.hold_seconds
    world.introduce("D", "P")
    granted = world.deliver() == ["P0>D0 Metadata"]
    assert granted != (("P0", "sent") in world.reports)


@takes("PB23", "PB27", "PB28", "PB31")
def test_a_cancellation_takes_nothing_away_under_a_reader():
    world = World(decode_tp=2, met=True)
    world.offer()
    query(world, "D0", "P0")
    cancel(world, "P0", OWNER, BLOCKWISE)
    assert (world.state("P0"), world.reports) == ("CANCELLING", [])
    world.network.clear()
    query(world, "D1", "P0")
    assert world.deliver() == ["P0>D1 Gone"]
    stop(world, "D0", "P0")
    assert (world.state("P0"), world.reports) == ("FREED", [("P0", "sent")])
    world.network.clear()
    query(world, "D1", "P0")
    assert world.deliver() == ["P0>D1 Gone"]


@takes("PB24")
def test_a_cancellation_between_two_readers_frees_the_blocks_at_once():
    world = lent(decode_tp=2)
    done(world, "D0", "P0")
    cancel(world, "P0", OWNER, BLOCKWISE)
    assert world.reports == [("P0", "sent")]


@takes("PB25")
def test_at_the_deadline_no_lease_is_renewed_any_more():
    world = lent(timing=SHORT_DEADLINE)
    world.advance(8, deliver=False)
    assert (world.state("P0"), world.reports) == ("CANCELLING", [])
    world.advance(12, deliver=False)
    assert world.reports == [("P0", "sent")]


@takes("PB26")
def test_the_deadline_frees_blocks_that_nobody_reads_at_that_moment():
    world = lent(decode_tp=2, timing=SHORT_DEADLINE)
    done(world, "D0", "P0")
    world.advance(8)
    assert world.reports == [("P0", "sent")]


@takes("PB30")
def test_a_question_between_the_report_and_its_collection_is_refused():
    world = lent()
    world.collecting = False
    done(world, "D0", "P0")
    world.network.clear()
    query(world, "D0", "P0")
    assert (world.state("P0"), world.deliver()) == ("DONE_SENDING", ["P0>D0 Gone"])


@takes("PB33")
def test_a_tombstone_answers_late_words_and_ends():
    world = lent()
    done(world, "D0", "P0")
    world.network.clear()
    done(world, "D0", "P0")
    assert world.deliver() == ["P0>D0 Ack"]
    world.advance(world.timing.tombstone_seconds, step=10)
    assert world.state("P0") == "-"
    assert world.reports == [("P0", "sent")]


def test_a_question_that_its_own_last_word_overtook_does_not_hold_the_blocks():
    world = offered(decode_tp=2)
    stop(world, "D0", "P0")
    assert world.state("P0") == "METADATA_QUERY"
    query(world, "D0", "P0")
    assert "P0>D0 Metadata" not in world.deliver()
    stop(world, "D1", "P0")
    assert world.reports == [("P0", "sent")]


def test_an_offer_that_is_repeated_changes_nothing():
    world = lent()
    world.offer()
    assert world.state("P0") == "PULLS_PENDING"
    done(world, "D0", "P0")
    assert world.reports == [("P0", "sent")]
