"""The scheduler side: what vLLM was told of a request, and what the ranks are told."""

from dfirst.protocol.commands import (
    AbortTransfer,
    AcceptPush,
    FinishPush,
    OfferBlocks,
    Renounce,
    StartPull,
    StartPush,
    remote_of,
)
from dfirst.protocol.messages import TransferKey
from dfirst.protocol.modes import BLOCKWISE, LAYERWISE
from dfirst.protocol.scheduler import Allocation, Finish, SchedulerCore, TransferRequest

from .rows import takes
from .world import BLOCKS, KEY, PROMPT, RecordingObserver, directory

TO_LOAD = Allocation(block_ids=BLOCKS, cached_tokens=0, external_tokens=PROMPT)
NOTHING_TO_LOAD = Allocation(block_ids=BLOCKS, cached_tokens=PROMPT, external_tokens=0)
COMPUTED = Finish(block_ids=BLOCKS, prompt_computed=True)
ABORTED = Finish(block_ids=BLOCKS, prompt_computed=False)
PREFILL, DECODE = remote_of(directory("P", 1)), remote_of(directory("D", 1))


def scheduler() -> SchedulerCore:
    return SchedulerCore(RecordingObserver())


def decode(mode: str = BLOCKWISE, request_id: str = "r", key: TransferKey = KEY) -> TransferRequest:
    return TransferRequest(
        key=key,
        mode=mode,
        request_id=request_id,
        prompt_tokens=PROMPT,
        remote=PREFILL if mode == BLOCKWISE else None,
        metaserver="" if mode == BLOCKWISE else "http://router/metaserver",
    )


def prefill(mode: str = BLOCKWISE, request_id: str = "r") -> TransferRequest:
    return TransferRequest(
        key=KEY,
        mode=mode,
        request_id=request_id,
        prompt_tokens=PROMPT,
        remote=DECODE if mode == LAYERWISE else None,
    )


def loading(mode: str = BLOCKWISE) -> SchedulerCore:
    core = scheduler()
    core.seen(decode(mode), decodes=True)
    core.allocated("r", TO_LOAD)
    return core


def state(core: SchedulerCore, request_id: str = "r") -> str:
    entity = core.requests.get(request_id)
    return entity.state if entity else "-"


@takes("DR1", "DR3", "DR6", "DR12")
def test_a_request_is_loaded_once_and_forgotten_when_it_is_answered():
    core = scheduler()
    core.seen(decode(), decodes=True)
    assert core.external_tokens("r", 4) == PROMPT - 4
    core.allocated("r", TO_LOAD)
    [command] = core.take_commands()
    assert isinstance(command, StartPull)
    assert command.block_ids == BLOCKS
    assert core.external_tokens("r", 0) == 0
    core.reported("r", "received")
    core.allocated("r", TO_LOAD)
    assert (state(core), core.take_commands()) == ("LOADED", ())
    assert core.finished("r", COMPUTED) is False
    assert state(core) == "-"


@takes("DR3")
def test_a_push_is_accepted_by_the_ranks_and_announced_to_the_router():
    core = loading(LAYERWISE)
    [command] = core.take_commands()
    assert isinstance(command, AcceptPush)
    [announcement] = core.take_announcements()
    assert (announcement.request.key, announcement.block_ids) == (KEY, BLOCKS)
    assert core.take_announcements() == ()


@takes("DR2", "DR15")
def test_a_request_that_comes_twice_does_not_touch_the_load_that_runs():
    core = loading()
    core.take_commands()
    core.seen(decode(request_id="again"), decodes=True)
    assert state(core, "again") == "DUPLICATE"
    assert core.external_tokens("again", 0) == 0
    core.allocated("again", TO_LOAD)
    core.finished("again", COMPUTED)
    assert core.take_commands() == ()
    assert state(core) == "LOADING"


def test_a_transfer_may_be_used_again_once_its_request_has_ended():
    core = loading()
    core.reported("r", "received")
    core.finished("r", COMPUTED)
    core.seen(decode(request_id="again"), decodes=True)
    assert state(core, "again") == "QUEUED"


@takes("DR4", "DR14")
def test_a_cached_prompt_releases_the_prefill_side_without_a_read():
    core = scheduler()
    core.seen(decode(), decodes=True)
    core.allocated("r", NOTHING_TO_LOAD)
    assert core.take_commands() == (Renounce(KEY, PREFILL),)
    assert state(core) == "LOCAL"
    core.finished("r", COMPUTED)
    assert (state(core), core.take_commands()) == ("-", ())


