"""The lease registry over gRPC: converts messages and errors, decides nothing."""

# ruff: noqa: N802, D102, ARG002 - names and signatures are gRPC's; lease.proto documents them.

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from kvtide.registry import wire
from kvtide.runtime.errors import InvalidArgument
from kvtide.runtime.grpc_server import GrpcService
from kvtide.runtime.rpc_errors import status_errors
from kvtide.v1 import lease_pb2 as pb
from kvtide.v1 import lease_pb2_grpc as pb_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import grpc.aio

    from kvtide.registry.links import EngineLink
    from kvtide.registry.local import LocalLeaseRegistry

SERVICE_NAME = "kvtide.v1.LeaseRegistryService"

Context = Any  # grpc.aio.ServicerContext[Request, Response], generic in stubs only


class LeaseRegistryServicer(pb_grpc.LeaseRegistryServiceServicer):
    """Serves one ``LocalLeaseRegistry``; see lease.proto for the contract."""

    def __init__(self, registry: LocalLeaseRegistry) -> None:
        self._registry = registry

    @status_errors
    async def Claim(self, request: pb.ClaimRequest, context: Context) -> pb.ClaimResponse:
        result = await self._registry.claim(
            wire.key_from_proto(request.conversation),
            grant_wait_s=request.grant_wait_ms / 1000 if request.grant_wait_ms else None,
        )
        return wire.claim_result_to_proto(result)

    @status_errors
    async def Settle(self, request: pb.SettleRequest, context: Context) -> pb.SettleResponse:
        await self._registry.settle(wire.settlement_from_proto(request))
        return pb.SettleResponse()

    @status_errors
    async def CloseConversation(
        self, request: pb.CloseConversationRequest, context: Context
    ) -> pb.CloseConversationResponse:
        await self._registry.close_conversation(wire.key_from_proto(request.conversation))
        return pb.CloseConversationResponse()

    @status_errors
    async def GetLease(self, request: pb.GetLeaseRequest, context: Context) -> pb.GetLeaseResponse:
        lease = await self._registry.get_lease(wire.key_from_proto(request.conversation))
        return pb.GetLeaseResponse(lease=wire.lease_to_proto(lease))

    @status_errors
    async def ListLeases(
        self, request: pb.ListLeasesRequest, context: Context
    ) -> pb.ListLeasesResponse:
        page = await self._registry.list_leases(wire.query_from_proto(request))
        return wire.page_to_proto(page)

    @status_errors
    async def Attach(
        self, request_iterator: AsyncIterator[pb.AttachRequest], context: Context
    ) -> AsyncIterator[pb.AttachResponse]:
        first = await anext(request_iterator, None)
        if first is None or not first.HasField("hello"):
            raise InvalidArgument("no_hello", "the first message of a stream must carry hello")
        link = self._registry.attach_engine(
            first.hello.node_id, first.hello.epoch, wire.report_from_proto(first)
        )
        # Reports are read beside this generator, which waits for commands to send.
        reader = asyncio.create_task(_feed(link, request_iterator), name="registry-attach-reader")
        try:
            interval_ms = wire.ms_nearest(self._registry.inventory_interval_s)
            yield pb.AttachResponse(welcome=pb.AttachWelcome(inventory_interval_ms=interval_ms))
            while (request_ids := await link.next_releases()) is not None:
                yield pb.AttachResponse(
                    releases=[pb.LeaseRelease(request_id=request_id) for request_id in request_ids]
                )
            if reader.done():
                reader.result()
        finally:
            link.close()
            reader.cancel()
            await asyncio.wait([reader])


async def _feed(link: EngineLink, requests: AsyncIterator[pb.AttachRequest]) -> None:
    """Hand the engine's messages to the registry until the stream ends, then close the link."""
    try:
        async for request in requests:
            if request.HasField("hello"):
                raise InvalidArgument("second_hello", "only the first message may carry hello")
            link.report(wire.report_from_proto(request))
    finally:
        link.close()


def add_registry_service(server: grpc.aio.Server, registry: LocalLeaseRegistry) -> None:
    """Serve ``registry`` on ``server``. To stop, stop the registry first: it ends the streams."""
    pb_grpc.add_LeaseRegistryServiceServicer_to_server(LeaseRegistryServicer(registry), server)


def registry_service(registry: LocalLeaseRegistry) -> GrpcService:
    """``registry`` as a service for ``kvtide.runtime.start_grpc_server``."""
    return GrpcService(SERVICE_NAME, lambda server: add_registry_service(server, registry))
