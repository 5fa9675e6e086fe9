"""A side channel that is closed to strangers: real sockets, real ranks, keys from files."""

import asyncio
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq
import zmq.auth
from dfirst.connector import side_channel
from dfirst.connector.cancel import SideChannelCanceller
from dfirst.connector.cli import app
from dfirst.connector.curve import CurveKeys, make_keys, read_engine_keys, read_router_keys
from dfirst.connector.extra_config import decode_extra_config
from dfirst.connector.router.cancel import RankAddress
from dfirst.connector.side_channel import HEADER, SideChannel
from dfirst.protocol.commands import OfferBlocks, StartPull
from dfirst.protocol.effects import FAILED, RECEIVED, SENT
from dfirst.protocol.messages import Cancel, LayoutQuery, Message, Sender, TransferKey
from dfirst.protocol.modes import OWNER
from dfirst.protocol.timing import Timing
from typer.testing import CliRunner

from .ranks import HOST, Rank, start_rank, wait_until

KEY = TransferKey("secret", 0)
TIMING = Timing(
    query_retry_seconds=0.2, query_timeout_seconds=1.0, copy_timeout_seconds=5.0, quarantine_seconds=0.5
)
SILENCE_MS = 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("keys")
    make_keys(directory)
    return directory


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The keys of another deployment."""
    directory = tmp_path_factory.mktemp("foreign")
    make_keys(directory)
    return directory


@pytest.fixture
def owner(folder: Path) -> Iterator[Rank]:
    rank = start_rank("P", TIMING, keys=read_engine_keys(str(folder)))
    rank.step(OfferBlocks(key=KEY, request_id="p", block_ids=(1, 2), prompt_tokens=8))
    wait_until(lambda: KEY in rank.core.owners)
    yield rank
    rank.stop()


def pull(owner: Rank) -> StartPull:
    return StartPull(
        key=KEY, request_id="d", remote=owner.remote, block_ids=(5, 6), prompt_tokens=8, cached_tokens=0
    )


def cancel_message(owner: Rank) -> Cancel:
    """What would end the transfer if it were heard."""
    (entry,) = owner.directory.ranks
    return Cancel(
        sender=Sender("router", -1, "r"),
        key=KEY,
        target_incarnation=entry.incarnation,
        target=OWNER,
        mode="blockwise",
        reason="a stranger says so",
    )


def told_by(owner: Rank, dealer: "zmq.Socket[bytes]", *messages: Message) -> bool:
    """Send messages to the rank as somebody else; return whether anything comes back."""
    (entry,) = owner.directory.ranks
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.connect(f"tcp://{HOST}:{entry.port}")
    for message in messages:
        dealer.send_multipart([HEADER, msgspec.msgpack.encode(message)])
    return bool(dealer.poll(SILENCE_MS))


def secured_with(directory: Path, server_key: Path | None = None) -> Callable[["zmq.Socket[bytes]"], None]:
    """Return what gives a socket the routers' keys of a deployment, and another's engines to believe."""
    keys = read_router_keys(str(directory))
    if server_key is not None:
        keys = msgspec.structs.replace(
            keys, engines_public_key=zmq.auth.load_certificate(server_key / "engines.key")[0]
        )
    return keys.secure_asker


def without_keys(_socket: "zmq.Socket[bytes]") -> None:
    """A stranger."""


@pytest.mark.parametrize(
    "who", ["without keys", "foreign keys", "foreign keys, knows the engines' public key"]
)
def test_a_stranger_gets_nothing_and_changes_nothing(
    owner: Rank, folder: Path, foreign: Path, who: str
) -> None:
    secure = {
        "without keys": without_keys,
        "foreign keys": secured_with(foreign),
        "foreign keys, knows the engines' public key": secured_with(foreign, server_key=folder),
    }[who]
    query = LayoutQuery(sender=Sender("D", 0, "d"), digest="")
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        secure(dealer)
        assert not told_by(owner, dealer, query, cancel_message(owner))
    wait_until(lambda: owner.loop._channel.counters["refused_connections"] > 0)
    assert not [name for name in owner.core.counters if name.startswith("received")]
    assert owner.core.owners[KEY].state == "METADATA_QUERY"
    assert owner.outcomes() == []


def test_a_party_with_keys_is_heard(owner: Rank, folder: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        secured_with(folder)(dealer)
        assert told_by(owner, dealer, cancel_message(owner))
    wait_until(lambda: owner.outcomes() == [SENT])


def test_two_engines_with_keys_move_a_cache(owner: Rank, folder: Path) -> None:
    decode = start_rank("D", TIMING, fill=0, keys=read_engine_keys(str(folder)))
    decode.step(pull(owner))
    wait_until(lambda: decode.outcomes() == [RECEIVED])
    assert np.array_equal(decode.cache[:, [5, 6]], owner.cache[:, [1, 2]])
    wait_until(lambda: owner.outcomes() == [SENT])
    decode.stop()


@pytest.mark.parametrize("of", ["nobody", "another deployment"])
def test_an_engine_without_the_keys_fails_its_transfers_in_time(owner: Rank, foreign: Path, of: str) -> None:
    keys = None if of == "nobody" else read_engine_keys(str(foreign))
    decode = start_rank("D", TIMING, fill=0, keys=keys)
    decode.step(pull(owner))
    wait_until(lambda: decode.outcomes() == [FAILED])
    assert not decode.cache.any()
    assert owner.outcomes() == []
    decode.stop()


def test_a_closed_engine_tells_an_open_one_nothing(folder: Path) -> None:
    """Who listens at a rank's address without its secret key hears nothing either."""
    near, impostor = SideChannel(HOST, range(0), read_engine_keys(str(folder))), SideChannel(HOST, range(0))
    near.send(HOST, impostor.port, LayoutQuery(sender=Sender("P", 0, "p"), digest=""))
    heard: list[Message] = []

    def refused() -> bool:
        impostor.poller.poll(SILENCE_MS)
        heard.extend(message for _, message in impostor.receive())
        return impostor.counters["refused_connections"] > 0

    wait_until(refused)
    assert heard == []
    assert near.counters["not_sent"] == 0
    near.close()
    impostor.close()


