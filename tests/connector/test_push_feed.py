"""What a pushed prompt hands to the data path: each layer of each block once, or the leg fails."""

from collections.abc import Callable

import pytest
from dfirst.connector.push_feed import Layer, PushFeed, leg_name
from dfirst.connector.step import Chunk
from dfirst.protocol.commands import LegKey
from dfirst.protocol.copies import Copies
from dfirst.protocol.effects import StartCopies
from dfirst.protocol.messages import TransferKey
from dfirst.protocol.plan import Leg
from dfirst.protocol.shards import RankEntry, Region, Shard

BLOCK_SIZE = 4
BLOCK_BYTES = 64
LAYERS = (0, 1)
KEY = TransferKey("t", 0)
OTHER = TransferKey("u", 0)
PROMPT = 14
BLOCKS = (3, 4, 9, 11)
LENT = (20, 21, 22, 23)


class FakeDataPath:
    """Notes what a leg was given: its pieces as {(layer, own block): lent block}, and how it ended."""

    def __init__(self) -> None:
        self.given: dict[str, dict[tuple[int, int], int]] = {}
        self.ends: dict[str, str] = {}
        self.dropped: list[str] = []

    def open_push(self, key: str, peer: str, may_start: Callable[[str], bool] | None = None) -> None:
        self.given[key] = {}

    def push(
        self,
        key: str,
        copies: Copies,
        after: Callable[[], None] | None = None,
        ready: Callable[[], bool] | None = None,
    ) -> None:
        if key in self.ends:
            assert self.ends[key] == "stopped", "a piece came after the push was closed"
            return
        assert key in self.given
        for source, target, length in zip(
            copies.source_addresses.tolist(),
            copies.target_addresses.tolist(),
            copies.lengths.tolist(),
            strict=True,
        ):
            for offset in range(0, length, BLOCK_BYTES):
                layer, own = divmod((source + offset) // BLOCK_BYTES, 100)
                assert (layer, own) not in self.given[key], "a block was sent twice"
                self.given[key][layer, own] = (target + offset) // BLOCK_BYTES - 1000 - 100 * layer

    def drop_queued(self, key: str) -> None:
        self.dropped.append(key)
        self.given[key].clear()

    def close_push(self, key: str) -> None:
        self.ends.setdefault(key, "closed")

    def stop(self, key: str) -> None:
        self.ends.setdefault(key, "stopped")


def shard(base_block: int, layers: tuple[int, ...] = LAYERS) -> Shard:
    """A rank's caches; the block's place in memory tells layer and block number."""
    regions = tuple(
        Region(layer, "kv", (base_block + 100 * layer) * BLOCK_BYTES, 100, BLOCK_BYTES, BLOCK_BYTES, 16, 16)
        for layer in layers
    )
    return Shard(total_kv_heads=1, first_kv_head=0, kv_head_count=1, block_size=BLOCK_SIZE, regions=regions)


def leg(
    rank: int = 0,
    key: TransferKey = KEY,
    lent: tuple[int, ...] = LENT,
    layers: tuple[int, ...] = LAYERS,
    cached_tokens: int = 0,
) -> StartCopies:
    entry = RankEntry(
        rank=rank, host="h", port=1, incarnation="i", data_address="h:2", shard=shard(1000, layers)
    )
    return StartCopies(
        leg=LegKey(key, "D", rank, "i"),
        mode="layerwise",
        plan=Leg(prefill_rank=0, decode_rank=rank, layers=layers, first_kv_head=0, head_count=1),
        peer=entry,
        local_blocks=(),
        remote_blocks=lent,
        prompt_tokens=PROMPT,
        cached_tokens=cached_tokens,
    )


def chunk(end_token: int, key: TransferKey = KEY, blocks: tuple[int, ...] = BLOCKS) -> Chunk:
    return Chunk(
        key=key,
        block_ids=blocks[: -(-end_token // BLOCK_SIZE)],
        end_token=end_token,
        last=end_token == PROMPT,
    )


NAME = leg_name(leg().leg)
WHOLE = {(layer, own): lent for layer in LAYERS for own, lent in zip(BLOCKS, LENT, strict=True)}


@pytest.fixture
def data() -> FakeDataPath:
    return FakeDataPath()


@pytest.fixture
def feed(data: FakeDataPath) -> PushFeed:
    made = PushFeed(shard(0), data, lambda _: True)
    made.started(KEY, 0)
    return made


def step(feed: PushFeed, *chunks: Chunk, layers: tuple[int, ...] = LAYERS) -> None:
    """One forward pass."""
    feed.step_began(chunks)
    for layer in layers:
        feed.layer_computed(Layer(layer))
    feed.step_ended()


def test_a_prompt_goes_out_in_the_chunks_in_which_it_is_computed(feed: PushFeed, data: FakeDataPath) -> None:
    feed.leg_opened(leg())
    step(feed, chunk(6))
    assert set(data.given[NAME]) == {(0, 3), (1, 3)}, "a block that is not full yet waits"
    step(feed, chunk(12))
    assert set(data.given[NAME]) == {(layer, own) for layer in LAYERS for own in (3, 4, 9)}
    assert data.ends == {}
    step(feed, chunk(PROMPT))
    assert data.given[NAME] == WHOLE
    assert data.ends == {NAME: "closed"}


@pytest.mark.parametrize("opened_after", [0, 1, 2, 3])
def test_a_leg_gets_everything_whenever_its_blocks_are_lent(
    feed: PushFeed, data: FakeDataPath, opened_after: int
) -> None:
    for number, end_token in enumerate((6, 12, PROMPT)):
        if number == opened_after:
            feed.leg_opened(leg())
        step(feed, chunk(end_token))
    if opened_after == 3:
        feed.leg_opened(leg())
    assert data.given[NAME] == WHOLE
    assert data.ends == {NAME: "closed"}


def test_a_leg_that_opens_between_two_layers_gets_both(feed: PushFeed, data: FakeDataPath) -> None:
    feed.step_began([chunk(PROMPT)])
    feed.layer_computed(Layer(0))
    feed.leg_opened(leg())
    feed.layer_computed(Layer(1))
    feed.step_ended()
    assert data.given[NAME] == WHOLE


def test_what_the_decode_side_has_is_left_out(data: FakeDataPath) -> None:
    feed = PushFeed(shard(0), data, lambda _: True)
    feed.started(KEY, 8)
    feed.leg_opened(leg(cached_tokens=8))
    step(feed, chunk(6))
    step(feed, chunk(PROMPT))
    assert set(data.given[NAME]) == {(layer, own) for layer in LAYERS for own in (9, 11)}
    assert data.ends == {NAME: "closed"}


def test_each_leg_gets_its_own_layers(feed: PushFeed, data: FakeDataPath) -> None:
    first, second = leg(0, layers=(0,)), leg(1, layers=(1,))
    feed.leg_opened(first)
    step(feed, chunk(PROMPT))
    feed.leg_opened(second)
    assert set(data.given[leg_name(first.leg)]) == {(0, own) for own in BLOCKS}
    assert set(data.given[leg_name(second.leg)]) == {(1, own) for own in BLOCKS}


def test_two_prompts_in_one_step_do_not_mix(feed: PushFeed, data: FakeDataPath) -> None:
    feed.started(OTHER, 0)
    other = leg(key=OTHER, lent=(40, 41, 42, 43))
    feed.leg_opened(leg())
    feed.leg_opened(other)
    step(feed, chunk(PROMPT), chunk(PROMPT, OTHER, (50, 51, 52, 53)))
    assert data.given[NAME] == WHOLE
    assert data.given[leg_name(other.leg)][0, 52] == 42


def test_a_preempted_prompt_is_sent_again_from_its_new_blocks(feed: PushFeed, data: FakeDataPath) -> None:
    feed.leg_opened(leg())
    step(feed, chunk(8, blocks=(60, 61, 62, 63)))
    feed.preempted([KEY])
    assert data.dropped == [NAME]
    step(feed, chunk(12))
    step(feed, chunk(PROMPT))
    assert data.given[NAME] == WHOLE
    assert data.ends == {NAME: "closed"}


def test_a_prompt_preempted_before_its_leg_opens_leaves_nothing_of_its_old_blocks(
    feed: PushFeed, data: FakeDataPath
) -> None:
    step(feed, chunk(8, blocks=(60, 61, 62, 63)))
    feed.preempted([KEY])
    step(feed, chunk(PROMPT))
    feed.leg_opened(leg())
    assert data.given[NAME] == WHOLE


def test_a_leg_that_opens_after_a_whole_prompt_was_preempted_waits_for_the_new_one(
    feed: PushFeed, data: FakeDataPath
) -> None:
    step(feed, chunk(PROMPT, blocks=(60, 61, 62, 63)))
    feed.preempted([KEY])
    feed.leg_opened(leg())
    assert data.ends == {}, "closed now, it would count as whole without a byte"
    step(feed, chunk(PROMPT))
    assert data.given[NAME] == WHOLE
    assert data.ends == {NAME: "closed"}


def test_legs_that_are_closed_get_nothing_of_a_prompt_that_is_computed_again(
    feed: PushFeed, data: FakeDataPath
) -> None:
    feed.leg_opened(leg())
    step(feed, chunk(PROMPT))
    feed.preempted([KEY])
    step(feed, chunk(PROMPT))
    assert data.dropped == [NAME], "the data path fails it if something was still to be sent"


def test_a_step_that_missed_a_layer_ends_no_leg_well(feed: PushFeed, data: FakeDataPath) -> None:
    feed.leg_opened(leg())
    step(feed, chunk(8), layers=(0,))
    assert data.ends == {NAME: "stopped"}
    step(feed, chunk(PROMPT))
    with pytest.raises(ValueError, match=r"layers \[1\]"):
        feed.leg_opened(leg(1))


def test_a_chunk_with_too_few_blocks_ends_no_leg_well(feed: PushFeed, data: FakeDataPath) -> None:
    feed.leg_opened(leg())
    step(feed, Chunk(key=KEY, block_ids=BLOCKS[:2], end_token=PROMPT, last=True))
    assert data.ends == {NAME: "stopped"}


def test_a_leg_with_fewer_blocks_than_the_prompt_is_refused_before_it_opens(
    feed: PushFeed, data: FakeDataPath
) -> None:
    with pytest.raises(ValueError, match="3 blocks were lent where the prompt has 4"):
        feed.leg_opened(leg(lent=LENT[:3]))
    step(feed, chunk(PROMPT))
    assert data.given == {}


def test_a_block_that_does_not_exist_stops_its_leg_and_no_other(feed: PushFeed, data: FakeDataPath) -> None:
    wrong = leg(1, lent=(20, 21, 22, 100))
    feed.leg_opened(wrong)
    feed.leg_opened(leg())
    step(feed, chunk(12))
    step(feed, chunk(PROMPT))
    assert data.ends == {leg_name(wrong.leg): "stopped", NAME: "closed"}
    assert data.given[NAME] == WHOLE


def test_a_leg_of_a_prompt_that_is_over_is_refused(feed: PushFeed, data: FakeDataPath) -> None:
    feed.ended(KEY)
    with pytest.raises(ValueError, match="no such prompt"):
        feed.leg_opened(leg())
    step(feed, chunk(PROMPT))
    assert data.given == {}
    assert feed._feeds == {}, "nothing of it is kept"


def test_a_chunk_behind_the_prompt_is_nothing_new(feed: PushFeed, data: FakeDataPath) -> None:
    feed.leg_opened(leg())
    step(feed, chunk(PROMPT))
    step(feed, chunk(PROMPT))
    assert data.given[NAME] == WHOLE


def test_a_preemption_of_a_prompt_that_is_not_pushed_is_nothing(feed: PushFeed, data: FakeDataPath) -> None:
    feed.preempted([OTHER])
    assert data.dropped == []
