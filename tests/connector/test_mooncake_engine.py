"""What the engine refuses, what it says, and to whom it listens."""

import builtins
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import dfirst.connector.mooncake_engine as mooncake_engine
import numpy as np
import pytest
from dfirst.connector.mooncake_engine import (
    MAX_DESCRIPTORS,
    MAX_TCP_RUN_BYTES,
    MooncakeEngine,
    default_protocol,
)


@pytest.fixture
def engine():
    started = MooncakeEngine("127.0.0.1", "tcp", copy_timeout_seconds=7, quarantine_seconds=0.1)
    yield started
    started.close()


def test_it_listens_on_the_configured_address_and_no_other(engine):
    host, port = engine.data_address.split(":")
    assert host == "127.0.0.1"
    socket.create_connection((host, int(port)), timeout=2).close()
    with pytest.raises(OSError, match="timed out"):
        socket.create_connection(("127.0.0.2", int(port)), timeout=0.5)


def test_engine_objects_may_be_made_for_many_peers_at_once(engine):
    with ThreadPoolExecutor(8) as pool:
        movers = list(pool.map(lambda _: engine._take_spare(), range(16)))
    ports = [mover.engine.get_rpc_port() for mover in movers]
    assert len(set(ports)) == len(ports)
    for port in ports:
        with pytest.raises(OSError, match="timed out"):
            socket.create_connection(("127.0.0.2", port), timeout=0.05)


def test_writes_arrive_and_reads_return_them(engine):
    memory, mine, back = (np.full(4096, fill, dtype=np.uint8) for fill in (0, 9, 0))
    engine.register([(memory.ctypes.data, 4096)])
    address = engine.data_address
    assert engine.connect(address)
    assert engine.write(address, [mine.ctypes.data], [memory.ctypes.data], [4096])
    assert engine.read(address, [back.ctypes.data], [memory.ctypes.data], [4096])
    assert (back == 9).all()


def test_long_runs_are_cut_and_arrive_whole(engine, monkeypatch):
    lengths = [1, 3 * MAX_TCP_RUN_BYTES + 5, MAX_TCP_RUN_BYTES]
    size = sum(lengths)
    memory = np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8)
    back = np.zeros(size, dtype=np.uint8)
    engine.register([(memory.ctypes.data, size)])
    assert engine.connect(engine.data_address)
    mover = engine._mover(engine.data_address)
    submitted = []

    class Spy:
        def batch_transfer_async_read(self, peer, *columns):
            submitted.append(columns)
            return mover_engine.batch_transfer_async_read(peer, *columns)

        def get_batch_transfer_status(self, numbers):
            return mover_engine.get_batch_transfer_status(numbers)

    mover_engine = mover.engine
    monkeypatch.setattr(mover, "engine", Spy())
    starts = np.cumsum([0, *lengths[:-1]])
    local, remote = (starts + back.ctypes.data).tolist(), (starts + memory.ctypes.data).tolist()
    assert engine.read(engine.data_address, local, remote, lengths)
    assert (back == memory).all()
    [(_, _, cut)] = submitted
    assert (max(cut), sum(cut), len(cut)) == (MAX_TCP_RUN_BYTES, size, 6)


def test_batches_that_were_begun_behind_one_that_failed_fail_with_it_and_the_next_ones_do_not(engine):
    memory, mine, unregistered = (np.full(64, fill, dtype=np.uint8) for fill in (0, 9, 0))
    engine.register([(memory.ctypes.data, 64)])
    peer, source = engine.data_address, [mine.ctypes.data]
    bad = engine.begin("write", peer, source, [unregistered.ctypes.data], [64])
    good = engine.begin("write", peer, source, [memory.ctypes.data], [64])
    assert not engine.finish(bad)
    assert not engine.finish(good)
    assert engine.write(peer, source, [memory.ctypes.data], [64])
    assert (memory == 9).all()


class FakeRdma:
    """An engine of another transport than TCP, which this host lacks."""

    def __init__(self) -> None:
        self.ran: list[list[int]] = []

    def batch_transfer_sync_write(self, _peer: str, _local: list, _remote: list, lengths: list) -> int:
        self.ran.append(lengths)
        return -1 if lengths == [2] else 0


