"""Node health in this process: the detector, a clock, and the engines' streams."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Self

from kvtide.health.detector import HealthRules, NodeTable, rules_from_settings
from kvtide.health.links import NodeLink
from kvtide.runtime.clock import Clock, SystemClock
from kvtide.runtime.errors import Unavailable
from kvtide.runtime.log import get_logger
from kvtide.runtime.settings import HealthSettings

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from types import TracebackType

    from kvtide.health.ports import Node, NodeInfo, NodeLoad, NodeState

_log = get_logger(__name__)


class LocalNodeHealth:
    """Implements ``NodeHealth``, and takes in the engines' heartbeats.

    Everything runs on one event loop. ``start`` begins to sweep; without it
    silence goes unnoticed until ``sweep_now`` or ``list_nodes`` is called, which
    is how tests with a ``ManualClock`` like it.
    """

    def __init__(
        self,
        settings: HealthSettings | None = None,
        *,
        rules: HealthRules | None = None,
        clock: Clock | None = None,
    ) -> None:
        """``rules`` default to those of the settings, ``clock`` to the system's."""
        self._settings = settings or HealthSettings()
        self._clock: Clock = clock or SystemClock()
        self._table = NodeTable(rules or rules_from_settings(self._settings))
        self._stream_ids = itertools.count(1)
        self._links: dict[str, NodeLink] = {}
        self._known_states: dict[str, tuple[str, NodeState]] = {}
        self._version = 0
        self._load_changed = False
        self._changed = asyncio.Event()
        self._sweeper: asyncio.Task[None] | None = None
        self._stopped = False

    # ---- life ------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to sweep. Call once, on the loop that will use it."""
        if self._sweeper is None:
            self._sweeper = asyncio.create_task(self._sweep_forever(), name="health-sweep")

    async def stop(self) -> None:
        """End all streams and watches; from now on ``list_nodes`` raises ``Unavailable``.

        Call it before stopping the gRPC server, which waits for streams. Harmless twice.
        """
        self._stopped = True
        for link in list(self._links.values()):
            link.close()
        self._bump()
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)
            self._sweeper = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()

    # ---- NodeHealth ------------------------------------------------------------------------

    async def list_nodes(self) -> list[Node]:
        """See ``NodeHealth``."""
        self._require_running()
        self.sweep_now()
        return self._table.nodes(self._clock.monotonic_s())

    async def watch(self) -> AsyncGenerator[list[Node], None]:
        """See ``NodeHealth``. States and epochs go out at once, loads with the next sweep."""
        seen = -1
        while not self._stopped:
            if seen != self._version:
                seen = self._version
                yield self._table.nodes(self._clock.monotonic_s())
            else:
                await self._changed.wait()

    # ---- engines ---------------------------------------------------------------------------

    @property
    def report_interval_s(self) -> float:
        """How often engines shall report, in seconds."""
        return self._settings.report_interval_s

    def connect_node(self, info: NodeInfo, load: NodeLoad, *, http_serving: bool) -> NodeLink:
        """A heartbeat stream begins, with its first heartbeat.

        Replaces an older stream of the same node. Raises ``FailedPrecondition``
        (the epoch was replaced by one that is reporting) and ``Unavailable`` (stopped).
        """
        self._require_running()
        link = NodeLink(
            info.node_id,
            info.epoch,
            next(self._stream_ids),
            on_report=self._report,
            on_close=self._disconnect,
        )
        changed = self._table.register(
            info,
            link.stream_id,
            load,
            http_serving=http_serving,
            now_s=self._clock.monotonic_s(),
        )
        replaced = self._links.get(info.node_id)
        if replaced is not None:
            replaced.end()
        self._links[info.node_id] = link
        self._load_changed = True
        self._note(changed=changed)
        return link

    def _report(self, link: NodeLink, load: NodeLoad, http_serving: bool) -> None:  # noqa: FBT001
        changed = self._table.report(
            link.node_id,
            link.stream_id,
            load,
            http_serving=http_serving,
            now_s=self._clock.monotonic_s(),
        )
        self._load_changed = True
        self._note(changed=changed)

    def _disconnect(self, link: NodeLink) -> None:
        if self._links.get(link.node_id) is link:
            del self._links[link.node_id]
        now_s = self._clock.monotonic_s()
        self._note(changed=self._table.stream_broken(link.node_id, link.stream_id, now_s))

    # ---- time and changes ------------------------------------------------------------------

    def sweep_now(self) -> None:
        """Apply what silence has changed until now, and let watchers know of new loads."""
        changed = self._table.sweep(self._clock.monotonic_s())
        self._note(changed=changed)
        if self._load_changed:
            self._load_changed = False
            self._bump()

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(self._settings.report_interval_s / 2)
            self.sweep_now()

    def _note(self, *, changed: bool) -> None:
        if not changed:
            return
        self._load_changed = False
        self._bump()
        self._log_changes()

    def _bump(self) -> None:
        self._version += 1
        self._changed.set()
        # Whoever waits holds the old event; whoever comes now waits for the next change.
        self._changed = asyncio.Event()

    def _log_changes(self) -> None:
        states: dict[str, tuple[str, NodeState]] = {}
        for node in self._table.nodes(self._clock.monotonic_s()):
            node_id = node.info.node_id
            states[node_id] = (node.info.epoch, node.state)
            if self._known_states.get(node_id) != states[node_id]:
                _log.info(
                    "node.changed",
                    node_id=node_id,
                    epoch=node.info.epoch,
                    role=str(node.info.role),
                    state=str(node.state),
                    silent_s=round(node.silent_s, 3),
                )
        for node_id in self._known_states.keys() - states.keys():
            _log.info("node.forgotten", node_id=node_id)
        self._known_states = states

    def _require_running(self) -> None:
        if self._stopped:
            raise Unavailable("health_stopped", "node health is shutting down")
