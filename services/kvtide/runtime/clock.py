"""Time as an argument: services ask a clock, and tests move it by hand."""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "ManualClock", "SystemClock"]


class Clock(Protocol):
    """A monotonic clock. Its zero is arbitrary and never leaves the process."""

    def monotonic_s(self) -> float:
        """Seconds since an arbitrary moment; never goes backwards."""
        ...


class SystemClock:
    """The machine's monotonic clock."""

    def monotonic_s(self) -> float:
        """Seconds since an arbitrary moment; never goes backwards."""
        return time.monotonic()


class ManualClock:
    """A clock that stands still until it is told to advance."""

    def __init__(self, start_s: float = 1_000.0) -> None:
        self._now_s = start_s

    def monotonic_s(self) -> float:
        """The moment that the clock was last moved to, in seconds."""
        return self._now_s

    def advance(self, duration_s: float) -> None:
        """Move on by `duration_s` seconds.

        Raises ValueError for a negative duration: a monotonic clock has no way back.
        """
        if duration_s < 0:
            message = f"a monotonic clock can't go back by {-duration_s} s"
            raise ValueError(message)
        self._now_s += duration_s
