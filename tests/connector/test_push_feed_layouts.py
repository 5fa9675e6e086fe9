"""A pushed prompt arrives whole between any two layouts, each token once and none before it is computed."""

import itertools
from collections.abc import Callable

import pytest
from dfirst.connector.push_feed import Layer, PushFeed
from dfirst.connector.step import Chunk
from dfirst.protocol.commands import LegKey
from dfirst.protocol.copies import Copies
from dfirst.protocol.effects import StartCopies
from dfirst.protocol.messages import TransferKey
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.protocol.drawn_layouts import transfers
from tests.protocol.layouts import NOT_OF_THE_PROMPT, Engine, Transfer, run, write_prompt

KEY = TransferKey("t", 0)


class CopyingDataPath:
    """A fake that copies what it is given at once, in plain memory."""

    def __init__(self, transfer: Transfer) -> None:
        self.transfer = transfer
        self.ends: dict[str, str] = {}

    def open_push(self, key: str, peer: str, may_start: Callable[[str], bool] | None = None) -> None:
        pass

    def push(
        self,
        key: str,
        copies: Copies,
        after: Callable[[], None] | None = None,
        ready: Callable[[], bool] | None = None,
    ) -> None:
        assert key not in self.ends
        run(copies, self.transfer.sources, self.transfer.targets, self.transfer.written)

    def drop_queued(self, key: str) -> None:
        raise AssertionError("nothing is preempted here")

    def close_push(self, key: str) -> None:
        self.ends[key] = "closed"

    def stop(self, key: str) -> None:
        self.ends[key] = "stopped"


class PushingRank:
    """A prefill rank with its legs, each of which opens before one of the steps."""

    def __init__(self, transfer: Transfer, rank: int, opens: Callable[[], int]) -> None:
        self.transfer = transfer
        self.shard = transfer.sources[rank].entry.shard
        self.data = CopyingDataPath(transfer)
        self.feed = PushFeed(self.shard, self.data, lambda _: True)
        self.feed.started(KEY, transfer.tokens.start)
        self.legs = [(opens(), self._leg(leg)) for leg in transfer.plan.legs_of_prefill(rank)]

    def _leg(self, leg) -> StartCopies:
        return StartCopies(
            leg=LegKey(KEY, "D", leg.decode_rank, "i"),
            mode="layerwise",
            plan=leg,
            peer=self.transfer.targets[leg.decode_rank].entry,
            local_blocks=(),
            remote_blocks=tuple(self.transfer.to_blocks),
            prompt_tokens=self.transfer.tokens.stop,
            cached_tokens=self.transfer.tokens.start,
        )

    def open(self, step: int) -> None:
        for when, started in self.legs:
            if when == step:
                self.feed.leg_opened(started)

    def step(self, chunk: Chunk) -> None:
        self.feed.step_began([chunk])
        for layer in self.shard.layers:
            self.feed.layer_computed(Layer(layer))
        self.feed.step_ended()


@settings(max_examples=100, deadline=None)
@given(transfers(), st.data())
def test_a_prompt_is_pushed_chunk_by_chunk_between_any_two_layouts(drawn, data):
    prefill, decode, prompt, cached, transfer_id = drawn
    ends = sorted(data.draw(st.sets(st.integers(1, prompt), max_size=4)) | {prompt})
    transfer = Transfer(prefill, decode, prompt, cached, transfer_id)
    push(transfer, prefill, ends, lambda: data.draw(st.integers(0, len(ends))))


@pytest.mark.parametrize("interleave", [4, 2, 1])
@pytest.mark.parametrize("opened_before", [0, 1, 3])
def test_blocks_that_must_stay_whole_go_when_they_are_full_on_all_ranks_that_split_the_tokens(
    interleave, opened_before
):
    prefill, decode = (
        Engine(heads=2, tp=tp, dcp=2, interleave=interleave, sliceable=False, blocks=8) for tp in (8, 4)
    )
    push(Transfer(prefill, decode, prompt=29, cached=8), prefill, [4, 13, 29], lambda: opened_before)


def push(transfer: Transfer, prefill: Engine, ends: list[int], opens: Callable[[], int]) -> None:
    for rank in transfer.sources:
        rank.buffer[:] = NOT_OF_THE_PROMPT  # nothing is computed yet
    ranks = [PushingRank(transfer, rank, opens) for rank in range(len(transfer.sources))]
    for step, (start, end) in enumerate(itertools.pairwise([0, *ends])):
        write_prompt(transfer.sources, transfer.from_blocks, range(start, end))
        blocks = tuple(transfer.from_blocks[: prefill.blocks_for(end)])
        chunk = Chunk(key=KEY, block_ids=blocks, end_token=end, last=end == ends[-1])
        for rank in ranks:
            rank.open(step)
            rank.step(chunk)
    for rank in ranks:
        rank.open(len(ends))
        assert list(rank.data.ends.values()) == ["closed"] * len(rank.legs)
    transfer.check()
