"""One leg on the mover's side: a question, copies inside the lease, one last word."""

from dfirst.protocol import messages as wire
from dfirst.protocol.commands import CopyEnded
from dfirst.protocol.modes import BLOCKWISE, OWNER
from dfirst.protocol.mover_leg import MoverLeg
from dfirst.protocol.timing import Timing

from .forge import cancel
from .rows import takes
from .world import ALL_CACHED, KEY, World


def copying(layerwise: bool = False, timing: Timing | None = None) -> World:
    world = World(met=True, timing=timing)
    if layerwise:
        world.accept()
        world.push()
    else:
        world.offer()
        world.pull()
    world.deliver()
    assert leg(world, "P0" if layerwise else "D0").state == "COPYING"
    return world


def leg(world: World, rank: str = "D0") -> MoverLeg:
    [found] = world.cores[rank].movers[KEY].legs.values()
    return found


@takes("ML1", "ML4", "ML11", "ML20")
def test_a_leg_copies_only_what_its_owner_has_lent():
    world = World(met=True)
    world.offer()
    world.pull()
    assert not world.copies["D0"]
    world.deliver()
    [copy] = world.copies["D0"]
    assert world.cores["D0"].lease_runs(copy.leg, world.now)
    world.finish_copies("D0")
    assert leg(world).state == "DONE_UNACKED"
    assert not world.cores["D0"].lease_runs(copy.leg, world.now)
    world.deliver()
    assert leg(world).state == "FREED"
    assert leg(world).timers == {}


@takes("ML2")
def test_a_rank_that_nobody_reads_is_released_by_a_leg_without_bytes():
    world = World(prefill_tp=2, heads=1, met=True)
    world.offer()
    world.pull()
    world.deliver()
    [copy] = world.copies["D0"]
    unread = f"P{1 - copy.peer.rank}"
    assert world.reports == [(unread, "sent")]
    world.finish_copies("D0")
    world.deliver()
    assert sorted(world.reports) == [("D0", "received"), ("P0", "sent"), ("P1", "sent")]


@takes("ML3", "ML21")
def test_a_lost_renunciation_is_repeated():
    world = World()
    world.offer()
    world.lose("Cancel")
    world.renounce()
    world.deliver()
    world.lose_nothing()
    assert world.advance(1) == ["D0>P0 Cancel", "P0>D0 Ack"]
    assert world.reports == [("P0", "sent")]


@takes("ML5")
def test_a_grant_that_is_over_when_it_comes_is_asked_for_again():
    world = World(met=True)
    world.offer()
    world.pull()
    world.now += world.timing.lease_seconds
    said = world.deliver(rounds=2)
    assert said == ["D0>P0 Query", "P0>D0 Metadata"]
    world = World(met=True)
    world.offer()
    world.pull()
    world.deliver(rounds=1)
    world.now += world.timing.lease_seconds
    assert world.deliver() == ["P0>D0 Metadata", "D0>P0 Query", "P0>D0 Metadata"]
    assert leg(world).state == "COPYING"


@takes("ML6")
def test_an_owner_that_answers_wait_is_not_taken_for_dead():
    world = World(met=True)
    world.pull()
    world.advance(3 * world.timing.query_timeout_seconds)
    assert leg(world).state == "METADATA_QUERY"
    world.offer()
    world.deliver()
    assert leg(world).state == "COPYING"


@takes("ML7")
def test_a_lost_question_is_repeated_under_a_new_number():
    world = World(met=True)
    world.offer()
    world.lose("Metadata")
    world.pull()
    world.deliver()
    world.lose_nothing()
    assert world.advance(1) == ["D0>P0 Query", "P0>D0 Metadata"]
    assert len(leg(world).asked) == 2
    assert len(world.copies["D0"]) == 1


@takes("ML8")
def test_a_refused_leg_copies_nothing_and_says_nothing():
    world = World(met=True)
    world.offer()
    cancel(world, "P0", OWNER, BLOCKWISE)
    world.network.clear()
    world.pull()
    assert world.deliver() == ["D0>P0 Query", "P0>D0 Gone"]
    assert (leg(world).state, world.copies["D0"]) == ("FREED", [])


@takes("ML9")
def test_a_silent_owner_is_given_up_and_told_so():
    world = World(met=True)
    world.offer()
    world.lose("Metadata")
    world.pull()
    world.advance(world.timing.query_timeout_seconds)
    assert world.reports == [("D0", "failed"), ("P0", "sent")]
    assert "did not answer for 10 s" in leg(world).failure


@takes("ML10")
def test_a_leg_that_is_taken_back_before_the_answer_never_copies():
    world = World(met=True)
    world.offer()
    world.pull()
    world.deliver(rounds=1)
    world.abort("D")
    world.deliver()
    assert not world.copies["D0"]
    assert sorted(world.reports) == [("D0", "failed"), ("P0", "sent")]


@takes("ML12")
def test_what_was_read_after_the_lease_counts_for_nothing():
    world = copying()
    world.now = leg(world).lease_until
    world.finish_copies("D0")
    assert world.reports == [("D0", "failed")]
    assert "ended after the lease" in leg(world).failure


