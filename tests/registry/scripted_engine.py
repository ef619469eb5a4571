"""A tiny engine that says on its Attach stream exactly what a test tells it to."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Self

from kvtide.registry import wire
from kvtide.v1 import lease_pb2 as pb
from kvtide.v1 import lease_pb2_grpc as pb_grpc

if TYPE_CHECKING:
    import grpc.aio

    from kvtide.registry.events import Grant

WAIT_S = 20.0
"""Patience with a busy machine; nothing is asserted about how long anything takes."""


class ScriptedEngine:
    """One stream of one engine start; an async context manager that hangs up at its end."""

    def __init__(self, channel: grpc.aio.Channel, node_id: str, epoch: str) -> None:
        self.node_id = node_id
        self.epoch = epoch
        self.released: list[str] = []
        self.welcome: pb.AttachWelcome | None = None
        self.call = pb_grpc.LeaseRegistryServiceStub(channel).Attach()
        self._news = asyncio.Condition()
        self._reader: asyncio.Task[None] | None = None
        self._over = False

    async def attach(self, *held: Grant) -> Self:
        """Say hello with an inventory, and wait for the welcome."""
        hello = pb.EngineHello(node_id=self.node_id, epoch=self.epoch)
        await self.send(pb.AttachRequest(hello=hello, inventory=inventory_of(held)))
        first = await asyncio.wait_for(self.call.read(), WAIT_S)
        self.welcome = first.welcome
        self._reader = asyncio.create_task(self._read())
        return self

    async def send(self, request: pb.AttachRequest) -> None:
        await self.call.write(request)

    async def grant(self, *grants: Grant) -> None:
        await self.send(pb.AttachRequest(grants=[wire.grant_to_proto(grant) for grant in grants]))

    async def inventory(self, *held: Grant) -> None:
        await self.send(pb.AttachRequest(inventory=inventory_of(held)))

    async def ended(self, request_id: str, cause: pb.LeaseEndCause) -> None:
        ended = pb.LeaseEnded(request_id=request_id, cause=cause)
        await self.send(pb.AttachRequest(ended=[ended]))

    async def wait_released(self, *request_ids: str) -> None:
        """Wait until all of these were named in release commands."""

        async def all_named() -> None:
            async with self._news:
                await self._news.wait_for(lambda: set(request_ids) <= set(self.released))

        await asyncio.wait_for(all_named(), WAIT_S)

    async def wait_over(self) -> None:
        """Wait until the registry ended the stream."""
        if self._reader is not None:
            await asyncio.wait_for(asyncio.shield(self._reader), WAIT_S)

    async def hang_up(self) -> None:
        """End the stream properly, from this side."""
        if not self._over:
            self._over = True
            await self.call.done_writing()
            await self.wait_over()

    async def break_off(self) -> None:
        """Lose the stream without a goodbye."""
        self._over = True
        self.call.cancel()
        if self._reader is not None:
            await asyncio.wait([self._reader])

    async def _read(self) -> None:
        # Not `async for`: gRPC does not let one call be both read and iterated over.
        while isinstance(response := await self.call.read(), pb.AttachResponse):
            async with self._news:
                self.released += [release.request_id for release in response.releases]
                self._news.notify_all()


def inventory_of(held: tuple[Grant, ...]) -> pb.EngineInventory:
    return pb.EngineInventory(held=[wire.grant_to_proto(grant) for grant in held])
