"""Fake engines that are gone after each test, and a client for them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from kvtide.runtime.clock import ManualClock
from tests.fakes.by_hand import ByHand
from tests.fakes.engine import EngineConfig, FakeEngine

StartEngine = Callable[..., Awaitable[FakeEngine]]


@pytest.fixture
def clock() -> ManualClock:
    """The clock of every engine that the test starts."""
    return ManualClock()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    """A client session for the test."""
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
async def start_engine(clock: ManualClock) -> AsyncIterator[StartEngine]:
    """Starts engines with small blocks, and stops them after the test."""
    started: list[FakeEngine] = []

    async def start(role: str, connector: str = "stock", **settings: Any) -> FakeEngine:
        defaults = {"node_id": f"{role}-{len(started)}", "block_size_tokens": 16}
        config = EngineConfig(role=role, connector=connector, **(defaults | settings))  # type: ignore[arg-type]
        engine = FakeEngine(config, clock.monotonic_s)
        started.append(engine)
        await engine.start()
        return engine

    yield start
    for engine in started:
        engine.resume()
        engine.faults.clear()
        await engine.stop()


@pytest.fixture
async def monolith(start_engine: StartEngine) -> FakeEngine:
    """An engine without a connector: what every answer must equal."""
    return await start_engine("monolith", "none")


class Pair:
    """A prefill and a decode engine, their legs driven by hand, and the truth."""

    def __init__(
        self,
        prefill: FakeEngine,
        decode: FakeEngine,
        monolith: FakeEngine,
        http: aiohttp.ClientSession,
    ) -> None:
        self.prefill = prefill
        self.decode = decode
        self.monolith = monolith
        self.hand = ByHand(http, prefill.url, decode.url)

    async def truth(self, prompt: str, **body: Any) -> str:
        """The monolith's answer."""
        return (await self.hand.complete(self.monolith.url, prompt, **body)).text


@pytest.fixture
async def stock(
    start_engine: StartEngine, monolith: FakeEngine, http: aiohttp.ClientSession
) -> Pair:
    """Upstream's connector on both, prefill without a prefix cache, clocks hours apart."""
    prefill = await start_engine("prefill", prefix_caching=False, clock_offset_s=7_200.0)
    decode = await start_engine("decode")
    return Pair(prefill, decode, monolith, http)
