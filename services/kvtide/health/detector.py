"""The failure detector: what heartbeats, broken streams and silence say of a node.

Plain decisions; time comes in as an argument.

Orderings (each is tested by name)

* The newest stream speaks. When a node reports again in the same epoch, the new
  stream replaces the old one, and what still comes out of the old one is ignored,
  its end included.
* A new epoch replaces the old entry at once, with all that was known of it. A
  stream of a replaced epoch is refused while the newer one has a stream.
* Down beats suspect beats serving: silence is looked at first, then the stream,
  then what the engine says of itself. A heartbeat brings a node straight back
  from any state.
* A node that is down for long enough leaves the list; its next stream makes it
  appear again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtide.health.ports import Node, NodeInfo, NodeLoad, NodeState
from kvtide.runtime.errors import FailedPrecondition

if TYPE_CHECKING:
    from kvtide.runtime.settings import HealthSettings

REMEMBERED_EPOCHS = 16


@dataclass(frozen=True, slots=True)
class HealthRules:
    """When a silent node is suspect, down, and forgotten; in seconds of silence."""

    suspect_after_s: float = 3.0
    down_after_s: float = 12.0
    forget_after_s: float = 612.0


def rules_from_settings(settings: HealthSettings) -> HealthRules:
    """The rules that the settings ask for."""
    return HealthRules(
        suspect_after_s=settings.suspect_after_missed * settings.report_interval_s,
        down_after_s=settings.down_after_s,
        forget_after_s=settings.down_after_s + settings.forget_down_after_s,
    )


@dataclass(slots=True, eq=False)
class _Entry:
    info: NodeInfo
    stream_id: int | None
    """None once the stream broke."""
    heard_s: float
    load: NodeLoad
    http_serving: bool
    state: NodeState = NodeState.STARTING
    past_epochs: deque[str] = field(default_factory=lambda: deque(maxlen=REMEMBERED_EPOCHS))


class NodeTable:
    """All nodes that report, or did not long ago.

    Methods that take an event return whether the fleet changed in a way that a
    router must know at once: a node came, went, changed its state or its epoch.
    """

    def __init__(self, rules: HealthRules) -> None:
        self._rules = rules
        self._entries: dict[str, _Entry] = {}

    def register(
        self, info: NodeInfo, stream_id: int, load: NodeLoad, *, http_serving: bool, now_s: float
    ) -> bool:
        """Take in the first heartbeat of a stream. ``stream_id`` is unique for ever.

        Raises ``FailedPrecondition`` for a stream of a replaced epoch.
        """
        entry = self._entries.get(info.node_id)
        before = None if entry is None else (entry.info, entry.state)
        if entry is None:
            entry = _Entry(info, stream_id, now_s, load, http_serving)
            self._entries[info.node_id] = entry
        elif entry.info.epoch != info.epoch:
            if info.epoch in entry.past_epochs and entry.stream_id is not None:
                raise FailedPrecondition(
                    "newer_epoch_reporting",
                    f"node {info.node_id!r} has restarted: its epoch {entry.info.epoch!r} is "
                    f"reporting and replaced {info.epoch!r}; give each engine a node id of its own",
                )
            if info.epoch in entry.past_epochs:
                entry.past_epochs.remove(info.epoch)
            entry.past_epochs.append(entry.info.epoch)
        entry.info = info
        entry.stream_id = stream_id
        self._heard(entry, load, http_serving=http_serving, now_s=now_s)
        return before != (entry.info, entry.state)

    def report(
        self, node_id: str, stream_id: int, load: NodeLoad, *, http_serving: bool, now_s: float
    ) -> bool:
        """Take in a later heartbeat. One from a replaced stream is ignored."""
        entry = self._speaks(node_id, stream_id)
        if entry is None:
            return False
        before = entry.state
        self._heard(entry, load, http_serving=http_serving, now_s=now_s)
        return before is not entry.state

    def stream_broken(self, node_id: str, stream_id: int, now_s: float) -> bool:
        """A stream ended: the node is suspect at once, unless it was replaced before."""
        entry = self._speaks(node_id, stream_id)
        if entry is None:
            return False
        entry.stream_id = None
        return self._update(entry, now_s)

    def sweep(self, now_s: float) -> bool:
        """Apply what silence has changed until now."""
        changed = False
        for node_id, entry in list(self._entries.items()):
            if now_s - entry.heard_s >= self._rules.forget_after_s:
                del self._entries[node_id]
                changed = True
            else:
                changed |= self._update(entry, now_s)
        return changed

    def nodes(self, now_s: float) -> list[Node]:
        """The whole fleet, sorted by node id, with the states of the last event or sweep."""
        return [
            Node(entry.info, entry.state, entry.load, max(0.0, now_s - entry.heard_s))
            for _, entry in sorted(self._entries.items())
        ]

    def _heard(self, entry: _Entry, load: NodeLoad, *, http_serving: bool, now_s: float) -> None:
        entry.heard_s = now_s
        entry.load = load
        entry.http_serving = http_serving
        self._update(entry, now_s)

    def _update(self, entry: _Entry, now_s: float) -> bool:
        before = entry.state
        silent_s = now_s - entry.heard_s
        if silent_s >= self._rules.down_after_s:
            entry.state = NodeState.DOWN
        elif entry.stream_id is None or silent_s >= self._rules.suspect_after_s:
            entry.state = NodeState.SUSPECT
        else:
            entry.state = NodeState.READY if entry.http_serving else NodeState.STARTING
        return before is not entry.state

    def _speaks(self, node_id: str, stream_id: int) -> _Entry | None:
        entry = self._entries.get(node_id)
        return entry if entry is not None and entry.stream_id == stream_id else None
