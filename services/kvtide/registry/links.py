"""The registry's end of one engine's stream: reports in, release commands out."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtide.registry.events import EngineReport

MAX_PENDING_RELEASES = 10_000
"""Commands kept for a slow stream; what does not fit is repeated after the next inventory."""
MAX_BATCH = 1_000
"""Commands in one message."""


class EngineLink:
    """One stream of one engine. Made by ``LocalLeaseRegistry.attach_engine``.

    Whoever made it must ``close`` it when the stream ends.
    """

    def __init__(
        self,
        node_id: str,
        epoch: str,
        stream_id: int,
        *,
        on_report: Callable[[EngineLink, EngineReport], None],
        on_close: Callable[[EngineLink], None],
    ) -> None:
        self.node_id = node_id
        self.epoch = epoch
        self.stream_id = stream_id
        self._on_report = on_report
        self._on_close = on_close
        # An ordered set: a lease is named once, however often its release is asked for.
        self._pending: dict[str, None] = {}
        self._wake = asyncio.Event()
        self._ended = False

    def report(self, report: EngineReport) -> None:
        """Hand one message of the engine to the registry; ignored once the link has ended."""
        if not self._ended:
            self._on_report(self, report)

    async def next_releases(self) -> tuple[str, ...] | None:
        """Wait for release commands: request ids, each once, oldest first, at most MAX_BATCH.

        None: the link has ended, because it was closed, a newer stream replaced
        it, or the registry stops. One task at a time may wait.
        """
        while not self._ended:
            if self._pending:
                batch = tuple(self._pending)[:MAX_BATCH]
                for request_id in batch:
                    del self._pending[request_id]
                return batch
            self._wake.clear()
            await self._wake.wait()
        return None

    def close(self) -> None:
        """The stream has ended: the engine counts as detached, unless it was replaced before.

        Harmless when called again.
        """
        if not self._ended:
            self.end()
            self._on_close(self)

    def end(self) -> None:
        """Let ``next_releases`` return None. For the registry; streams call ``close``."""
        self._ended = True
        self._wake.set()

    def send_release(self, request_id: str) -> bool:
        """Queue a release command; False when the queue is full."""
        if len(self._pending) >= MAX_PENDING_RELEASES and request_id not in self._pending:
            return False
        self._pending[request_id] = None
        self._wake.set()
        return True
