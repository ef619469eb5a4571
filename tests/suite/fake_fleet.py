"""The suite's fleet of fake engines: everything in the test's own process and event loop."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Self

from kvtide.registry import LeaseQuery
from kvtide.runtime.clock import ManualClock
from tests.fakes.engine import EngineConfig, FakeEngine
from tests.fakes.waiting import eventually
from tests.suite.control_plane import SETTINGS, ControlPlane
from tests.suite.fleets import Pool, Role

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kvtide.connector.pins import Pin
    from kvtide.runtime import Settings

_TTL_S = 480.0
_ENOUGH_S = 60.0


class FakeFleet:
    """Implements ``Fleet`` (and ``LeasePair``); an async context.

    All engines and the registry share one manual clock, seen with offsets of
    hours, as the clocks of different hosts are. ``engine`` holds settings of
    all engines.
    """

    def __init__(
        self,
        clock: ManualClock | None = None,
        *,
        registry_address: str = "",
        settings: Settings = SETTINGS,
        **engine: Any,
    ) -> None:
        self.clock = clock or ManualClock()
        self.control = ControlPlane(
            self.clock, registry_address=registry_address, settings=settings
        )
        self._engine = {"block_count": 2_049, "max_model_len_tokens": 8_192} | engine
        self.reference = self._make("monolith", node_id="whole-0", connector="none")
        self.prefill = self.decode = self.reference
        self.stock: tuple[FakeEngine, FakeEngine] | None = None

    # ---- Fleet -----------------------------------------------------------------

    @property
    def fleet(self) -> Self:
        """Itself: its clock is by hand anyway."""
        return self

    @property
    def base_url(self) -> str:
        """See ``Fleet``."""
        return self.control.base_url

    @property
    def grpc_address(self) -> str:
        """See ``Fleet``."""
        return self.control.grpc_address

    @property
    def reference_url(self) -> str:
        """See ``Fleet``."""
        return self.reference.url

    @property
    def model(self) -> str:
        """See ``Fleet``."""
        return self.reference.config.model

    @property
    def block_size_tokens(self) -> int:
        """See ``Fleet``."""
        return self.reference.config.block_size_tokens

    @property
    def max_model_len_tokens(self) -> int:
        """See ``Fleet``."""
        return self.reference.config.max_model_len_tokens

    async def usable_blocks(self, role: Role) -> int:
        """See ``Fleet``."""
        return self._by_role(role).pool_state().total_blocks

    async def pool(self, role: Role) -> Pool:
        """See ``Fleet``."""
        engine = self._by_role(role)
        return Pool(engine.pool_state().free_blocks, engine.leased.pins.pinned_blocks)

    async def unsafe_reads(self) -> float:
        """See ``Fleet``."""
        return self.decode.unsafe_reads + self.prefill.unsafe_reads

    async def pulled_bytes(self) -> float:
        """See ``Fleet``."""
        return self.prefill.metrics.value("vllm:nixl_bytes_transferred_sum")

    async def kill_engine(self, role: Role) -> None:
        """See ``Fleet``."""
        await self._by_role(role).kill()

    async def restart_engine(self, role: Role) -> None:
        """See ``Fleet``."""
        engine = self._by_role(role)
        await engine.restart()
        await self._wait_ready(engine)

    async def restart_services(self) -> None:
        """See ``Fleet``."""
        await self.control.stop()
        await self.control.start()
        for engine in (self.prefill, self.decode):
            await self._wait_ready(engine)

    @asynccontextmanager
    async def expiring(self) -> AsyncIterator[Self]:
        """See ``Fleet``."""
        yield self

    async def expire(self) -> None:
        """See ``LeasePair``."""
        await self.sit_out(_TTL_S + _ENOUGH_S)
        await eventually(lambda: self.decode.pool_state().pinned_requests == 0)

    async def outlast_prefill(self) -> None:
        """See ``Fleet``."""
        await self.sit_out(31.0)

    # ---- what only fake engines can do ---------------------------------------------

    def pins(self) -> list[Pin]:
        """What decode pins now."""
        return list(self.decode.leased.pins._pins.values())

    async def sit_out(self, duration_s: float) -> None:
        """See ``Fleet``: moves every clock on, once the registry knows of all that decode pins.

        A grant that were on its way meanwhile would look as if it had travelled
        for all that time.
        """
        registry = self.control.registry
        assert registry is not None

        async def told() -> bool:
            leases = (await registry.list_leases(LeaseQuery(page_size=1_000))).leases
            known = {(view.key.conversation_id, view.generation) for view in leases}
            return known >= {(p.turn.conversation_id, p.turn.generation) for p in self.pins()}

        await eventually(told)
        self.clock.advance(duration_s)

    async def stock_pair(self) -> tuple[FakeEngine, FakeEngine]:
        """A prefill and a decode engine with upstream's connector, beside the fleet."""
        if self.stock is None:
            prefill = self._make("prefill", node_id="stock-prefill", connector="stock")
            decode = self._make("decode", node_id="stock-decode", connector="stock")
            self.stock = (prefill, decode)
            for engine in self.stock:
                await engine.start()
        return self.stock

    def clear_faults(self) -> None:
        """Switch every fault off."""
        for engine in (self.prefill, self.decode):
            engine.faults.clear()

    # ---- life ------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self.control.start()
        address = {
            "registry_address": self.control.registry_address,
            "health_address": self.control.grpc_address,
            "load_failure_policy": "recompute",
        }
        self.prefill = self._make(
            "prefill",
            node_id="prefill-0",
            prefix_caching=False,
            clock_offset_s=3_600.0,
            **address,
        )
        self.decode = self._make("decode", node_id="decode-0", clock_offset_s=-7_200.0, **address)
        for engine in (self.reference, self.prefill, self.decode):
            await engine.start()
        for engine in (self.prefill, self.decode):
            await self._wait_ready(engine)
        return self

    async def __aexit__(self, *_error: object) -> None:
        engines = [self.reference, self.prefill, self.decode, *(self.stock or ())]
        for engine in engines:
            engine.resume()
            engine.faults.clear()
            await engine.stop()
        await self.control.stop()

    def _make(self, role: Any, **settings: Any) -> FakeEngine:
        config = EngineConfig(role=role, **(self._engine | settings))
        return FakeEngine(config, self.clock.monotonic_s)

    def _by_role(self, role: Role) -> FakeEngine:
        return self.prefill if role == "prefill" else self.decode

    async def _wait_ready(self, engine: FakeEngine) -> None:
        """Until the router places turns on this very start of the engine."""
        node_id, epoch = engine.config.node_id, engine.engine_id

        def placed() -> bool:
            router = self.control.router
            assert router is not None
            return any(
                (node.info.node_id, node.info.epoch, node.state) == (node_id, epoch, "ready")
                for node in router.nodes
            )

        await eventually(placed)
        registry = self.control.registry
        if registry is not None:
            await eventually(lambda: node_id in registry._links)