def test_over_other_transports_a_batch_runs_as_it_is_begun_and_never_later(engine, monkeypatch):
    fake = FakeRdma()
    monkeypatch.setattr(engine, "_protocol", "rdma")
    engine._movers["peer"] = mooncake_engine._Mover(fake)
    begun = []
    for length in (1, 2, 3):
        begun.append(engine.begin("write", "peer", [0], [0], [length]))
        assert fake.ran[-1] == [length]
    assert [engine.finish(batch) for batch in begun] == [True, False, True]
    assert fake.ran == [[1], [2], [3]]


def test_what_was_kept_for_a_forgotten_peer_serves_another(engine):
    memory, back = (np.full(64, fill, dtype=np.uint8) for fill in (5, 0))
    engine.register([(memory.ctypes.data, 64)])
    assert not engine.connect("127.0.0.1:9")
    assert engine.connect(engine.data_address)
    engine.forget(engine.data_address)
    assert engine.read(engine.data_address, [back.ctypes.data], [memory.ctypes.data], [64])
    assert (back == 5).all()


def test_a_peer_that_accepts_and_says_nothing_is_given_up(engine):
    engine.copy_timeout_seconds = 0.3
    with socket.create_server(("127.0.0.1", 0)) as silent:
        started = time.monotonic()
        assert not engine.connect(f"127.0.0.1:{silent.getsockname()[1]}")
        assert time.monotonic() - started < 2


def test_a_failed_write_waits_until_the_peer_has_taken_in_what_was_on_its_way(engine):
    mine = np.zeros(64, dtype=np.uint8)
    unregistered = np.zeros(64, dtype=np.uint8)
    assert engine.connect(engine.data_address)
    started = time.monotonic()
    assert not engine.write(engine.data_address, [mine.ctypes.data], [unregistered.ctypes.data], [64])
    assert time.monotonic() - started >= engine.quarantine_seconds


def test_a_batch_that_the_engine_would_refuse_is_not_submitted(engine):
    many = [0] * (MAX_DESCRIPTORS + 1)
    with pytest.raises(ValueError, match=f"the limit is {MAX_DESCRIPTORS}"):
        engine.read(engine.data_address, many, many, many)


def test_the_time_out_of_the_environment_wins_and_is_never_below_the_engines_own(monkeypatch):
    monkeypatch.setenv("MC_TRANSFER_TIMEOUT", "2")
    started = MooncakeEngine("127.0.0.1", "tcp", copy_timeout_seconds=7)
    assert started.copy_timeout_seconds == started.quarantine_seconds == 5
    started.close()


def test_copies_that_nobody_acknowledges_are_refused(monkeypatch):
    monkeypatch.setenv("MC_TCP_PROTO", "1")
    with pytest.raises(ValueError, match="MC_TCP_PROTO"):
        MooncakeEngine("127.0.0.1", "tcp", copy_timeout_seconds=5)


def test_rdma_is_chosen_where_there_is_a_device_and_refused_where_there_is_none(monkeypatch, tmp_path):
    monkeypatch.setattr(mooncake_engine, "_INFINIBAND_DEVICES", tmp_path)
    assert default_protocol() == "tcp"
    with pytest.raises(ValueError, match="use tcp"):
        MooncakeEngine("127.0.0.1", "rdma", copy_timeout_seconds=5)
    (tmp_path / "mlx5_0").mkdir()
    assert default_protocol() == "rdma"


def test_a_missing_library_is_named_with_what_to_install(monkeypatch):
    real = builtins.__import__

    def without_library(name, *rest):
        if name == "mooncake.engine":
            raise ImportError("libibverbs.so.1: cannot open shared object file")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_library)
    with pytest.raises(RuntimeError, match=r"libibverbs1 and librdmacm1.*extras cpu, cuda or ascend"):
        MooncakeEngine("127.0.0.1", "tcp", copy_timeout_seconds=5)
