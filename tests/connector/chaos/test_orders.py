"""Orders reach the ranks that they are for, once, and what was carried out is told."""

import random
from pathlib import Path

import msgspec
import pytest
from dfirst.connector.chaos.orders import COPY_FAULTS, MESSAGE_FAULTS, FaultDesk, OrderBook, garble
from dfirst.connector.side_channel import HEADER
from dfirst.protocol.messages import Message, Sender, TransferKey, Wait


def test_an_order_is_carried_out_once_by_what_it_fits(tmp_path: Path) -> None:
    desk = FaultDesk(tmp_path)
    book = OrderBook(tmp_path, "P", 0)
    order = desk.order("P", "lost", "DONE")
    assert book.take(MESSAGE_FAULTS, "QUERY") is None
    assert book.take(COPY_FAULTS, "DONE") is None
    taken = book.take(MESSAGE_FAULTS, "DONE")
    assert taken is not None
    assert taken.number == order.number
    assert book.take(MESSAGE_FAULTS, "DONE") is None
    assert [(one.number, one.engine, one.rank, one.of) for one in desk.injected()] == [
        (order.number, "P", 0, "DONE")
    ]


def test_an_order_is_for_one_engine_and_all_its_ranks(tmp_path: Path) -> None:
    desk = FaultDesk(tmp_path)
    books = [OrderBook(tmp_path, engine, 0) for engine in ("P", "P_dp1", "D", "P2")]
    desk.order("P", "garbled")
    assert [book.take(MESSAGE_FAULTS, "ACK") is not None for book in books] == [True, True, False, False]


def test_a_restarted_worker_does_not_carry_out_old_orders(tmp_path: Path) -> None:
    desk = FaultDesk(tmp_path)
    desk.order("P", "lost")
    book = OrderBook(tmp_path, "P", 0)
    assert book.take(MESSAGE_FAULTS, "DONE") is None
    desk.order("P", "lost")
    assert book.take(MESSAGE_FAULTS, "DONE") is not None


def test_an_order_for_a_time_strikes_all_until_it_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("dfirst.connector.chaos.orders.time.time", lambda: now[0])
    desk = FaultDesk(tmp_path)
    book = OrderBook(tmp_path, "D", 0)
    desk.order("D", "lost", for_seconds=5.0)
    for now[0] in (1001.0, 1004.9):
        assert book.take(MESSAGE_FAULTS, "QUERY") is not None
    now[0] = 1005.0
    assert book.take(MESSAGE_FAULTS, "QUERY") is None


def test_half_an_order_waits_for_its_end(tmp_path: Path) -> None:
    desk = FaultDesk(tmp_path)
    book = OrderBook(tmp_path, "D", 0)
    whole = msgspec.json.encode(desk.order("other", "lost"))
    line = whole.replace(b'"other"', b'"D"') + b"\n"
    with (tmp_path / "orders.jsonl").open("ab", buffering=0) as orders:
        orders.write(line[:10])
        assert book.take(MESSAGE_FAULTS, "QUERY") is None
        orders.write(line[10:])
    assert book.take(MESSAGE_FAULTS, "QUERY") is not None


def test_what_is_garbled_is_never_a_message() -> None:
    message = Wait(sender=Sender("P", 0, "i"), key=TransferKey("t", 0), sequence=7)
    body = msgspec.msgpack.encode(message)
    decoder = msgspec.msgpack.Decoder(Message)
    seen = set()
    for seed in range(500):
        frames = garble((HEADER, body), random.Random(seed))
        seen.add(len(frames))
        if len(frames) == 2 and frames[0] == HEADER:
            with pytest.raises((msgspec.MsgspecError, UnicodeDecodeError)):
                decoder.decode(frames[1])
    assert seen == {1, 2, 3}
