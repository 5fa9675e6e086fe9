"""One lease on the owner's side: until when, and what its mover said."""

from dfirst.protocol.modes import BLOCKWISE
from dfirst.protocol.owner_leg import OwnerLeg

from .forge import done, query, stop
from .rows import takes
from .world import ALL_CACHED, KEY, World


def lent() -> World:
    """Two decode ranks have the same prefill rank's blocks lent."""
    world = World(decode_tp=2, met=True)
    world.offer()
    query(world, "D0", "P0")
    query(world, "D1", "P0")
    world.network.clear()
    return world


def lease(world: World, mover: str = "D0") -> OwnerLeg:
    return world.cores["P0"].owners[KEY].leases[world.sender(mover)]


def expired() -> World:
    """The first reader's lease has run out, the second one's was renewed by asking again."""
    world = lent()
    world.advance(world.timing.lease_seconds / 2)
    query(world, "D1", "P0", sequence=2)
    world.advance(world.timing.lease_seconds / 2)
    assert (lease(world).state, lease(world, "D1").state) == ("EXPIRED", "LENT")
    world.network.clear()
    return world


@takes("OL1", "OL6")
def test_a_lease_ends_with_its_own_movers_word():
    world = lent()
    assert lease(world).lent_until == world.now + world.timing.lease_seconds
    done(world, "D0", "P0")
    assert (lease(world).state, lease(world, "D1").state) == ("DONE", "LENT")
    assert world.deliver() == ["P0>D0 Ack"]


@takes("OL2")
def test_a_repeated_question_restarts_the_count():
    world = lent()
    world.now += 5
    query(world, "D0", "P0", sequence=2)
    assert lease(world).lent_until == world.now + world.timing.lease_seconds
    [packet] = world.network
    assert packet.message.sequence == 2


@takes("OL3", "OL11")
def test_a_mover_whose_lease_ran_out_may_ask_again_while_others_still_read():
    world = expired()
    query(world, "D0", "P0", sequence=3)
    assert lease(world).state == "LENT"
    assert world.deliver() == ["P0>D0 Metadata"]


@takes("OL4")
def test_a_renewal_restarts_the_count():
    world = World(met=True)
    world.offer()
    world.pull()
    world.deliver()
    before = lease(world).lent_until
    world.advance(world.timing.lease_seconds / 2)
    assert lease(world).lent_until > before


@takes("OL5")
def test_a_reader_that_read_nothing_releases_with_its_word():
    world = World(met=True)
    world.offer()
    done(world, "D0", "P0", cached=ALL_CACHED)
    assert world.reports == [("P0", "sent")]


@takes("OL7")
def test_a_late_done_is_recorded_and_acknowledged():
    world = expired()
    done(world, "D0", "P0")
    assert lease(world).state == "DONE"
    assert world.deliver() == ["P0>D0 Ack"]


@takes("OL8")
def test_a_mover_that_gives_up_before_the_grant_is_not_waited_for():
    world = World(decode_tp=2, met=True)
    world.offer()
    query(world, "D1", "P0")
    stop(world, "D0", "P0")
    done(world, "D1", "P0")
    assert world.reports == [("P0", "sent")]


@takes("OL9")
def test_a_mover_that_stops_gives_its_lease_back_before_the_end():
    world = lent()
    stop(world, "D0", "P0")
    assert lease(world).state == "STOPPED"
    assert lease(world).timers == {}
    done(world, "D1", "P0")
    assert world.reports == [("P0", "sent")]


@takes("OL10")
def test_a_late_stopped_is_recorded_and_acknowledged():
    world = expired()
    stop(world, "D0", "P0")
    assert lease(world).state == "STOPPED"
    assert world.deliver() == ["P0>D0 Ack"]


@takes("OL12")
def test_a_second_done_counts_once_and_is_acknowledged_again():
    world = lent()
    done(world, "D0", "P0")
    done(world, "D0", "P0")
    assert (world.state("P0"), world.reports) == ("PULLS_PENDING", [])
    assert world.deliver() == ["P0>D0 Ack", "P0>D0 Ack"]


