"""What a user writes after --prefill and --decode."""

import re

import pytest
from dfirst.connector.engine_options import EngineLayout, parse_layout, place


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("tp=2", EngineLayout(tp=2)),
        ("tp=1,dp=2", EngineLayout(dp=2)),
        (" dp = 2 , tp = 4 ", EngineLayout(tp=4, dp=2)),
        ("tp=2,devices=0+3", EngineLayout(tp=2, devices=(0, 3))),
    ],
)
def test_layouts_that_work(text: str, layout: EngineLayout) -> None:
    assert parse_layout(text) == layout


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "'' says nothing of an engine; write tp=2,dp=1"),
        ("2", "'2' in '2' is not of the form key=value"),
        ("tp=", "'tp=' in 'tp=' is not of the form key=value"),
        ("tp=2,", "'' in 'tp=2,' is not of the form key=value"),
        ("tp=two", "tp is 'two' in 'tp=two'; give a whole number of at least 1"),
        ("tp=0", "tp is '0' in 'tp=0'; give a whole number of at least 1"),
        ("tp=²", "tp is '²' in 'tp=²'; give a whole number of at least 1"),
        ("pp=2", "there is no setting 'pp' for an engine (in 'pp=2'); known are tp, dp, devices"),
        ("tp=1,tp=2", "tp is given twice in 'tp=1,tp=2'; give it once"),
        ("tp=2,devices=1", "'tp=2,devices=1' names 1 devices for 2 ranks (tp x dp); name one for each"),
        ("devices=0+", "devices is '' in 'devices=0+'; give a whole number of at least 0"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
        parse_layout(text)


def test_engines_get_the_next_devices_that_nobody_named() -> None:
    layouts = [EngineLayout(tp=2), EngineLayout(devices=(1,)), EngineLayout(dp=2)]
    assert place(layouts) == [(0, 2), (1,), (3, 4)]


def test_two_engines_may_name_the_same_device() -> None:
    assert place([EngineLayout(devices=(0,)), EngineLayout(devices=(0,))]) == [(0,), (0,)]
