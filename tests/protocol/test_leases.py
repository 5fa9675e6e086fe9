"""The arithmetic of leases: on two clocks that only agree on their rates, the mover's end comes first."""

from dfirst.protocol.lease import farewell_seconds, mover_end, owner_end, write_tail_seconds
from dfirst.protocol.timing import Timing
from hypothesis import example, given
from hypothesis import strategies as st

SECONDS = st.floats(0.1, 1000.0)
RATIOS = st.floats(0.0, 0.05)
ODDS = st.floats(-1.0, 1.0)


def timing_of(lease: float, copy: float, stall: float, ratio: float) -> Timing:
    return Timing(
        lease_seconds=lease,
        copy_timeout_seconds=copy,
        stall_allowance_seconds=stall,
        clock_drift_ratio=ratio,
    )


@given(SECONDS, SECONDS, SECONDS, RATIOS, ODDS, st.floats(0.0, 100.0))
@example(20.0, 30.0, 5.0, 0.001, 1.0, 0.0)
def test_a_reader_ends_before_its_owner_releases_whatever_the_drift(lease, copy, stall, ratio, odds, delay):
    """The mover's clock is the measure; the owner's runs faster or slower by at most the ratio."""
    timing = timing_of(lease, copy, stall, ratio)
    owner_rate = 1 + odds * ratio
    released_after = owner_end(timing, 0.0, 0.0) / owner_rate
    assert mover_end(timing, 0.0, lease) < delay + released_after


@given(SECONDS, SECONDS, SECONDS, RATIOS, ODDS, st.floats(0.0, 100.0))
@example(20.0, 30.0, 5.0, 0.001, 1.0, 0.0)
def test_the_last_byte_of_a_write_lands_before_its_owner_releases(lease, copy, stall, ratio, odds, delay):
    timing = timing_of(lease, copy, stall, ratio)
    owner_rate = 1 + odds * ratio
    released_after = owner_end(timing, 0.0, write_tail_seconds(timing)) / owner_rate
    assert mover_end(timing, 0.0, lease) + stall + copy < delay + released_after


@given(SECONDS, st.floats(0.0, 1e6), st.floats(0.0, 1e6))
def test_a_lease_counts_from_its_question_not_from_its_answer(lease, asked_at, later):
    timing = Timing(lease_seconds=lease)
    assert mover_end(timing, asked_at, lease) < owner_end(timing, asked_at + later, 0.0)


@given(SECONDS, SECONDS, SECONDS)
def test_a_last_word_is_repeated_until_the_lease_that_it_ends_is_over(lease, copy, stall):
    timing = timing_of(lease, copy, stall, 0.001)
    for tail in (0.0, write_tail_seconds(timing)):
        assert farewell_seconds(timing, tail) >= owner_end(timing, 0.0, tail)
        assert farewell_seconds(timing, tail) >= timing.farewell_seconds
