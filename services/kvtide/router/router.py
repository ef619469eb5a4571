"""The router: everything of one data plane put together."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvtide.router.engines import EngineClient
from kvtide.router.fleet import FleetView
from kvtide.router.leases import LeaseDesk
from kvtide.router.legs import LegPorts
from kvtide.router.metrics import RouterMetrics
from kvtide.router.placement import fleet_is_ready
from kvtide.router.report import TurnHistory
from kvtide.router.turn import TurnEngine, TurnPorts
from kvtide.runtime import Clock, SystemClock

if TYPE_CHECKING:
    from kvtide.health.ports import Node, NodeHealth
    from kvtide.registry.ports import ConversationKey, LeaseRegistry
    from kvtide.runtime import Settings

__all__ = ["Router"]


class Router:
    """One router, served over HTTP (`start_http`), gRPC (`add_router_service`), or both.

    Owns its connections to engines; the registry and the health service are the caller's.
    Make it, `start` it and `stop` it in one event loop.
    """

    def __init__(
        self,
        settings: Settings,
        registry: LeaseRegistry,
        health: NodeHealth,
        *,
        clock: Clock | None = None,
    ) -> None:
        self.settings = settings
        self.metrics = RouterMetrics()
        self.history = TurnHistory(settings.router.turn_history)
        self.started_at = 0
        """Seconds since the epoch, for `created` fields; nothing is decided by it."""
        self._clock = clock or SystemClock()
        self._fleet = FleetView(health)
        self._desk = LeaseDesk(registry, claim_timeout_s=settings.router.claim_timeout_s)
        self._engines: EngineClient | None = None
        self._turns: TurnEngine | None = None

    @property
    def turns(self) -> TurnEngine:
        """Opens turns. Raises RuntimeError before `start`."""
        if self._turns is None:
            message = "the router has not been started"
            raise RuntimeError(message)
        return self._turns

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The fleet as node health last told it."""
        return self._fleet.nodes

    @property
    def ready(self) -> bool:
        """Whether at least one model can be served, and the router is not stopping."""
        running = self._turns is not None and not self._turns.draining
        return running and fleet_is_ready(self._fleet.nodes)

    async def start(self) -> None:
        """Start to watch the fleet. Turns are refused until it has ready engines."""
        self.started_at = int(time.time())
        self._engines = EngineClient(
            prefill_timeout_s=self.settings.router.prefill_timeout_s,
            decode_idle_timeout_s=self.settings.router.decode_idle_timeout_s,
        )
        self._turns = TurnEngine(
            TurnPorts(
                legs=LegPorts(self._fleet, self._engines, self.metrics),
                desk=self._desk,
                history=self.history,
                clock=self._clock,
                readback_enabled=self.settings.router.readback_enabled,
            )
        )
        await self._fleet.start()

    async def close_conversation(self, key: ConversationKey) -> None:
        """End a conversation and let its blocks go. Idempotent.

        Raises `Unavailable` when the registry can't be reached.
        """
        await self._desk.close_conversation(key)

    async def drain(self, drain_timeout_s: float | None = None) -> None:
        """Take no new turns, and wait for the running ones.

        After `drain_timeout_s` seconds (None: as set) they are cancelled.
        """
        if self._turns is not None:
            timeout_s = self.settings.router.drain_timeout_s
            await self._turns.drain(timeout_s if drain_timeout_s is None else drain_timeout_s)

    async def stop(self, drain_timeout_s: float | None = None) -> None:
        """Drain, settle what is left to settle, and close every connection.

        Stop the servers first: their own `stop` refuses new connections before it drains.
        """
        await self.drain(drain_timeout_s)
        await self._desk.stop()
        await self._fleet.stop()
        if self._engines is not None:
            await self._engines.close()
