"""Faults on demand: what a test tells one fake engine to do wrong."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field


def _open_gate() -> asyncio.Event:
    gate = asyncio.Event()
    gate.set()
    return gate


@dataclass(slots=True)
class Faults:
    """Switches of one engine; all off at start. Counters count down to 0 as they strike."""

    # As the owner of blocks (side channel).
    refuse_handshakes: bool = False
    """Accept the connection, refuse the handshake."""
    refuse_reads: bool = False
    """Handshakes succeed, every READ fails: ports answer, transfers do not."""
    refuse_reads_from: set[str] = field(default_factory=set)
    """Node ids of readers whose READs fail: one broken pair, all others fine."""
    fail_next_reads: int = 0
    read_gate: asyncio.Event = field(default_factory=_open_gate)
    """While cleared, READs wait here before they copy what the blocks hold by then."""
    drop_notifications: bool = False
    """Readers' completion notifications are lost, so blocks wait for their deadline."""

    # As a server.
    fail_next_requests: int = 0
    """Answer HTTP 500 without starting the request."""
    reject_next_requests: int = 0
    """Answer HTTP 400 at admission, after the body parsed."""
    kill_after_tokens: int = 0
    """Kill the engine (SIGKILL) when it has generated this many more tokens."""
    crash_after_tokens: int = 0
    """Let the engine core fail at this many more tokens; the server says so and ends."""

    # As a scheduler.
    step_gate: asyncio.Event = field(default_factory=_open_gate)
    """While cleared, no step runs: requests wait, pins do not expire (a stuck engine)."""
    prefill_gate: asyncio.Event = field(default_factory=_open_gate)
    """While cleared, steps that would compute prompt tokens wait: a slow prefill."""
    token_delay_s: float = 0.0
    """Time that one step takes."""
    preempt_after_load: int = 0
    """Preempt this many requests right after their remote load has finished."""
    report_sent_twice: int = 0
    """Report this many finished sends twice, which kills the real engine too."""

    def take(self, name: str) -> bool:
        """Count one strike of the counter ``name`` down; False when it is used up."""
        left: int = getattr(self, name)
        if left <= 0:
            return False
        setattr(self, name, left - 1)
        return True

    def clear(self) -> None:
        """Switch everything off and let whatever waits go on."""
        for gate in (self.read_gate, self.step_gate, self.prefill_gate):
            gate.set()
        fresh = Faults()
        for name in self.__slots__:
            if not name.endswith("_gate"):
                setattr(self, name, getattr(fresh, name))
