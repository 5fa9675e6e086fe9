"""Layer-wise, the prefill rank: it pushes while vLLM computes, and the blocks go back when both are over."""

from dfirst.protocol.commands import FinishPush
from dfirst.protocol.modes import LAYERWISE, MOVER, OWNER
from dfirst.protocol.timing import Timing

from .forge import cancel
from .rows import takes
from .world import KEY, World

PATIENT = Timing(hold_seconds=10_000.0)


def pushing(decode_tp: int = 1) -> World:
    """Every decode rank has lent its blocks and layers are written."""
    world = World(decode_tp=decode_tp, met=True)
    world.accept()
    world.push()
    world.deliver()
    assert world.state("P0") == "PUSHES_PENDING"
    return world


def first_contact() -> World:
    world = World()
    world.accept()
    world.push()
    assert world.state("P0") == "LAYOUT_QUERY"
    return world


def asking() -> World:
    """The decode rank knows nothing of the transfer yet and answers WAIT."""
    world = World(met=True)
    world.push()
    world.deliver()
    assert world.state("P0") == "METADATA_QUERY"
    return world


@takes("PL1", "PL13", "PL18", "PL26", "PL28")
def test_the_blocks_go_back_when_all_is_written_and_vllm_has_finished():
    world = World(met=True)
    world.collecting = False
    world.accept()
    world.push()
    assert world.deliver() == ["P0>D0 Query", "D0>P0 Metadata"]
    world.finish_copies("P0")
    assert world.state("P0") == "PUSHES_DONE"
    assert world.deliver() == ["P0>D0 Done", "D0>P0 Ack"]
    assert world.reports == [("D0", "received")]
    world.finish()
    assert world.state("P0") == "DONE_SENDING"
    world.collect()
    assert world.state("P0") == "FREED"
    assert world.reports == [("D0", "received"), ("P0", "sent")]


@takes("PL23", "PL18", "PL26")
def test_vllm_may_finish_before_all_is_written():
    world = pushing()
    world.finish()
    assert world.reports == []
    world.finish_copies("P0")
    assert world.reports == [("P0", "sent")]


@takes("PL2")
def test_a_replica_that_writes_nothing_waits_for_vllm_only():
    world = World(prefill_tp=2, heads=1, met=True)
    world.accept()
    world.push()
    world.deliver()
    idle = next(rank for rank in ("P0", "P1") if not world.copies[rank])
    writer = "P1" if idle == "P0" else "P0"
    assert world.state(idle) == "PUSHES_DONE"
    world.finish()
    assert world.reports == [(idle, "sent")]
    world.finish_copies(writer)
    world.deliver()
    assert sorted(world.reports) == [("D0", "received"), ("P0", "sent"), ("P1", "sent")]


@takes("PL3", "PL5")
def test_the_decode_engines_layout_is_asked_for_at_first_contact():
    world = first_contact()
    said = world.deliver()
    assert said[:3] == ["P0>D0 LayoutQuery", "D0>P0 Layout", "P0>D0 Query"]
    assert world.state("P0") == "PUSHES_PENDING"


@takes("PL6", "PL11")
def test_a_replica_learns_at_first_contact_that_it_writes_nothing():
    world = World(prefill_tp=2, heads=1)
    world.accept()
    world.push()
    world.finish()
    assert world.reports == []
    world.deliver()
    [(idle, outcome)] = world.reports
    assert outcome == "sent"
    assert not world.copies[idle]


@takes("PL4", "PL27")
def test_engines_that_do_not_fit_tell_the_decode_rank_at_once():
    world = World(decode_model="other", met=True)
    world.accept()
    world.push()
    assert world.state("P0") == "FAILED"
    assert world.deliver() == ["P0>D0 Cancel", "D0>P0 Ack"]
    assert world.reports == [("D0", "failed")]
    world.finish()
    assert world.reports == [("D0", "failed"), ("P0", "sent")]


@takes("PL7")
def test_a_lost_question_for_the_layout_is_repeated():
    world = first_contact()
    world.network.clear()
    assert world.advance(1)[:2] == ["P0>D0 LayoutQuery", "D0>P0 Layout"]
    assert world.state("P0") == "PUSHES_PENDING"


@takes("PL8")
def test_a_decode_engine_that_gives_no_layout_costs_the_push_and_nothing_else():
    world = first_contact()
    world.lose()
    world.finish()
    world.advance(world.timing.query_timeout_seconds)
    assert world.reports == [("P0", "sent")]


@takes("PL9")
def test_a_layout_that_does_not_fit_ends_the_push_on_both_sides():
    world = World(decode_model="other")
    world.accept()
    world.push()
    world.finish()
    world.deliver()
    assert sorted(world.reports) == [("D0", "failed"), ("P0", "sent")]


@takes("PL10")
def test_an_abort_before_the_layout_is_known_is_told_to_the_decode_rank():
    world = first_contact()
    world.network.clear()
    world.abort("P")
    world.finish()
    world.deliver()
    assert sorted(world.reports) == [("D0", "failed"), ("P0", "sent")]


@takes("PL12", "PL24", "PL25", "PL27")
def test_one_refusal_ends_the_push_only_after_the_other_writes_have_ended():
    world = World(decode_tp=2, met=True)
    world.accept()
    cancel(world, "D1", OWNER, LAYERWISE)
    world.push()
    world.deliver()
    assert world.state("P0") == "CANCELLING"
    assert world.leg_states("P0") == ["DRAINING", "FREED"]
    world.finish()
    assert ("P0", "sent") not in world.reports
    world.finish_copies("P0")
    assert ("P0", "sent") in world.reports
    world.deliver()
    assert sorted(world.reports) == [("D0", "failed"), ("D1", "failed"), ("P0", "sent")]


