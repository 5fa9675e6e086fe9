"""The side channel with real sockets: what can be read arrives, what cannot is counted and answered, and
nothing holds anybody up.
"""

import socket
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
import zmq
from dfirst.connector import side_channel
from dfirst.connector.side_channel import HEADER, SideChannel
from dfirst.protocol.messages import (
    MAX_MESSAGE_BYTES,
    Ack,
    Error,
    LayoutQuery,
    Message,
    Sender,
    TransferKey,
    Wait,
)

HOST = "127.0.0.1"
ANY = range(0)
ACK = Ack(sender=Sender("D", 0, "d"), key=TransferKey("t", 0), sequence=0)
WAIT = Wait(sender=Sender("P", 0, "p"), key=TransferKey("t", 0), sequence=1)
QUICK_SECONDS = 2.0
"""On a busy machine; each of these calls takes some microseconds."""


@pytest.fixture
def near() -> Iterator[SideChannel]:
    channel = SideChannel(HOST, ANY)
    yield channel
    channel.close()


@pytest.fixture
def far() -> Iterator[SideChannel]:
    channel = SideChannel(HOST, ANY)
    yield channel
    channel.close()


@pytest.fixture
def stranger(near: SideChannel) -> Iterator["zmq.Socket[bytes]"]:
    """A socket that sends to ``near`` what no rank would."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(f"tcp://{HOST}:{near.port}")
        yield dealer


def collect(channel: SideChannel, count: int, seconds: float = 10.0) -> list[tuple[bytes, Message]]:
    """Wait for so many messages."""
    found: list[tuple[bytes, Message]] = []
    deadline = time.monotonic() + seconds
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} messages came"
        channel.poller.poll(100)
        found += channel.receive()
    return found


def pump(until: Callable[[], bool], *channels: SideChannel) -> list[Message]:
    """Let the channels receive until something is so; return what they heard."""
    heard: list[Message] = []
    deadline = time.monotonic() + 10.0
    while not until():
        assert time.monotonic() < deadline, "it did not happen in time"
        for channel in channels:
            channel.poller.poll(5)
            heard += [message for _, message in channel.receive()]
    return heard


def error_of(stranger: "zmq.Socket[bytes]", near: SideChannel) -> str:
    """Return what ``near`` answers to a message that it does not understand."""
    assert pump(lambda: bool(stranger.poll(0)), near) == []
    header, answer = stranger.recv_multipart()
    assert header == HEADER
    return msgspec.msgpack.decode(answer, type=Error).reason


def test_a_message_arrives_and_its_answer_comes_back(near: SideChannel, far: SideChannel) -> None:
    near.send(HOST, far.port, ACK)
    [(route, message)] = collect(far, 1)
    assert message == ACK
    far.reply(route, WAIT)
    [(route, answer)] = collect(near, 1)
    assert answer == WAIT
    near.reply(route, ACK)
    assert collect(far, 1)[0][1] == ACK, "a route also leads back to the one that was asked"


def test_both_sides_speak_first(near: SideChannel, far: SideChannel) -> None:
    near.send(HOST, far.port, ACK)
    far.send(HOST, near.port, WAIT)
    assert collect(far, 1)[0][1] == ACK
    assert collect(near, 1)[0][1] == WAIT


def test_messages_of_one_peer_keep_their_order(near: SideChannel, far: SideChannel) -> None:
    for number in range(200):
        near.send(HOST, far.port, msgspec.structs.replace(WAIT, sequence=number))
    assert [message.sequence for _, message in collect(far, 200)] == list(range(200))


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        ([b"what"], "1 frames"),
        ([HEADER, b"", b""], "3 frames"),
        ([b"dfirst/999", msgspec.msgpack.encode(ACK)], "dfirst/999"),
        ([b"http/1.1", b""], "this side speaks dfirst/1"),
        ([HEADER, b""], "truncated"),
        ([HEADER, b"\xc1 no msgpack"], "malformed"),
        ([HEADER, msgspec.msgpack.encode({"type": "UNHEARD_OF"})], "UNHEARD_OF"),
        ([HEADER, msgspec.msgpack.encode({"type": "ACK", "sender": 5})], "Expected `object`"),
        ([HEADER, b"\x91" * 100_000], "recursion|truncated|expected|Expected"),
    ],
)
def test_what_cannot_be_read_is_counted_and_answered(
    near: SideChannel, stranger: "zmq.Socket[bytes]", frames: list[bytes], words: str
) -> None:
    stranger.send_multipart(frames)
    reason = error_of(stranger, near)
    assert any(word in reason for word in words.split("|")), reason
    assert near.counters["undecodable"] == 1
    stranger.send_multipart([HEADER, msgspec.msgpack.encode(ACK)])
    assert collect(near, 1)[0][1] == ACK, "the listener goes on"


def test_a_frame_above_the_limit_ends_its_connection_alone(
    near: SideChannel, far: SideChannel, stranger: "zmq.Socket[bytes]"
) -> None:
    stranger.send_multipart([HEADER, bytes(MAX_MESSAGE_BYTES + 1)])
    far.send(HOST, near.port, ACK)
    assert collect(near, 1)[0][1] == ACK
    assert near.counters["undecodable"] == 0, "it was never taken in"


def test_a_connection_that_speaks_no_zmq_is_closed_alone(near: SideChannel, far: SideChannel) -> None:
    with socket.create_connection((HOST, near.port)) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
        far.send(HOST, near.port, ACK)
        assert collect(near, 1)[0][1] == ACK


def test_an_error_is_never_answered_with_an_error(
    near: SideChannel, far: SideChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_channel, "HEADER", b"dfirst/2")
    near.send(HOST, far.port, ACK)
    monkeypatch.setattr(side_channel, "HEADER", HEADER)
    pump(lambda: far.counters["undecodable"] == 1, far)
    heard = collect(near, 1)
    assert isinstance(heard[0][1], Error)
    time.sleep(0.1)
    assert list(far.receive()) == []
    assert list(near.receive()) == []
    assert far.counters["undecodable"] == 1


def test_garbage_that_comes_as_an_answer_is_not_answered(near: SideChannel) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as strange_rank:
        port = strange_rank.bind_to_random_port(f"tcp://{HOST}")
        near.send(HOST, port, ACK)
        name, *_ = strange_rank.recv_multipart()
        strange_rank.send_multipart([name, b"garbage"])
        pump(lambda: near.counters["undecodable"] == 1, near)
        assert not strange_rank.poll(100)


def test_the_first_free_port_of_a_range_is_taken() -> None:
    first = free_ports(3)
    ports = range(first, first + 3)
    channels = [SideChannel(HOST, ports) for _ in ports]
    assert [channel.port for channel in channels] == list(ports)
    with pytest.raises(ValueError, match=f"all ports from {first} to {first + 2} are in use"):
        SideChannel(HOST, ports)
    for channel in channels:
        channel.close()
    again = SideChannel(HOST, ports)
    assert again.port == first, "a closed channel leaves its port"
    again.close()


@pytest.mark.parametrize("ports", [ANY, range(20000, 20001)])
def test_an_address_of_another_host_is_refused_by_name(ports: range) -> None:
    with pytest.raises(ValueError, match=r"the side channel cannot bind to .*port.*192\.0\.2\.1"):
        SideChannel("192.0.2.1", ports)


@pytest.mark.parametrize("host", ["no such host!", "é", "-"])
def test_an_address_that_is_none_is_counted(near: SideChannel, host: str) -> None:
    near.send(host, 5, ACK)
    near.reply(b"D" + f"{host}:5".encode(), ACK)
    assert near.counters["not_sent"] == 2


@pytest.mark.parametrize("port", [0, 99999])
def test_a_port_that_is_none_harms_nobody(near: SideChannel, far: SideChannel, port: int) -> None:
    near.send(HOST, port, ACK)
    near.send(HOST, far.port, WAIT)
    assert collect(far, 1)[0][1] == WAIT


def test_a_peer_that_has_vanished_is_counted_and_not_waited_for(near: SideChannel) -> None:
    gone = SideChannel(HOST, ANY)
    gone.send(HOST, near.port, ACK)
    [(route, _)] = collect(near, 1)
    gone.close()
    started = time.monotonic()
    pump(lambda: near.reply(route, WAIT) or near.counters["not_sent"] > 0, near)
    near.send(HOST, gone.port, WAIT)
    assert time.monotonic() - started < 10.0
    assert list(near.receive()) == []


def test_a_peer_that_takes_nothing_holds_up_nobody(
    near: SideChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_channel, "QUEUE_MESSAGES", 50)
    with socket.create_server((HOST, 0)) as deaf:
        started = time.monotonic()
        for _ in range(200):
            near.send(HOST, deaf.getsockname()[1], ACK)
        assert time.monotonic() - started < QUICK_SECONDS
    assert near.counters["not_sent"] == 150, "what does not fit into the queue is dropped"


def test_a_flood_is_taken_in_turns(near: SideChannel, far: SideChannel) -> None:
    for _ in range(10_000):
        far.send(HOST, near.port, ACK)
    assert far.counters["not_sent"] == 0
    parts: list[int] = []
    deadline = time.monotonic() + 20.0
    while sum(parts) < 10_000 and time.monotonic() < deadline:
        near.poller.poll(100)
        parts.append(len(list(near.receive())))
    assert sum(parts) == 10_000
    assert max(parts) <= side_channel.RECEIVE_BATCH


def test_a_flood_of_garbage_is_logged_once(
    near: SideChannel, stranger: "zmq.Socket[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[tuple] = []
    monkeypatch.setattr(side_channel.logger, "warning", lambda *line: lines.append(line))
    for _ in range(500):
        stranger.send(b"garbage")
    pump(lambda: near.counters["undecodable"] == 500, near)
    assert len(lines) == 1


def test_only_so_many_peers_are_kept(
    near: SideChannel, far: SideChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_channel, "MAX_PEERS", 2)
    other = SideChannel(HOST, ANY)
    for channel in (far, other):
        near.send(HOST, channel.port, ACK)
        assert collect(channel, 1)[0][1] == ACK
    third = SideChannel(HOST, ANY)
    near.send(HOST, third.port, ACK)
    assert collect(third, 1)[0][1] == ACK
    near.send(HOST, far.port, WAIT)
    assert collect(far, 1)[0][1] == WAIT, "the one that was given up is connected anew"
    other.close()
    third.close()


def test_ipv6_addresses_work_where_the_host_has_them() -> None:
    host = "::1" if has_ipv6() else HOST
    one, other = SideChannel(host, ANY), SideChannel(host, ANY)
    one.send(host, other.port, LayoutQuery(sender=Sender("P", 0, "p"), digest="d"))
    [(route, message)] = collect(other, 1)
    assert isinstance(message, LayoutQuery)
    other.reply(route, ACK)
    assert collect(one, 1)[0][1] == ACK
    one.close()
    other.close()


def test_last_words_are_sent_and_the_end_is_quick(near: SideChannel) -> None:
    leaving = SideChannel(HOST, ANY)
    leaving.send(HOST, near.port, ACK)
    leaving.send("192.0.2.1", 9, ACK)
    started = time.monotonic()
    leaving.close()
    assert time.monotonic() - started < QUICK_SECONDS
    assert collect(near, 1)[0][1] == ACK


def free_ports(count: int) -> int:
    """Return the first of so many neighbouring ports that are free now."""
    for first in range(23000, 30000, count):
        try:
            for port in range(first, first + count):
                with socket.create_server((HOST, port)):
                    pass
        except OSError:
            continue
        return first
    raise AssertionError("no ports are free")


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False
