"""``kv_connector_extra_config`` is taken whole or refused with one sentence that names the setting."""

from pathlib import Path

import dfirst.spec
import msgspec
import pytest
from dfirst.connector.extra_config import ExtraConfig, decode_extra_config
from dfirst.protocol.modes import MODES
from dfirst.protocol.timing import Timing

TIMERS = Path(dfirst.spec.__path__[0]) / "timers.toml"


def test_defaults_are_those_of_the_spec() -> None:
    timers = msgspec.toml.decode(TIMERS.read_bytes())["timers"]
    listed = {timer["name"]: timer["default"] for timer in timers}
    assert {name: getattr(decode_extra_config({}), name) for name in listed} == listed
    assert set(listed) == set(Timing.__struct_fields__)


@pytest.mark.parametrize("settings", [{}, None])
def test_nothing_set_is_enough(settings: dict | None) -> None:
    config = decode_extra_config(settings)
    assert config.modes == MODES
    assert list(config.ports) == []


def test_what_is_set_is_taken() -> None:
    config = decode_extra_config({"lease_seconds": 7, "modes": ["layerwise"], "port_range": "20000-20002"})
    assert config.lease_seconds == 7
    assert config.modes == ("layerwise",)
    assert list(config.ports) == [20000, 20001, 20002]


def test_one_port_is_a_range_too() -> None:
    assert list(decode_extra_config({"port_range": "20000"}).ports) == [20000]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lease_second": 5}, ["lease_second", "Known settings", "lease_seconds"]),
        ({"lease_seconds": "5"}, ["lease_seconds is '5'", "expected `float`, got `str`"]),
        ({"modes": ["layerwise", 3]}, ["modes is ['layerwise', 3]", "expected `str`, got `int`"]),
        ({"host": 5}, ["host is 5", "expected `str`"]),
        ({"lease_seconds": 0}, ["lease_seconds is 0", "above 0"]),
        ({"hold_seconds": -1.5}, ["hold_seconds is -1.5", "above 0"]),
        ({"hold_seconds": float("nan")}, ["hold_seconds is nan"]),
        ({"hold_seconds": float("inf")}, ["hold_seconds is inf"]),
        ({"shutdown_seconds": 0}, ["shutdown_seconds is 0"]),
        ({"metaserver_timeout_seconds": -1}, ["metaserver_timeout_seconds is -1"]),
        ({"modes": []}, ["modes is []", "blockwise, layerwise"]),
        ({"modes": ["blockwise", "sideways"]}, ["sideways", "blockwise, layerwise"]),
        ({"modes": "layerwise"}, ["modes", "array"]),
        ({"mooncake_protocol": "udp"}, ["mooncake_protocol is 'udp'", "tcp, rdma, ascend"]),
        ({"staging_bytes": -1}, ["staging_bytes is -1", "0 or at least 4194304"]),
        ({"staging_bytes": 4194303}, ["staging_bytes is 4194303", "0 or at least 4194304"]),
        ({"host": "0.0.0.0"}, ["host is '0.0.0.0'", "one address"]),
        ({"port_range": "20000-"}, ["port_range is '20000-'"]),
        ({"port_range": "many"}, ["port_range is 'many'", "20000-20100"]),
        ({"port_range": "20100-20000"}, ["must go up"]),
        ({"port_range": "65000-70000"}, ["within 1-65535"]),
        ({"query_retry_seconds": 10}, ["query_retry_seconds is 10", "query_timeout_seconds, 10"]),
        ({"lease_seconds": 0.01}, ["lease_seconds is 0.01", "clocks"]),
        ({"transfer_deadline_seconds": 20}, ["transfer_deadline_seconds is 20", "25"]),
        ({"done_retry_seconds": 20}, ["done_retry_seconds is 20", "farewell_seconds, 20"]),
        ({"tombstone_seconds": 30}, ["tombstone_seconds is 30", "at least 45"]),
        ({"farewell_seconds": 301}, ["tombstone_seconds is 300", "at least 301"]),
    ],
)
def test_a_wrong_setting_is_refused_by_name(settings: dict, words: list[str]) -> None:
    with pytest.raises(ValueError, match="kv_connector_extra_config of DFirstConnector") as refused:
        decode_extra_config(settings)
    for word in words:
        assert word in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_core_counts_with_what_the_engine_really_takes() -> None:
    config = decode_extra_config({"copy_timeout_seconds": 1, "quarantine_seconds": 2})
    timing = config.core_timing(copy_timeout_seconds=5, quarantine_seconds=2)
    assert timing.copy_timeout_seconds == 5 + 2, "a failed write counts as in flight for the quarantine"
    assert timing.lease_seconds == config.lease_seconds


def test_an_engine_whose_time_out_leaves_no_room_is_refused() -> None:
    config = decode_extra_config({"transfer_deadline_seconds": 70})
    with pytest.raises(ValueError, match=r"transfer_deadline_seconds is 70 and must be at least .* 635"):
        config.core_timing(copy_timeout_seconds=600, quarantine_seconds=30)


def test_settings_do_not_change() -> None:
    with pytest.raises(AttributeError, match="immutable"):
        ExtraConfig().host = "elsewhere"  # type: ignore[misc]