def test_what_was_read_just_before_the_leases_end_counts():
    world = copying()
    world.now = leg(world).lease_until - 0.001
    world.finish_copies("D0")
    assert world.reports == [("D0", "received")]


def test_what_was_written_counts_though_it_ended_after_the_lease():
    world = copying(layerwise=True)
    world.now = leg(world, "P0").lease_until + 1
    world.finish_copies("P0")
    world.deliver()
    assert world.reports == [("D0", "received")]


@takes("ML13")
def test_a_failed_copy_assumes_nothing_of_what_may_have_arrived():
    world = copying()
    world.finish_copies("D0", ok=False, reason="timed out")
    assert world.deliver() == ["D0>P0 Stopped", "P0>D0 Ack"]
    assert sorted(world.reports) == [("D0", "failed"), ("P0", "sent")]


@takes("ML14")
def test_a_renewal_moves_the_leases_end_on():
    world = copying()
    before = leg(world).lease_until
    said = world.advance(world.timing.lease_seconds / 2)
    assert said == ["D0>P0 Renew", "P0>D0 Renewed"]
    assert before < leg(world).lease_until < world.now + world.timing.lease_seconds


def test_two_answers_to_a_renewal_may_be_lost():
    world = copying()
    world.lose("Renewed")
    world.advance(world.timing.lease_seconds * 0.6)
    world.lose_nothing()
    world.advance(world.timing.lease_seconds * 0.5)
    assert leg(world).state == "COPYING"


@takes("ML15", "ML18")
def test_a_leg_that_is_taken_back_says_stopped_after_its_last_copy():
    world = copying()
    world.abort("D")
    assert leg(world).state == "DRAINING"
    assert world.deliver() == []
    world.finish_copies("D0")
    assert world.deliver() == ["D0>P0 Stopped", "P0>D0 Ack"]


@takes("ML16", "ML19")
def test_a_renewal_that_is_refused_ends_the_copies():
    world = copying()
    cancel(world, "P0", OWNER, BLOCKWISE)
    world.advance(world.timing.lease_seconds / 2)
    assert (leg(world).state, len(world.stopped["D0"])) == ("DRAINING", 1)
    assert world.reports == []
    world.finish_copies("D0", ok=False)
    world.deliver()
    assert sorted(world.reports) == [("D0", "failed"), ("P0", "sent")]


@takes("ML17")
def test_the_mover_stops_before_the_owner_may_release():
    world = copying()
    world.lose()
    owner = next(iter(world.cores["P0"].owners[KEY].leases.values()))
    assert leg(world).lease_until < owner.lent_until
    world.advance(leg(world).lease_until - world.now, step=0.01)
    assert leg(world).state == "DRAINING"
    assert (world.state("P0"), world.reports) == ("PULLS_PENDING", [])


@takes("ML22")
def test_a_last_word_that_nobody_hears_ends_when_the_lease_has():
    world = copying()
    world.lose()
    world.finish_copies("D0")
    world.advance(world.timing.farewell_seconds)
    assert leg(world).state == "FREED"
    assert sorted(world.reports) == [("D0", "received"), ("P0", "sent")]


def test_a_writer_repeats_its_word_for_as_long_as_the_owner_waits():
    world = copying(layerwise=True)
    world.lose()
    world.finish_copies("P0")
    timing = world.timing
    owner_waits = timing.lease_seconds + timing.copy_timeout_seconds + timing.stall_allowance_seconds
    world.advance(owner_waits - 5)
    world.lose_nothing()
    world.advance(1)
    assert world.reports == [("D0", "received")]


def test_an_answer_to_nobodys_question_is_not_taken():
    world = World(met=True)
    world.pull()
    world.deliver()
    answer = wire.Metadata(world.sender("P0"), KEY, 99, 20.0, [1, 2, 3], 1)
    world.hear("D0", answer, "P0")
    world.hear("D0", wire.Gone(world.sender("P0"), KEY, 99, "never asked"), "P0")
    assert (leg(world).state, world.copies["D0"]) == ("METADATA_QUERY", [])


def test_an_acknowledgement_of_another_word_ends_nothing():
    """It may be of a first request with the same transfer; the word of this one is still to arrive."""
    world = copying()
    world.finish_copies("D0")
    [packet] = world.network
    world.network.clear()
    number = packet.message.sequence
    world.hear("D0", wire.Ack(world.sender("P0"), KEY, number - 1), "P0")
    assert leg(world).state == "DONE_UNACKED"
    world.hear("D0", wire.Ack(world.sender("P0"), KEY, number), "P0")
    assert leg(world).state == "FREED"


def test_a_second_end_of_the_same_copies_changes_nothing():
    world = copying()
    [copy] = world.copies["D0"]
    world.finish_copies("D0")
    world.give("D0", CopyEnded(copy.leg, False, "late"))
    assert (leg(world).state, world.reports) == ("DONE_UNACKED", [("D0", "received")])


def test_a_leg_of_a_cached_prompt_holds_no_timer_after_its_word_is_heard():
    world = World(met=True)
    world.offer()
    world.pull(cached=ALL_CACHED)
    world.deliver()
    assert leg(world).timers == {}