@takes("PL14")
def test_a_cancellation_ends_a_push_that_has_not_begun():
    world = asking()
    cancel(world, "P0", MOVER, LAYERWISE)
    assert world.state("P0") == "FAILED"
    assert "P0>D0 Stopped" in world.deliver()
    world.accept()
    assert world.reports == [("D0", "failed")]


@takes("PL15")
def test_an_aborted_prefill_says_stopped_though_it_wrote_nothing():
    world = asking()
    world.abort("P")
    world.finish()
    assert world.reports == [("P0", "sent")]
    assert world.deliver() == ["P0>D0 Stopped", "D0>P0 Ack"]


@takes("PL16")
def test_a_decode_rank_that_answers_wait_for_ever_is_given_up_at_the_deadline():
    world = World(timing=PATIENT, met=True)
    world.push()
    world.finish()
    world.advance(world.timing.transfer_deadline_seconds)
    assert world.reports == [("P0", "sent")]


@takes("PL17")
def test_a_short_prompt_is_finished_before_the_decode_rank_has_answered():
    world = asking()
    world.finish()
    assert (world.state("P0"), world.reports) == ("METADATA_QUERY", [])
    world.accept()
    world.deliver()
    world.finish_copies("P0")
    world.deliver()
    assert sorted(world.reports) == [("D0", "received"), ("P0", "sent")]


@takes("PL19")
def test_one_failed_write_fails_the_request_on_every_decode_rank():
    world = pushing(decode_tp=2)
    first, second = world.copies["P0"]
    world.copies["P0"] = [first]
    world.finish_copies("P0", ok=False, reason="the link broke")
    assert [stop.leg for stop in world.stopped["P0"]] == [second.leg]
    world.finish()
    assert world.reports == []
    world.copies["P0"] = [second]
    world.finish_copies("P0")
    world.deliver()
    assert sorted(world.reports) == [("D0", "failed"), ("D1", "failed"), ("P0", "sent")]


@takes("PL20")
def test_a_cancelled_push_ends_its_copy_and_says_stopped():
    world = pushing()
    cancel(world, "P0", MOVER, LAYERWISE)
    world.deliver()
    assert (world.state("P0"), len(world.stopped["P0"])) == ("CANCELLING", 1)
    world.finish_copies("P0", ok=False)
    assert world.deliver() == ["P0>D0 Stopped", "D0>P0 Ack"]
    assert world.reports == [("D0", "failed")]


def test_an_abort_on_the_decode_side_stops_the_writers_first():
    world = pushing()
    world.abort("D")
    assert world.deliver() == ["D0>P0 Cancel", "P0>D0 Ack"]
    assert (world.state("D0"), world.state("P0")) == ("CANCELLING", "CANCELLING")
    assert world.reports == []
    world.finish_copies("P0", ok=False)
    world.finish()
    world.deliver()
    assert sorted(world.reports) == [("D0", "failed"), ("P0", "sent")]


@takes("PL21")
def test_an_aborted_prefill_keeps_its_blocks_until_the_copy_in_flight_has_ended():
    world = pushing()
    world.abort("P")
    world.finish()
    assert (world.state("P0"), world.reports) == ("CANCELLING", [])
    world.finish_copies("P0", ok=False)
    world.deliver()
    assert sorted(world.reports) == [("D0", "failed"), ("P0", "sent")]


@takes("PL22")
def test_the_deadline_ends_a_push_that_renewals_keep_alive():
    world = pushing()
    world.advance(world.timing.transfer_deadline_seconds)
    assert world.state("P0") == "CANCELLING"
    world.finish_copies("P0", ok=False)
    world.finish()
    world.deliver()
    assert sorted(world.reports) == [("D0", "failed"), ("P0", "sent")]


def test_a_push_that_is_over_outlives_the_deadline_until_vllm_finishes():
    world = pushing()
    world.finish_copies("P0")
    world.advance(2 * world.timing.transfer_deadline_seconds, step=5)
    assert world.state("P0") == "PUSHES_DONE"
    world.finish()
    assert ("P0", "sent") in world.reports


@takes("PL29")
def test_a_freed_push_is_forgotten_in_the_end():
    world = pushing()
    world.finish_copies("P0")
    world.finish()
    world.advance(world.timing.tombstone_seconds + 5, step=5)
    assert (world.state("P0"), world.state("D0")) == ("-", "-")
    assert world.cores["P0"].next_deadline() is None


@takes("PL30", "PL27")
def test_a_second_prefill_of_an_ended_transfer_pushes_nothing_and_gets_its_blocks_back():
    world = pushing()
    world.finish_copies("P0")
    world.finish()
    world.deliver()
    world.reports.clear()
    world.push()
    world.finish()
    assert world.deliver() == []
    assert world.reports == [("P0", "sent")]


def test_a_repeated_finish_releases_once():
    world = pushing()
    world.finish_copies("P0")
    world.finish()
    world.give("P0", FinishPush(KEY))
    world.deliver()
    assert sorted(world.reports) == [("D0", "received"), ("P0", "sent")]


def test_the_forward_pass_is_not_told_to_wait_for_a_decode_rank_that_swallows_everything():
    world = World(met=True)
    world.lose()
    world.push()
    world.finish()
    world.advance(world.timing.query_timeout_seconds)
    assert world.reports == [("P0", "sent")]
    assert not world.copies["P0"]
