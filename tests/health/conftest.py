"""Node health on a loopback server, seen locally and over gRPC."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import pytest

from kvtide.health import GrpcNodeHealth, LocalNodeHealth, NodeInfo, health_service, wire
from kvtide.runtime import HealthSettings, ManualClock, open_channel, start_grpc_server
from kvtide.v1 import node_pb2 as pb
from kvtide.v1 import node_pb2_grpc as pb_grpc
from tests.health.support import LOAD, make_info

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    import grpc.aio

    from kvtide.health import Node, NodeHealth, NodeLoad
    from kvtide.runtime import GrpcServer

WAIT_S = 20.0
"""Patience with a busy machine; nothing is asserted about how long anything takes."""


class ScriptedNode:
    """One heartbeat stream that says exactly what a test tells it to."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.call = pb_grpc.NodeHealthServiceStub(channel).Report()
        self.answers: list[pb.ReportResponse] = []
        self._reader: asyncio.Task[None] | None = None
        self.over = False

    async def begin(self, info: NodeInfo | None = None, *, up: bool = True) -> Self:
        await self.call.write(
            pb.ReportRequest(
                info=wire.info_to_proto(info or make_info()),
                load=wire.load_to_proto(LOAD),
                http_serving=up,
            )
        )
        answer = await asyncio.wait_for(self.call.read(), WAIT_S)
        self.answers.append(answer)
        self._reader = asyncio.create_task(self._read())
        return self

    async def beat(self, *, up: bool = True, load: NodeLoad = LOAD) -> None:
        await self.call.write(pb.ReportRequest(load=wire.load_to_proto(load), http_serving=up))

    async def wait_over(self) -> None:
        if self._reader is not None:
            await asyncio.wait_for(asyncio.shield(self._reader), WAIT_S)

    async def hang_up(self) -> None:
        if not self.over:
            self.over = True
            await self.call.done_writing()
            await self.wait_over()

    async def break_off(self) -> None:
        self.over = True
        self.call.cancel()
        if self._reader is not None:
            await asyncio.wait([self._reader])

    async def _read(self) -> None:
        while isinstance(answer := await self.call.read(), pb.ReportResponse):
            self.answers.append(answer)


@dataclass
class Harness:
    """Running node health, a channel to it, and the nodes that a test started."""

    health: NodeHealth
    """What the test calls: the local one, or the one over gRPC."""
    local: LocalNodeHealth
    clock: ManualClock
    server: GrpcServer
    channel: grpc.aio.Channel
    nodes: list[ScriptedNode] = field(default_factory=list)

    async def node(self, info: NodeInfo | None = None, *, up: bool = True) -> ScriptedNode:
        node = ScriptedNode(self.channel)
        self.nodes.append(node)
        return await node.begin(info, up=up)

    def now(self) -> list[Node]:
        return self.local._table.nodes(self.clock.monotonic_s())

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                await asyncio.sleep(0.002)


@pytest.fixture(params=["local", "grpc"])
async def harness(request: pytest.FixtureRequest) -> AsyncIterator[Harness]:
    """The same node health twice: the suite must not be able to tell which one it calls."""
    clock = ManualClock()
    local = LocalNodeHealth(HealthSettings(), clock=clock)
    server = await start_grpc_server("127.0.0.1:0", [health_service(local)])
    channel = open_channel(server.address)
    health = local if request.param == "local" else GrpcNodeHealth(channel, first_retry_s=0.01)
    harness = Harness(health, local, clock, server, channel)
    yield harness
    for node in harness.nodes:
        await node.hang_up()
    await local.stop()
    await channel.close()
    await server.stop(grace_s=1.0)
