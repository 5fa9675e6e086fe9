"""What a faulty side channel does to messages, on real sockets."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from dfirst.connector.chaos import channel
from dfirst.connector.chaos.channel import FaultyChannel
from dfirst.connector.chaos.orders import FaultDesk, OrderBook
from dfirst.connector.side_channel import SideChannel
from dfirst.protocol.messages import Error, Gone, Message, Sender, TransferKey, Wait

WHOLE_SECONDS = 10.0
OVERTAKEN_SECONDS = 0.3
KEY = TransferKey("t", 0)
SENDER = Sender("P", 0, "i")


def wait(number: int) -> Wait:
    return Wait(sender=SENDER, key=KEY, sequence=number)


GONE = Gone(sender=SENDER, key=KEY, sequence=1, reason="")


@pytest.fixture
def desk(tmp_path: Path) -> FaultDesk:
    return FaultDesk(tmp_path)


@pytest.fixture
def listener() -> Iterator[SideChannel]:
    made = SideChannel("127.0.0.1", range(0))
    yield made
    made.close()


@pytest.fixture
def faulty(desk: FaultDesk, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyChannel]:
    monkeypatch.setattr(channel, "LONGEST_SECONDS", OVERTAKEN_SECONDS)
    made = FaultyChannel(OrderBook(desk.directory, "P", 0), "127.0.0.1", range(0))
    yield made
    made.close()


def say(faulty: FaultyChannel, listener: SideChannel, *messages: Message) -> None:
    for message in messages:
        faulty.send("127.0.0.1", listener.port, message)


def heard(
    faulty: FaultyChannel, listener: SideChannel, count: int, seconds: float = WHOLE_SECONDS
) -> list[Message]:
    """Return what arrives until ``count`` messages are there or the time is over."""
    found: list[Message] = []
    deadline = time.monotonic() + seconds
    while len(found) < count and time.monotonic() < deadline:
        faulty.poller.poll(10)
        list(faulty.receive())
        listener.poller.poll(10)
        found += [message for _, message in listener.receive()]
    return found


def test_without_an_order_all_arrive(faulty: FaultyChannel, listener: SideChannel) -> None:
    say(faulty, listener, wait(1), wait(2))
    assert heard(faulty, listener, 2) == [wait(1), wait(2)]


def test_a_lost_message_does_not_arrive_and_others_do(
    desk: FaultDesk, faulty: FaultyChannel, listener: SideChannel
) -> None:
    desk.order("P", "lost", "WAIT")
    say(faulty, listener, GONE, wait(1), wait(2))
    # On one connection nothing overtakes: the first WAIT would be there by now.
    assert heard(faulty, listener, 2) == [GONE, wait(2)]


def test_a_repeated_message_arrives_three_times_one_of_them_late(
    desk: FaultDesk, faulty: FaultyChannel, listener: SideChannel
) -> None:
    desk.order("P", "repeated", seconds=0.5)
    started = time.monotonic()
    say(faulty, listener, wait(1))
    assert heard(faulty, listener, 2) == [wait(1)] * 2
    assert heard(faulty, listener, 1) == [wait(1)]
    assert time.monotonic() - started >= 0.5


def test_a_delayed_message_wakes_the_poller(
    desk: FaultDesk, faulty: FaultyChannel, listener: SideChannel
) -> None:
    desk.order("P", "delayed", seconds=0.3)
    say(faulty, listener, wait(1))
    started = time.monotonic()
    faulty.poller.poll(60_000)
    assert 0.25 < time.monotonic() - started < 30
    assert heard(faulty, listener, 1) == [wait(1)]


def test_a_reordered_message_comes_after_the_next_one_and_once(
    desk: FaultDesk, faulty: FaultyChannel, listener: SideChannel
) -> None:
    desk.order("P", "reordered", "WAIT")
    say(faulty, listener, wait(1), GONE)
    assert heard(faulty, listener, 2) == [GONE, wait(1)]
    assert heard(faulty, listener, 1, 2 * OVERTAKEN_SECONDS) == []


def test_a_reordered_message_that_nothing_overtakes_arrives_all_the_same(
    desk: FaultDesk, faulty: FaultyChannel, listener: SideChannel
) -> None:
    desk.order("P", "reordered")
    started = time.monotonic()
    say(faulty, listener, wait(1))
    assert heard(faulty, listener, 1) == [wait(1)]
    assert time.monotonic() - started >= OVERTAKEN_SECONDS


def test_a_garbled_message_is_not_understood_and_harms_no_other(
    desk: FaultDesk, faulty: FaultyChannel, listener: SideChannel
) -> None:
    for number in range(20):
        desk.order("P", "garbled", "WAIT")
        say(faulty, listener, wait(number), GONE)
    assert heard(faulty, listener, 20) == [GONE] * 20
    assert listener.counters["undecodable"] == 20


def test_an_answer_can_go_wrong_too(desk: FaultDesk, faulty: FaultyChannel, listener: SideChannel) -> None:
    desk.order("P", "lost", "GONE")
    listener.send("127.0.0.1", faulty.port, Error(reason="a question"))
    deadline = time.monotonic() + WHOLE_SECONDS
    routes: list[bytes] = []
    while not routes and time.monotonic() < deadline:
        faulty.poller.poll(100)
        routes = [route for route, _ in faulty.receive()]
    for message in (GONE, wait(1)):
        faulty.reply(routes[0], message)
    assert heard(faulty, listener, 1) == [wait(1)]
