"""Attempts and incarnations do not touch each other; nor does anything that was meant for somebody else."""

from dfirst.protocol import messages as wire
from dfirst.protocol import rank as rank_module
from dfirst.protocol.commands import AbortTransfer, FinishPush, Renounce, remote_of
from dfirst.protocol.messages import Sender, TransferKey
from dfirst.protocol.modes import BLOCKWISE, LAYERWISE, MOVER, OWNER
from dfirst.protocol.shards import layout_digest

from .forge import cancel, done, query, stop
from .world import KEY, World

RETRY = TransferKey("t-1", 1)


def reading() -> World:
    world = World(met=True)
    world.offer()
    world.pull()
    world.deliver()
    return world


def test_two_attempts_at_one_transfer_end_each_by_its_own_word():
    world = reading()
    world.offer(RETRY)
    world.pull(key=RETRY, request_id="again")
    world.deliver()
    first, second = world.copies["D0"]
    world.copies["D0"] = [second]
    world.finish_copies("D0")
    world.deliver()
    assert (world.state("P0", RETRY), world.state("P0", KEY)) == ("FREED", "PULLS_PENDING")
    world.copies["D0"] = [first]
    world.finish_copies("D0")
    world.deliver()
    assert sorted(world.reports) == [("D0", "received")] * 2 + [("P0", "sent")] * 2


def test_a_cancelled_attempt_leaves_the_next_one_alone():
    world = reading()
    world.offer(RETRY)
    cancel(world, "P0", OWNER, BLOCKWISE, KEY)
    assert (world.state("P0", KEY), world.state("P0", RETRY)) == ("CANCELLING", "METADATA_QUERY")


def test_a_restarted_decode_rank_ends_no_lease_of_its_predecessor():
    world = reading()
    old = world.sender("D0")
    world.restart("D", "2")
    done(world, "D0", "P0")
    stop(world, "D0", "P0")
    assert (world.state("P0"), world.reports) == ("PULLS_PENDING", [])
    done(world, "D0", "P0", sender=old)
    assert world.reports == [("P0", "sent")]


def test_a_restarted_prefill_rank_grants_nothing_of_its_predecessor():
    world = World(met=True)
    world.offer()
    world.pull()
    world.restart("P", "2")
    world.offer()
    assert world.deliver() == ["D0>P0 Query", "P0>D0 Gone"]
    assert world.reports == [("D0", "failed")]
    assert world.state("P0") == "METADATA_QUERY"
    assert world.cores["P0"].counters["other_incarnation"] == 1


def test_a_restarted_prefill_rank_acknowledges_words_that_it_has_nothing_to_do_with():
    world = reading()
    world.restart("P", "2")
    world.finish_copies("D0")
    assert world.deliver() == ["D0>P0 Done", "P0>D0 Ack"]
    assert world.leg_states("D0") == ["FREED"]
    assert not world.cores["P0"].owners


def test_a_renewal_that_reaches_a_restarted_rank_ends_the_read():
    world = reading()
    world.restart("P", "2")
    world.advance(world.timing.lease_seconds / 2)
    assert world.leg_states("D0") == ["DRAINING"]
    world.finish_copies("D0")
    assert world.reports == [("D0", "failed")]


def test_a_new_incarnation_and_an_old_one_are_written_side_by_side():
    """The old one's blocks stay lent to its writer; the new one asks and is asked on its own."""
    world = World(met=True)
    world.accept()
    world.push()
    world.deliver()
    world.restart("D", "2")
    world.introduce("D", "P")
    world.introduce("P", "D")
    world.accept(RETRY)
    world.push(RETRY)
    world.deliver()
    assert (world.state("P0", KEY), world.state("P0", RETRY)) == ("PUSHES_PENDING", "PUSHES_PENDING")
    world.advance(world.timing.lease_seconds)
    assert (world.state("P0", KEY), world.state("P0", RETRY)) == ("CANCELLING", "PUSHES_PENDING")


def test_a_message_in_the_other_mode_changes_nothing():
    world = reading()
    target = world.sender("P0").incarnation
    for mode in (LAYERWISE, "sideways"):
        world.hear("P0", wire.Stopped(world.sender("D0"), KEY, 9, target, mode, "", 0, "confused"), "D0")
    assert world.state("P0") == "PULLS_PENDING"
    assert world.cores["P0"].counters["other_mode"] == 1
    assert world.cores["P0"].counters["unknown_mode"] == 1
    assert world.deliver() == ["P0>D0 Error"]


def test_a_cancellation_for_a_mover_does_not_end_a_pull():
    world = reading()
    cancel(world, "D0", MOVER, BLOCKWISE)
    assert world.state("D0") == "PULLS_PENDING"


def test_a_command_for_the_other_kind_of_machine_is_counted_and_changes_nothing():
    world = reading()
    world.give("P0", AbortTransfer(KEY, "confused"))
    world.give("P0", FinishPush(KEY))
    world.give("D0", FinishPush(KEY))
    assert (world.state("P0"), world.state("D0")) == ("PULLS_PENDING", "PULLS_PENDING")
    assert len(world.observer.unexpected) == 3


def test_a_command_for_an_unknown_transfer_is_counted():
    world = World()
    world.give("D0", AbortTransfer(KEY, "late"))
    world.give("P0", FinishPush(KEY))
    assert world.cores["D0"].counters["unknown_abort"] == 1
    assert world.cores["P0"].counters["unknown_finish"] == 1


def test_renouncing_a_pushed_transfer_changes_nothing():
    world = World(met=True)
    world.accept()
    world.push()
    world.deliver()
    world.give("P0", Renounce(KEY, remote_of(world.engines["D"])))
    assert world.state("P0") == "PUSHES_PENDING"


def test_a_layout_under_a_wrong_name_is_not_learned():
    world = World()
    layout = wire.Layout(Sender("D", 0, "x"), "unknown", world.engines["D"])
    world.hear("P0", layout, "D0")
    assert not world.cores["P0"].peers.known("unknown")
    assert not world.cores["P0"].peers.known(layout_digest(world.engines["D"]))
    assert world.cores["P0"].counters["foreign_layout"] == 1


def test_a_rank_that_was_not_told_its_own_engine_yet_parks_questions():
    world = World(met=True)
    world.start("P", world.engines["P"].ranks[0], told=False)
    world.offer()
    query(world, "D0", "P0")
    assert world.deliver() == ["P0>D0 Wait", "P0>D0 LayoutQuery", "D0>P0 Layout"]
    assert world.state("P0") == "METADATA_QUERY"
    world.give("P0", rank_module.DirectoryKnown(world.engines["P"]))
    assert world.deliver() == ["P0>D0 Metadata"]


def test_when_no_more_can_be_remembered_a_question_is_refused(monkeypatch):
    monkeypatch.setattr(rank_module, "MAX_OWNER_TRANSFERS", 0)
    world = World(met=True)
    query(world, "D0", "P0")
    stop(world, "D0", "P0")
    assert world.deliver() == ["P0>D0 Gone"]
    assert not world.cores["P0"].owners
