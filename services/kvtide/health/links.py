"""Node health's end of one engine's heartbeat stream."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtide.health.ports import NodeLoad


class NodeLink:
    """One heartbeat stream of one node. Made by ``LocalNodeHealth.connect_node``.

    Whoever made it must ``close`` it when the stream ends.
    """

    def __init__(
        self,
        node_id: str,
        epoch: str,
        stream_id: int,
        *,
        on_report: Callable[[NodeLink, NodeLoad, bool], None],
        on_close: Callable[[NodeLink], None],
    ) -> None:
        self.node_id = node_id
        self.epoch = epoch
        self.stream_id = stream_id
        self._on_report = on_report
        self._on_close = on_close
        self._ended = asyncio.Event()

    def report(self, load: NodeLoad, *, http_serving: bool) -> None:
        """Hand one heartbeat to node health; ignored once the link has ended."""
        if not self._ended.is_set():
            self._on_report(self, load, http_serving)

    async def wait_ended(self) -> None:
        """Wait until the link was closed, a newer stream replaced it, or node health stops."""
        await self._ended.wait()

    def close(self) -> None:
        """The stream has ended: the node is suspect, unless it was replaced before.

        Harmless when called again.
        """
        if not self._ended.is_set():
            self.end()
            self._on_close(self)

    def end(self) -> None:
        """Let ``wait_ended`` return. For node health; streams call ``close``."""
        self._ended.set()
