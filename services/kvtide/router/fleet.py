"""The fleet as this router sees it: node health's last word, and the legs in flight."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

from kvtide.runtime import get_logger

if TYPE_CHECKING:
    from kvtide.health.ports import Node, NodeHealth

__all__ = ["FleetView"]

_REWATCH_DELAY_S = 0.5

_log = get_logger(__name__)


class FleetView:
    """Keeps the last view that node health sent, also while node health is away.

    A stale view is better than none: an engine that is gone is found out by its leg, and
    nothing unsafe follows from asking it.
    """

    def __init__(self, health: NodeHealth) -> None:
        self._health = health
        self._task: asyncio.Task[None] | None = None
        self.nodes: tuple[Node, ...] = ()
        self.in_flight: Counter[str] = Counter()
        """Legs that this router has running, by node id."""

    async def start(self) -> None:
        """Start to watch. Returns at once; the fleet is empty until the first view."""
        self._task = asyncio.create_task(self._watch(), name="fleet-watch")

    async def stop(self) -> None:
        """Stop to watch."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    def begin_leg(self, node: Node) -> None:
        """Count a leg in; `end_leg` counts it out."""
        self.in_flight[node.info.node_id] += 1

    def end_leg(self, node: Node) -> None:
        """Count a leg out."""
        node_id = node.info.node_id
        self.in_flight[node_id] -= 1
        if self.in_flight[node_id] <= 0:
            # Node ids come and go; the counter must not grow with them.
            del self.in_flight[node_id]

    async def _watch(self) -> None:
        while True:
            try:
                async for nodes in self._health.watch():
                    self.nodes = tuple(nodes)
            except Exception as error:  # noqa: BLE001 - the view outlives whatever health does
                _log.warning("fleet_watch_failed", error=repr(error))
            await asyncio.sleep(_REWATCH_DELAY_S)
