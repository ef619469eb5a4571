"""What a decode engine pins for conversations: the engine's own record of its leases.

The scheduler thread of the engine writes it, the agent thread reads it. It is
what makes the registry's state rebuildable (contract L7): whatever the registry
forgets, the engine still knows and reports again.

No I/O, no protobuf, no vLLM; ``now_s`` is always the engine's perf_counter.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from kvtide.connector.fingerprint import Fingerprint, fingerprint_of

if TYPE_CHECKING:
    from kvtide.connector.handle import KvHandle

#: How much longer than advertised the engine pins, in seconds. Equal to the
#: margin within which vLLM's prefill side declines a read (pull_worker.py,
#: ``_KV_BLOCKS_EXPIRY_SAFETY_MARGIN``), so that a read which may still start at
#: the advertised deadline has this long to finish.
PIN_GRACE_S = 5.0


class EndCause(Enum):
    """Why the engine freed a pin."""

    READ = "read"
    EXPIRED = "expired"
    RELEASED = "released"


@dataclass(frozen=True, slots=True)
class TurnId:
    """The turn whose blocks are pinned: tenant, conversation and generation fence it (L5)."""

    tenant: str
    conversation_id: str
    generation: int


@dataclass(slots=True)
class Pin:
    """Blocks of one finished turn, kept for the next one.

    ``deadline_s`` is when readers may last start, ``ttl_s`` the retention that
    it was computed from; both in the engine's clock. ``token_ids`` are the
    ``handle.token_count`` tokens whose KV the blocks hold.
    """

    turn: TurnId
    handle: KvHandle
    token_ids: list[int]
    deadline_s: float
    ttl_s: float
    seed: bytes = b""
    _fingerprint: Fingerprint | None = field(default=None, repr=False)

    def fingerprint(self) -> Fingerprint:
        """The tokens' digests; computed on first use, by the agent thread, off the forward path."""
        if self._fingerprint is None:
            self._fingerprint = fingerprint_of(
                self.token_ids, self.handle.block_size_tokens, self.seed
            )
        return self._fingerprint


@dataclass(frozen=True, slots=True)
class PinEnded:
    """A pin that is gone: the blocks may be anyone's now."""

    request_id: str
    cause: EndCause


PinEvent = Pin | PinEnded


class PinTable:
    """Pins by request id, and the events that the registry has not been told yet.

    Orderings that must hold: an event is queued under the same lock as the
    change it reports, and ``open_stream`` drops queued events while it takes the
    snapshot that already contains them. So the stream never reports a change
    before or beside an inventory that contradicts it.
    """

    def __init__(self, budget_blocks: int) -> None:
        """Allow at most ``budget_blocks`` pinned blocks in all."""
        self._budget_blocks = budget_blocks
        self._pins: dict[str, Pin] = {}
        self._pinned_blocks = 0
        self._events: deque[PinEvent] = deque()
        self._changed = threading.Condition()

    @property
    def pinned_blocks(self) -> int:
        """Blocks pinned now; a block shared by two pins counts twice."""
        return self._pinned_blocks

    def __len__(self) -> int:
        """Pins held now."""
        return len(self._pins)

    def __contains__(self, request_id: str) -> bool:
        """Whether this request's blocks are pinned."""
        return request_id in self._pins

    def has_room_for(self, block_count: int) -> bool:
        """Whether pinning that many more blocks stays within the budget."""
        return self._pinned_blocks + block_count <= self._budget_blocks

    def add(self, pin: Pin) -> None:
        """Record a pin and queue its grant."""
        with self._changed:
            self._pins[pin.handle.request_id] = pin
            self._pinned_blocks += pin.handle.block_count
            self._events.append(pin)
            self._changed.notify_all()

    def end(self, request_id: str, cause: EndCause) -> bool:
        """Forget a pin and queue the news; False if it was not pinned."""
        with self._changed:
            pin = self._pins.pop(request_id, None)
            if pin is None:
                return False
            self._pinned_blocks -= pin.handle.block_count
            self._events.append(PinEnded(request_id, cause))
            self._changed.notify_all()
            return True

    def answer_release_of_unknown(self, request_id: str) -> bool:
        """Queue "released" for a pin that is already gone; False if it is still here."""
        with self._changed:
            if request_id in self._pins:
                return False
            self._events.append(PinEnded(request_id, EndCause.RELEASED))
            self._changed.notify_all()
            return True

    def open_stream(self) -> list[Pin]:
        """Start over with a new registry stream: all pins, and no older event."""
        with self._changed:
            self._events.clear()
            return list(self._pins.values())

    def snapshot(self) -> tuple[list[PinEvent], list[Pin]]:
        """Queued events, then all pins: what an inventory in mid-stream carries."""
        with self._changed:
            events = list(self._events)
            self._events.clear()
            return events, list(self._pins.values())

    def wait_for_events(self, timeout_s: float) -> list[PinEvent]:
        """Block until there is something to report, or the timeout or ``wake``."""
        with self._changed:
            if not self._events:
                self._changed.wait(timeout_s)
            events = list(self._events)
            self._events.clear()
            return events

    def wake(self) -> None:
        """Let every ``wait_for_events`` return."""
        with self._changed:
            self._changed.notify_all()
