"""What pushing costs and hides: hand-overs of the forward thread, layers that leave early, idle ranks."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from dfirst.connector.extra_config import ExtraConfig
from dfirst.connector.push_feed import Layer
from dfirst.connector.rank_loop import StepBegan, StepEnded
from dfirst.connector.step import Chunk, StepMetadata
from dfirst.connector.worker_side import WorkerSide
from dfirst.protocol.commands import AcceptPush, FinishPush, StartPush
from dfirst.protocol.effects import RECEIVED
from dfirst.protocol.messages import TransferKey
from dfirst.protocol.timing import Timing

from .ranks import BLOCK_SIZE, LAYERS, Rank, start_rank, wait_until

MODEL_LAYERS = 8
PREFILL_BLOCKS, DECODE_BLOCKS = (3, 4, 9, 11), (20, 2, 3, 7)
PROMPT = len(PREFILL_BLOCKS) * BLOCK_SIZE
KEY = TransferKey("overlap", 0)
MOST_IDLE_SHARE = 0.01
REPOSITORY = Path(__file__).parents[2]


class CountingLoop:
    """Takes the place of the control thread and counts what it is handed."""

    def __init__(self) -> None:
        self.items: list[object] = []

    def post(self, item: object) -> None:
        self.items.append(item)


@pytest.mark.parametrize("requests", [1, 64])
def test_a_layer_costs_the_forward_thread_one_hand_over_however_many_requests_it_has(requests):
    side, loop = WorkerSide(None, None, ExtraConfig()), CountingLoop()
    side._loop = loop
    side._layer_numbers = {f"model.layers.{number}.attn": number for number in range(MODEL_LAYERS)}
    chunks = tuple(
        Chunk(key=TransferKey(f"t-{number}", 0), block_ids=(number,), end_token=4, last=True)
        for number in range(requests)
    )
    side.begin_step(StepMetadata(chunks=chunks))
    for name in side._layer_numbers:
        side.layer_computed(name)
    side.end_step()
    kinds = [type(item) for item in loop.items]
    assert kinds == [StepBegan, *[Layer] * MODEL_LAYERS, StepEnded]


@pytest.fixture(params=["direct", "staged"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Rank, Rank]]:
    staged = request.param == "staged"
    prefill = start_rank("P", Timing(), staged=staged)
    decode = start_rank("D", Timing(), fill=0xEE, staged=staged)
    yield prefill, decode
    prefill.stop()
    decode.stop()


def arrived(prefill: Rank, decode: Rank, layer: int, blocks: int) -> bool:
    here, there = PREFILL_BLOCKS[:blocks], DECODE_BLOCKS[:blocks]
    return bool((decode.cache[layer, list(there)] == prefill.cache[layer, list(here)]).all())


def test_each_layer_of_each_chunk_is_on_the_other_side_before_the_next_is_computed(pair):
    prefill, decode = pair
    decode.step(
        AcceptPush(key=KEY, request_id="d", block_ids=DECODE_BLOCKS, prompt_tokens=PROMPT, cached_tokens=0)
    )
    start = StartPush(key=KEY, request_id="p", remote=decode.remote, prompt_tokens=PROMPT, cached_tokens=0)
    commands: tuple[StartPush, ...] = (start,)
    for blocks in (2, 4):
        end = blocks * BLOCK_SIZE
        chunk = Chunk(key=KEY, block_ids=PREFILL_BLOCKS[:blocks], end_token=end, last=end == PROMPT)
        prefill.loop.post(StepBegan(StepMetadata(commands=commands, chunks=(chunk,))))
        commands = ()
        for layer in range(LAYERS):
            prefill.loop.post(Layer(layer))
            wait_until(lambda layer=layer, blocks=blocks: arrived(prefill, decode, layer, blocks))
            later = decode.cache[layer + 1 :, list(DECODE_BLOCKS[blocks - 2 : blocks])]
            assert (later == 0xEE).all(), "a layer was sent before it was computed"
        prefill.loop.post(StepEnded())
    prefill.step(FinishPush(KEY))
    wait_until(lambda: decode.outcomes() == [RECEIVED])
    assert np.array_equal(decode.cache[:, list(DECODE_BLOCKS)], prefill.cache[:, list(PREFILL_BLOCKS)])


def test_idle_ranks_take_no_cpu() -> None:
    command = [sys.executable, "-m", "tests.connector.idle_pairs"]
    ran = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert float(ran.stdout.splitlines()[-1]) < MOST_IDLE_SHARE