@takes("DR5")
def test_a_request_that_is_dropped_in_the_queue_releases_the_prefill_side():
    core = scheduler()
    core.seen(decode(), decodes=True)
    core.finished("r", ABORTED)
    assert core.take_commands() == (Renounce(KEY, PREFILL),)
    assert state(core) == "-"


def test_a_dropped_push_has_nobody_to_tell():
    core = scheduler()
    core.seen(decode(LAYERWISE), decodes=True)
    core.finished("r", ABORTED)
    assert core.take_commands() == ()


@takes("DR7", "DR13")
def test_a_failed_load_is_left_to_vllms_policy():
    core = loading()
    core.reported("r", "failed")
    assert (state(core), core.external_tokens("r", 0)) == ("LOAD_FAILED", 0)
    core.finished("r", COMPUTED)
    assert state(core) == "-"


@takes("DR8")
def test_a_request_that_cannot_be_announced_fails_at_once():
    core = loading(LAYERWISE)
    core.take_commands()
    core.announce_failed("r", "the router refused")
    assert core.take_commands() == (AbortTransfer(KEY, "the router refused"),)
    assert state(core) == "LOADING"
    core.reported("r", "failed")
    core.announce_failed("r", "the router refused")
    assert (state(core), core.take_commands()) == ("LOAD_FAILED", ())


@takes("DR9", "DR11")
def test_an_aborted_load_ends_when_the_ranks_let_go():
    core = loading()
    core.take_commands()
    assert core.finished("r", ABORTED) is False
    assert [type(command) for command in core.take_commands()] == [AbortTransfer]
    assert state(core) == "ABORTING"
    core.reported("r", "failed")
    assert state(core) == "-"


@takes("DR10")
def test_an_abort_may_come_after_the_last_byte():
    core = loading()
    core.finished("r", ABORTED)
    core.reported("r", "received")
    assert state(core) == "-"


@takes("PR1", "PR3", "PR7")
def test_a_computed_prompt_is_held_until_every_rank_has_sent_it():
    core = scheduler()
    core.seen(prefill(), decodes=False)
    core.allocated("r", TO_LOAD)
    assert core.take_commands() == ()
    assert core.finished("r", COMPUTED) is True
    [command] = core.take_commands()
    assert isinstance(command, OfferBlocks)
    core.reported("r", "sent")
    assert state(core) == "-"


@takes("PR8", "PR9")
def test_a_second_prefill_of_a_transfer_under_way_hands_nothing_over():
    for mode in (BLOCKWISE, LAYERWISE):
        core = scheduler()
        core.seen(prefill(mode), decodes=False)
        core.seen(prefill(mode, request_id="again"), decodes=False)
        assert state(core, "again") == "DUPLICATE"
        core.allocated("again", TO_LOAD)
        assert core.finished("again", COMPUTED) is False
        assert (core.take_commands(), state(core), state(core, "again")) == ((), "QUEUED", "-")


@takes("PR4")
def test_a_prompt_that_was_not_computed_is_not_held():
    core = scheduler()
    core.seen(prefill(), decodes=False)
    assert core.finished("r", ABORTED) is False
    assert (state(core), core.take_commands()) == ("-", ())


@takes("PR2", "PR5")
def test_a_push_begins_with_the_first_chunk_and_is_held_when_vllm_has_finished():
    core = scheduler()
    core.seen(prefill(LAYERWISE), decodes=False)
    assert core.pushing("r") is None
    core.allocated("r", TO_LOAD)
    core.allocated("r", TO_LOAD)
    [command] = core.take_commands()
    assert isinstance(command, StartPush)
    assert core.pushing("r") is not None
    assert core.finished("r", COMPUTED) is True
    assert core.take_commands() == (FinishPush(KEY),)
    assert core.pushing("r") is None
    core.reported("r", "sent")
    assert state(core) == "-"


@takes("PR6")
def test_an_aborted_push_is_held_until_its_copies_have_ended():
    core = scheduler()
    core.seen(prefill(LAYERWISE), decodes=False)
    core.allocated("r", TO_LOAD)
    core.take_commands()
    assert core.finished("r", ABORTED) is True
    assert [type(command) for command in core.take_commands()] == [AbortTransfer, FinishPush]
    core.reported("r", "sent")
    assert state(core) == "-"


def test_words_about_an_unknown_request_change_nothing():
    core = scheduler()
    core.allocated("x", TO_LOAD)
    core.reported("x", "sent")
    core.announce_failed("x", "late")
    assert core.finished("x", COMPUTED) is False
    assert core.transfer("x") is None
    assert core.take_commands() == ()