@takes("OL13")
def test_a_second_stopped_is_acknowledged_again():
    world = lent()
    stop(world, "D0", "P0")
    stop(world, "D0", "P0")
    assert world.deliver() == ["P0>D0 Ack", "P0>D0 Ack"]


@takes("OL14")
def test_a_second_requests_stopped_is_acknowledged_and_the_first_ones_done_stands():
    world = lent()
    done(world, "D0", "P0")
    stop(world, "D0", "P0")
    assert lease(world).state == "DONE"
    assert world.deliver() == ["P0>D0 Ack", "P0>D0 Ack"]


@takes("OL15")
def test_a_second_requests_done_is_acknowledged_and_the_first_ones_stopped_stands():
    world = lent()
    stop(world, "D0", "P0")
    done(world, "D0", "P0")
    assert lease(world).state == "STOPPED"
    assert world.deliver() == ["P0>D0 Ack", "P0>D0 Ack"]


@takes("OL16")
def test_a_done_for_a_grant_that_is_forgotten_ends_nothing():
    """A first request with the same transfer is long over; its word comes before the second one asks."""
    world = World(met=True)
    world.accept()
    done(world, "P0", "D0", grant=5)
    assert world.deliver() == ["D0>P0 Ack"]
    query(world, "P0", "D0", sequence=7)
    assert (world.state("D0"), world.leg_states("D0"), world.reports) == ("PUSHES_PENDING", ["LENT"], [])


@takes("OL17", "OL18")
def test_a_word_of_a_first_request_does_not_end_the_lease_of_a_second_one():
    world = lent()
    query(world, "D0", "P0", sequence=7)
    world.network.clear()
    done(world, "D0", "P0", grant=lease(world).grant + 1)
    stop(world, "D0", "P0", sequence=6)
    assert lease(world).state == "LENT"
    assert "lease_end" in lease(world).timers
    assert world.deliver() == ["P0>D0 Ack", "P0>D0 Ack"]


def test_an_older_question_that_comes_late_is_not_answered_in_the_place_of_a_newer_one():
    world = World(met=True)
    query(world, "D0", "P0", sequence=7)
    query(world, "D0", "P0", sequence=6)
    world.network.clear()
    world.offer()
    [packet] = world.network
    assert packet.message.sequence == 7


def test_what_is_lent_a_second_time_is_another_grant():
    world = lent()
    assert lease(world).grant != lease(world, "D1").grant


def test_a_question_after_the_last_word_lends_nothing():
    world = lent()
    done(world, "D0", "P0")
    world.network.clear()
    query(world, "D0", "P0", sequence=9)
    assert lease(world).state == "DONE"
    assert world.deliver() == []


def test_an_owner_of_pushed_blocks_waits_for_the_last_write_too():
    world = World(met=True)
    world.accept()
    query(world, "P0", "D0")
    [held] = world.cores["D0"].owners[KEY].leases.values()
    timing = world.timing
    assert held.lent_until == world.now + timing.lease_seconds + timing.copy_timeout_seconds + 5.0
    assert held.transfer.mode != BLOCKWISE


def test_an_owner_waits_longer_for_a_writer_that_says_so():
    world = World(met=True)
    world.accept()
    query(world, "P0", "D0", tail=100.0)
    [held] = world.cores["D0"].owners[KEY].leases.values()
    assert held.lent_until == world.now + world.timing.lease_seconds + 100.0


def test_a_writer_that_says_less_is_waited_for_as_configured():
    world = World(met=True)
    world.accept()
    query(world, "P0", "D0", tail=0.0)
    [held] = world.cores["D0"].owners[KEY].leases.values()
    timing = world.timing
    tail = timing.copy_timeout_seconds + timing.stall_allowance_seconds
    assert held.lent_until == world.now + timing.lease_seconds + tail


def test_a_writer_that_may_write_for_ever_is_lent_nothing():
    for tail in (-1.0, 1e9, float("nan"), float("inf")):
        world = World(met=True)
        world.accept()
        query(world, "P0", "D0", tail=tail)
        assert world.deliver() == ["D0>P0 Gone"]
        assert world.reports == [("D0", "failed")]
