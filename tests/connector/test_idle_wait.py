"""For how long a step waits that computes nothing."""

import pytest
from dfirst.connector.idle_wait import LEAST_SECONDS, MOST_SECONDS, IdleWait
from dfirst.connector.step import StepMetadata
from dfirst.protocol.commands import FinishPush
from dfirst.protocol.messages import TransferKey

IDLE = StepMetadata(may_wait=True)
TOLD = StepMetadata(may_wait=True, commands=(FinishPush(TransferKey("t", 0)),))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_only_a_step_that_holds_nobody_up_waits() -> None:
    wait = IdleWait()
    assert wait.seconds(None) == 0
    assert wait.seconds(StepMetadata()) == 0
    assert wait.seconds(IDLE) == LEAST_SECONDS


def test_it_waits_the_longer_the_longer_nothing_has_happened() -> None:
    clock = Clock()
    wait = IdleWait(clock)
    waits = []
    for _ in range(5):
        waits.append(wait.seconds(IDLE))
        clock.now += 0.025
    assert waits == sorted(waits)
    assert waits[0] == LEAST_SECONDS
    assert LEAST_SECONDS < waits[2] < MOST_SECONDS
    clock.now += 1000
    assert wait.seconds(IDLE) == MOST_SECONDS


@pytest.mark.parametrize("what", ["a report", "a command", "a step that computes"])
def test_whatever_happens_makes_it_short_again(what: str) -> None:
    clock = Clock()
    wait = IdleWait(clock)
    clock.now += 1
    assert wait.seconds(IDLE) == MOST_SECONDS
    if what == "a report":
        wait.happened()
    elif what == "a command":
        assert wait.seconds(TOLD) == LEAST_SECONDS
    else:
        assert wait.seconds(StepMetadata()) == 0
    assert wait.seconds(IDLE) == LEAST_SECONDS
