"""A queue of things to look at later, with lazy re-filing.

Whoever is filed keeps its true due time itself. Moving it later costs nothing: the
old entry comes up, is seen to be early, and the owner files it again. Moving it
earlier files a second entry; the first then comes up as a stranger and is
dropped. So every entry is looked at when it is due, whatever mixture of times
shares the queue, and no operation is slower than one heap push.
"""

from __future__ import annotations

import heapq
import itertools
import math
from typing import Generic, Protocol, TypeVar

NEVER_S = math.inf


class Filed(Protocol):
    """Something that can be filed; the queue alone writes the attribute."""

    filed_due_s: float


_Item = TypeVar("_Item", bound=Filed)


class DueQueue(Generic[_Item]):
    """Items by the time at which they want to be looked at."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, _Item]] = []
        self._tie_breaker = itertools.count()

    def __len__(self) -> int:
        return len(self._heap)

    def file(self, item: _Item, due_s: float) -> None:
        """Have ``item`` come up at ``due_s``, or earlier if it is already filed so."""
        if due_s < item.filed_due_s:
            item.filed_due_s = due_s
            heapq.heappush(self._heap, (due_s, next(self._tie_breaker), item))

    def pop_due(self, now_s: float) -> _Item | None:
        """Take out an item that is due, or None. The caller files it again if need be."""
        while self._heap and self._heap[0][0] <= now_s:
            due_s, _, item = heapq.heappop(self._heap)
            if due_s == item.filed_due_s:
                item.filed_due_s = NEVER_S
                return item
        return None
