"""A registry on a loopback server, seen locally and over gRPC."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from kvtide.registry import GrpcLeaseRegistry, LocalLeaseRegistry, registry_service
from kvtide.runtime import ManualClock, RegistrySettings, open_channel, start_grpc_server
from tests.registry.scripted_engine import WAIT_S, ScriptedEngine
from tests.registry.support import EPOCH, FLOOR, NODE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    import grpc.aio

    from kvtide.registry import LeaseRegistry
    from kvtide.registry.events import Grant
    from kvtide.runtime import GrpcServer


@dataclass
class Harness:
    """A running registry, a channel to it, and what a test attached."""

    registry: LeaseRegistry
    """What the test calls: the local one, or the one over gRPC."""
    local: LocalLeaseRegistry
    clock: ManualClock
    server: GrpcServer
    channel: grpc.aio.Channel
    engines: list[ScriptedEngine] = field(default_factory=list)

    async def attach(self, *held: Grant, node_id: str = NODE, epoch: str = EPOCH) -> ScriptedEngine:
        engine = ScriptedEngine(self.channel, node_id, epoch)
        self.engines.append(engine)
        return await engine.attach(*held)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that a message brings about."""
        async with asyncio.timeout(WAIT_S):
            while not condition():
                await asyncio.sleep(0.002)

    def live(self) -> int:
        """Leases on record that have not ended."""
        return sum(not lease.ended for lease in self.local._table._book.by_serial.values())


@pytest.fixture(params=["local", "grpc"])
async def harness(request: pytest.FixtureRequest) -> AsyncIterator[Harness]:
    """The same registry twice: the suite must not be able to tell which one it calls."""
    clock = ManualClock()
    local = LocalLeaseRegistry(
        RegistrySettings(grant_wait_s=0.2), clock=clock, generation_floor=FLOOR
    )
    server = await start_grpc_server("127.0.0.1:0", [registry_service(local)])
    channel = open_channel(server.address)
    registry = local if request.param == "local" else GrpcLeaseRegistry(channel)
    harness = Harness(registry, local, clock, server, channel)
    yield harness
    for engine in harness.engines:
        await engine.hang_up()
    await local.stop()
    await channel.close()
    await server.stop(grace_s=1.0)
