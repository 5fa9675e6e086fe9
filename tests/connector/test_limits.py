"""What a peer says is checked before it is used: outside the limits it is answered and changes nothing."""

import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq
from dfirst.connector.extra_config import decode_extra_config
from dfirst.connector.side_channel import HEADER, LONGEST_REASON, SideChannel
from dfirst.protocol.messages import Error, Gone, Message, Sender, TransferKey
from dfirst.protocol.specification import load_wire

HOST = "127.0.0.1"
SENDER = {"engine_id": "P", "rank": 0, "incarnation": "p"}
KEY = {"transfer_id": "t", "attempt": 0}
REGION = [0, "kv", 4096, 8, 64, 32, 16, 16]
SHARD = {"total_kv_heads": 2, "first_kv_head": 0, "kv_head_count": 2, "block_size": 4, "regions": [REGION]}
ENTRY = {"rank": 0, "host": "h", "port": 1, "incarnation": "i", "data_address": "h:2", "shard": SHARD}
DIRECTORY = {"engine_id": "P", "model": "m", "layout": "one rank", "ranks": [ENTRY]}
QUERY = {
    "type": "QUERY",
    "sender": SENDER,
    "key": KEY,
    "sequence": 1,
    "target_incarnation": "d",
    "mode": "blockwise",
    "layout_digest": "x",
    "prompt_tokens": 8,
    "cached_tokens": 0,
    "tail_seconds": 0.0,
}
RENEWED = {
    "type": "RENEWED",
    "sender": SENDER,
    "sequence": 1,
    "lease_seconds": 5.0,
    "extended": [KEY],
    "gone": [],
}
LAYOUT = {"type": "LAYOUT", "sender": SENDER, "digest": "x", "directory": DIRECTORY}
CANCEL = {
    "type": "CANCEL",
    "sender": SENDER,
    "key": KEY,
    "target_incarnation": "d",
    "target": "owner",
    "mode": "blockwise",
    "reason": "r",
}


@pytest.fixture
def channel() -> Iterator[SideChannel]:
    channel = SideChannel(HOST, range(0))
    yield channel
    channel.close()


@pytest.fixture
def stranger(channel: SideChannel) -> Iterator["zmq.Socket[bytes]"]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(f"tcp://{HOST}:{channel.port}")
        yield dealer


def heard(channel: SideChannel, dealer: "zmq.Socket[bytes]", message: dict[str, Any]) -> list[Message]:
    dealer.send_multipart([HEADER, msgspec.msgpack.encode(message)])
    for _ in range(100):
        channel.poller.poll(100)
        found = [one for _, one in channel.receive()]
        if found or channel.counters["undecodable"]:
            return found
    raise AssertionError("nothing came")


@pytest.mark.parametrize("message", [QUERY, RENEWED, LAYOUT, CANCEL])
def test_what_is_within_the_limits_is_heard(
    channel: SideChannel, stranger: "zmq.Socket[bytes]", message: dict[str, Any]
) -> None:
    assert len(heard(channel, stranger, message)) == 1


def changed(message: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    """Return a copy of a message with one value changed."""
    copy = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
    *way, last = [int(step) if step.isdigit() else step for step in path.split(".")]
    place: Any = copy
    for step in way:
        place = place[step]
    place[last] = value
    return copy


@pytest.mark.parametrize(
    ("message", "path", "value"),
    [
        (QUERY, "sequence", -1),
        (QUERY, "sequence", 1 << 63),
        (QUERY, "sequence", 1.5),
        (QUERY, "prompt_tokens", -8),
        (QUERY, "cached_tokens", -1),
        (QUERY, "tail_seconds", float("nan")),
        (QUERY, "tail_seconds", float("inf")),
        (QUERY, "tail_seconds", -1.0),
        (QUERY, "tail_seconds", 1e9),
        (QUERY, "key.transfer_id", "x" * 257),
        (QUERY, "key.attempt", -1),
        (QUERY, "sender.engine_id", "x" * 257),
        (QUERY, "sender.rank", -2),
        (QUERY, "sender.rank", 1 << 40),
        (QUERY, "layout_digest", "x" * 1000),
        (RENEWED, "lease_seconds", float("nan")),
        (RENEWED, "lease_seconds", float("inf")),
        (RENEWED, "lease_seconds", -0.1),
        (RENEWED, "extended", [KEY] * 1_048_577),
        (CANCEL, "reason", "x" * 8193),
        (LAYOUT, "directory.ranks", [ENTRY] * 16_385),
        (LAYOUT, "directory.ranks.0.port", 0),
        (LAYOUT, "directory.ranks.0.port", 65536),
        (LAYOUT, "directory.ranks.0.host", "h" * 257),
        (LAYOUT, "directory.ranks.0.shard.block_size", 0),
        (LAYOUT, "directory.ranks.0.shard.kv_head_count", -1),
        (LAYOUT, "directory.ranks.0.shard.total_kv_heads", 1 << 40),
        (LAYOUT, "directory.ranks.0.shard.regions.0.2", -4096),
        (LAYOUT, "directory.ranks.0.shard.regions.0.3", 1 << 63),
    ],
)
def test_what_is_outside_the_limits_is_answered_and_not_heard(
    channel: SideChannel, stranger: "zmq.Socket[bytes]", message: dict[str, Any], path: str, value: object
) -> None:
    assert heard(channel, stranger, changed(message, path, value)) == []
    _, answer = stranger.recv_multipart()
    reason = msgspec.msgpack.decode(answer, type=Error).reason
    place = re.sub(r"\.(\d+)", r"[\1]", path)
    assert reason.endswith(f" - at `$.{place}`")


def test_no_field_is_without_a_limit() -> None:
    wire = load_wire()
    limited = {limit.type for limit in wire.limits if not limit.fields} | {one.name for one in wire.records}
    for group in (*wire.records, *wire.messages):
        for field in group.fields:
            plain = field.type.replace("list[", "").replace("]", "")
            assert plain in limited | {"Directory", "bool"}, f"{group.name}.{field.name}"


def test_a_reason_that_quotes_too_many_reasons_is_cut_and_read(channel: SideChannel) -> None:
    far = SideChannel(HOST, range(0))
    long = Gone(sender=Sender("P", 0, "p"), key=TransferKey("t", 0), sequence=1, reason="x" * 100_000)
    far.send(HOST, channel.port, long)
    while not (found := list(channel.receive())):
        assert channel.poller.poll(10_000)
    [(_, message)] = found
    assert isinstance(message, Gone)
    assert len(message.reason) == LONGEST_REASON
    far.close()


def test_a_timer_that_no_message_may_say_stops_the_start() -> None:
    with pytest.raises(ValueError, match=r"lease_seconds is 1e\+06 and must be at most 604800"):
        decode_extra_config({"lease_seconds": 1_000_000})
