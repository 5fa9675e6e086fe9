"""``kv_transfer_params`` become a transfer, or none, or one sentence."""

import msgspec
import pytest
from dfirst.connector.transfer_params import MAX_NAME_LENGTH, read_params
from dfirst.protocol.commands import RemoteRank
from dfirst.protocol.messages import TransferKey

OFFERED = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "transfer_id": "t",
    "attempt": 2,
    "remote_engine_id": "P_dp0",
    "remote_host": "10.0.0.1",
    "remote_port": 4000,
    "remote_ranks": [{"host": "10.0.0.1", "port": 4000, "incarnation": "i0"}],
    "layout_digest": "d",
    "remote_block_ids": [[1, 2]],
    "remote_request_id": "cmpl-1",
    "tp_size": 1,
}
ANNOUNCED = OFFERED | {"do_remote_prefill": False, "do_remote_decode": True, "remote_cached_tokens": 32}
TO_METASERVER = {"do_remote_prefill": True, "metaserver": "http://router/metaserver", "transfer_id": "t"}
TO_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


@pytest.mark.parametrize("raw", [{}, {"do_remote_prefill": False}, {"some_router": {"has": "its own"}}])
def test_a_request_that_asks_for_no_transfer_has_none(raw: dict) -> None:
    assert read_params(raw, "r", 10) is None


def test_what_a_prefill_engine_answered_is_read_block_wise() -> None:
    transfer = read_params(OFFERED, "r", 100)
    assert transfer is not None
    assert transfer.mode == "blockwise"
    assert transfer.key == TransferKey("t", 2)
    assert (transfer.request_id, transfer.prompt_tokens) == ("r", 100)
    assert transfer.remote is not None
    assert transfer.remote.engine_id == "P_dp0"
    assert transfer.remote.layout_digest == "d"
    assert transfer.remote.ranks == (RemoteRank("10.0.0.1", 4000, "i0"),)


def test_what_a_decode_engine_announced_is_pushed_layer_wise() -> None:
    transfer = read_params(ANNOUNCED, "r", 100)
    assert transfer is not None
    assert transfer.mode == "layerwise"
    assert transfer.cached_tokens == 32


def test_a_metaserver_means_layer_wise() -> None:
    transfer = read_params(TO_METASERVER, "r", 100)
    assert transfer is not None
    assert transfer.mode == "layerwise"
    assert transfer.metaserver == "http://router/metaserver"
    assert transfer.remote is None


def test_a_prompt_for_whoever_comes_is_offered_block_wise_under_a_new_name() -> None:
    one, other = (read_params(TO_PREFILL | {"transfer_id": None}, "r", 5) for _ in range(2))
    assert one is not None
    assert other is not None
    assert one.mode == "blockwise"
    assert one.key != other.key
    assert len(one.key.transfer_id) == 32


def test_parameters_that_a_router_leaves_empty_are_not_there() -> None:
    empty = dict.fromkeys(
        ("remote_engine_id", "remote_host", "remote_port", "remote_block_ids", "metaserver")
    )
    transfer = read_params(TO_PREFILL | empty, "r", 5)
    assert transfer is not None
    assert transfer.remote is None


@pytest.mark.parametrize("missing", ["remote_engine_id", "remote_ranks", "layout_digest"])
def test_a_read_from_nowhere_is_refused(missing: str) -> None:
    raw = {name: value for name, value in OFFERED.items() if name != missing}
    with pytest.raises(ValueError, match="pass on unchanged what the prefill engine answered"):
        read_params(raw, "r", 5)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"do_remote_prefill": "yes"}, "do_remote_prefill"),
        ({"attempt": "first"}, "attempt"),
        ({"attempt": -1}, "attempt is -1"),
        ({"transfer_id": 7}, "transfer_id"),
        ({"transfer_id": "x" * (MAX_NAME_LENGTH + 1)}, "transfer_id has 257 characters"),
        ({"remote_ranks": "10.0.0.1"}, "remote_ranks"),
        ({"remote_ranks": [{"host": "h"}]}, "port"),
        ({"remote_ranks": [{"host": "h", "port": 0, "incarnation": "i"}]}, "'h', port 0"),
        ({"remote_ranks": [{"host": "", "port": 5, "incarnation": "i"}]}, "'', port 5"),
        ({"do_remote_decode": True}, "at once"),
    ],
)
def test_parameters_that_make_no_sense_are_refused_in_one_sentence(changed: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words) as refused:
        read_params(OFFERED | changed, "r", 5)
    assert str(refused.value).startswith("kv_transfer_params")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("cached_tokens", [-1, 101])
def test_a_push_cannot_leave_out_more_than_the_prompt(cached_tokens: int) -> None:
    with pytest.raises(ValueError, match=f"remote_cached_tokens is {cached_tokens}, and the prompt has 100"):
        read_params(ANNOUNCED | {"remote_cached_tokens": cached_tokens}, "r", 100)


def test_a_request_is_a_value() -> None:
    transfer = read_params(OFFERED, "r", 5)
    assert msgspec.structs.asdict(transfer) == msgspec.structs.asdict(read_params(OFFERED, "r", 5))
