"""One fake engine: its parts wired together, and what tests may do to it."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING

from tests.fakes.engine.blocks import BlockPool, PoolState
from tests.fakes.engine.config import EngineClock, EngineConfig
from tests.fakes.engine.connector import Connector, NoConnector
from tests.fakes.engine.faults import Faults
from tests.fakes.engine.leased import LeasedConnector
from tests.fakes.engine.metrics import EngineMetrics
from tests.fakes.engine.nixl import StockConnector
from tests.fakes.engine.scheduler import EngineCore, EngineKilledError
from tests.fakes.engine.server import EngineServer
from tests.fakes.engine.transport import SideChannel

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any


class FakeEngine:
    """A vLLM engine without the tensors, in this process or (``__main__``) one of its own.

    Each ``start`` is a new engine: another ``engine_id``, an empty pool, and
    counters at 0, on the ports of the first start. ``clock_source`` gives
    seconds; pins and declined reads go by it.
    """

    def __init__(
        self, config: EngineConfig, clock_source: Callable[[], float] = perf_counter
    ) -> None:
        self.config = config
        self.clock = EngineClock(clock_source, config.clock_offset_s)
        self.faults = Faults()
        self.engine_id = ""
        self.running = False
        self._dying: set[asyncio.Task[None]] = set()
        self._leaving: set[asyncio.Task[None]] = set()
        self._build()

    def _build(self) -> None:
        config = self.config
        self.engine_id = str(uuid.uuid4())
        self.metrics = EngineMetrics(config.model)
        self.pool = BlockPool(
            config.block_count, config.block_size_tokens, caching=config.prefix_caching
        )
        connector: Connector = NoConnector()
        self.nixl: StockConnector | None = None
        if config.connector != "none":
            kind = LeasedConnector if config.connector == "leased" else StockConnector
            connector = self.nixl = kind(
                config, self.engine_id, self.pool, self.clock, self.metrics
            )
        self.core = EngineCore(
            config, self.pool, connector, self.faults, self.metrics, self._core_died
        )
        self.server = EngineServer(config, self.core, self.faults, self.metrics)
        self._side_channel: SideChannel | None = None
        if self.nixl is not None:
            self.nixl.wake = self.core.wake
            self._side_channel = SideChannel(
                config, self.engine_id, self.pool, self.clock, self.faults, self.nixl.notified
            )

    @property
    def url(self) -> str:
        """Base URL of the OpenAI endpoint, without a path."""
        return f"http://{self.config.host}:{self.config.http_port}"

    @property
    def leased(self) -> LeasedConnector:
        """The leased connector; only for engines that have it."""
        assert isinstance(self.nixl, LeasedConnector)
        return self.nixl

    def pool_state(self) -> PoolState:
        """The pool as it is now."""
        return self.core.pool_state()

    @property
    def unsafe_reads(self) -> float:
        """Reads of this engine's blocks after it had let them go."""
        return self.metrics.value("vllm:nixl_num_notifications_after_expiry_total")

    async def start(self) -> None:
        """Start on the configured ports, or on any and then keep them."""
        if self.running:
            msg = f"engine {self.config.node_id} is running"
            raise RuntimeError(msg)
        if self._side_channel is not None and self.nixl is not None:
            await self._side_channel.listener.start(self.config.side_channel_port)
            self.nixl.side_channel_port = self._side_channel.listener.port
        self.core.start()
        await self.server.listener.start(self.config.http_port)
        self.config = replace(
            self.config,
            http_port=self.server.listener.port,
            side_channel_port=self.nixl.side_channel_port if self.nixl else 0,
        )
        if isinstance(self.nixl, LeasedConnector):
            self.nixl.start_agent(self.url)
        self.running = True

    async def stop(self) -> None:
        """Shut down as on SIGTERM. Does nothing when stopped already."""
        if self.running:
            self.running = False
            await self._stop_agent()
            await self.server.listener.stop()
            if self._side_channel is not None:
                await self._side_channel.listener.stop()
            await self._end()
        await asyncio.gather(*self._leaving)

    async def kill(self) -> None:
        """Die as on SIGKILL: connections reset, nothing freed, nobody told."""
        if self.running:
            self.running = False
            # Its threads may take a moment to notice; a killed process takes none.
            _background(self._stop_agent(), self._leaving)
            await self.server.listener.kill()
            if self._side_channel is not None:
                await self._side_channel.listener.kill()
            await self._end()

    async def restart(self) -> None:
        """Kill the engine and start a new one on the same ports."""
        await asyncio.gather(*self._dying)
        await self.kill()
        self.faults.clear()
        self._build()
        await self.start()

    def hang(self) -> None:
        """Stop as on SIGSTOP: connections are accepted, nothing is answered or reported."""
        self.faults.step_gate.clear()
        self.server.listener.hang()
        if self._side_channel is not None:
            self._side_channel.listener.hang()
        if isinstance(self.nixl, LeasedConnector):
            self.nixl.awake.clear()

    def resume(self) -> None:
        """Go on as on SIGCONT."""
        self.faults.step_gate.set()
        self.server.listener.resume()
        if self._side_channel is not None:
            self._side_channel.listener.resume()
        if isinstance(self.nixl, LeasedConnector):
            self.nixl.awake.set()

    async def _end(self) -> None:
        await self.core.stop()
        if self.nixl is not None:
            await self.nixl.close()

    async def _stop_agent(self) -> None:
        # The connector of this start: a restart replaces it.
        if isinstance(self.nixl, LeasedConnector):
            await asyncio.to_thread(self.nixl.stop_agent)

    def _core_died(self, error: BaseException) -> None:
        """The server goes down with its core once it has answered, as in vLLM."""
        killed = isinstance(error, EngineKilledError)
        _background(self.kill() if killed else self.stop(), self._dying)


def _background(work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
