"""Clocks."""

import pytest

from kvtide.runtime import ManualClock, SystemClock


def test_manual_clock_moves_only_when_told():
    """Time under a manual clock is what the test says it is."""
    clock = ManualClock(start_s=5.0)
    assert clock.monotonic_s() == clock.monotonic_s() == 5.0
    clock.advance(2.5)
    assert clock.monotonic_s() == 7.5


def test_manual_clock_never_goes_back():
    """A test can't do to the code what no monotonic clock would."""
    with pytest.raises(ValueError, match="go back by 1 s"):
        ManualClock().advance(-1)


def test_system_clock_never_goes_back():
    """Readings of the machine's clock are in order."""
    clock = SystemClock()
    readings = [clock.monotonic_s() for _ in range(100)]
    assert readings == sorted(readings)