def test_a_rank_is_heard_at_an_address_where_one_with_other_keys_listened_before(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeroMQ does not go back by itself to an address that has once refused it."""
    monkeypatch.setattr(side_channel, "RECONNECT_SECONDS", 0.1)
    query = LayoutQuery(sender=Sender("P", 0, "p"), digest="")
    near, closed = SideChannel(HOST, range(0)), SideChannel(HOST, range(0), read_engine_keys(str(folder)))

    def refused() -> bool:
        near.send(HOST, closed.port, query)
        return near.counters["not_sent"] > 0

    wait_until(refused)
    closed.close()
    rank = SideChannel(HOST, range(closed.port, closed.port + 1))

    def heard() -> bool:
        near.send(HOST, closed.port, query)
        return bool(list(rank.receive()))

    wait_until(heard)
    rank.close()
    near.close()


def test_a_router_with_keys_cancels(owner: Rank, folder: Path) -> None:
    cancel_with(read_router_keys(str(folder)), owner)
    wait_until(lambda: owner.outcomes() == [SENT])


def test_a_router_without_keys_is_not_heard(owner: Rank) -> None:
    cancel_with(None, owner)
    assert owner.core.owners[KEY].state == "METADATA_QUERY"


def cancel_with(keys: CurveKeys | None, owner: Rank) -> None:
    (entry,) = owner.directory.ranks

    async def all_of_it() -> None:
        canceller = SideChannelCanceller(Timing(done_retry_seconds=0.2), keys)
        rank = RankAddress(entry.host, entry.port, entry.incarnation)
        await canceller.cancel([rank], KEY.transfer_id, KEY.attempt, "blockwise", "the client has gone")
        canceller.close()

    asyncio.run(all_of_it())


# Files


def test_a_party_is_shut_out_by_removing_its_file(folder: Path, tmp_path: Path) -> None:
    directory = copied(folder, tmp_path)
    (directory / "routers.key").unlink()
    rank = start_rank("P", TIMING, keys=read_engine_keys(str(directory)))
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        secured_with(folder)(dealer)
        assert not told_by(rank, dealer, LayoutQuery(sender=Sender("D", 0, "d"), digest=""))
    rank.stop()


def test_a_router_needs_no_secret_of_the_engines(folder: Path, tmp_path: Path) -> None:
    directory = copied(folder, tmp_path)
    (directory / "engines.key_secret").unlink()
    read_router_keys(str(directory))
    with pytest.raises(ValueError, match=r"engines.key_secret cannot be read \(there is no such file\)"):
        read_engine_keys(str(directory))


def test_secret_keys_are_for_their_owner_only(folder: Path) -> None:
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()}
    assert modes == {
        "engines.key": 0o644,
        "engines.key_secret": 0o600,
        "routers.key": 0o644,
        "routers.key_secret": 0o600,
    }


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("engines.key_secret", None, "there is no such file"),
        ("engines.key_secret", "", "No public key found"),
        ("engines.key_secret", 'public-key = "{public}"', "holds no secret-key"),
        (
            "engines.key_secret",
            'public-key = "short"\nsecret-key = "{secret}"',
            "no key of 40 Z85 characters",
        ),
        ("engines.key_secret", 'public-key = "{public}"\nsecret-key = "~~~~~~~~~~{short}"', "secret-key"),
        ("engines.key_secret", 'public-key = "{public}"\nsecret-key = "{foreign}"', "are no pair"),
        ("engines.key", None, "there is no such file"),
        ("engines.key", 'public-key = "{foreign_public}"', "of two pairs"),
        ("routers.key", "garbage", "routers.key cannot be read"),
    ],
)
def test_a_wrong_key_file_stops_the_start_with_one_sentence(
    folder: Path, foreign: Path, tmp_path: Path, file: str, text: str | None, words: str
) -> None:
    directory = copied(folder, tmp_path)
    (directory / file).unlink()
    if text is not None:
        public, secret = (key.decode() for key in zmq.auth.load_certificate(folder / "engines.key_secret"))
        foreign_public, other = (
            key.decode() for key in zmq.auth.load_certificate(foreign / "engines.key_secret")
        )
        filled = text.format(
            public=public, secret=secret, short=secret[10:], foreign=other, foreign_public=foreign_public
        )
        (directory / file).write_text(filled)
    with pytest.raises(
        ValueError, match="kv_connector_extra_config of DFirstConnector cannot be used"
    ) as refused:
        decode_extra_config({"curve_keys": str(directory)})
    assert words in str(refused.value)
    assert str(directory) in str(refused.value)
    assert file in str(refused.value)
    assert "\n" not in str(refused.value)


def copied(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


# The command line


def test_keys_are_made_by_a_command_and_not_twice(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "keys"
    made = CliRunner().invoke(app, ["keys", str(directory)])
    assert made.exit_code == 0
    assert made.output.count("wrote ") == 4
    before = (directory / "engines.key_secret").read_text()
    again = CliRunner().invoke(app, ["keys", str(directory)])
    assert again.exit_code == 2
    assert "is there already" in again.stderr
    assert (directory / "engines.key_secret").read_text() == before


def test_the_router_says_what_is_wrong_with_its_keys(tmp_path: Path) -> None:
    words = ["--prefill", "http://p:1", "--decode", "http://d:1", "--port", "1024", "--host", "127.0.0.1"]
    result = CliRunner().invoke(app, ["router", *words, "--curve-keys", str(tmp_path)])
    assert result.exit_code == 2
    assert f"error: curve keys: {tmp_path}/routers.key_secret cannot be read" in result.stderr
