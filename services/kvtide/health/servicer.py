"""Node health over gRPC: converts messages and errors, decides nothing."""

# ruff: noqa: N802, D102, ARG002 - names and signatures are gRPC's; node.proto documents them.

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from kvtide.health import wire
from kvtide.runtime.errors import InvalidArgument
from kvtide.runtime.grpc_server import GrpcService
from kvtide.runtime.rpc_errors import status_errors
from kvtide.v1 import node_pb2 as pb
from kvtide.v1 import node_pb2_grpc as pb_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import grpc.aio

    from kvtide.health.links import NodeLink
    from kvtide.health.local import LocalNodeHealth

SERVICE_NAME = "kvtide.v1.NodeHealthService"

Context = Any  # grpc.aio.ServicerContext[Request, Response], generic in stubs only


class NodeHealthServicer(pb_grpc.NodeHealthServiceServicer):
    """Serves one ``LocalNodeHealth``; see node.proto for the contract."""

    def __init__(self, health: LocalNodeHealth) -> None:
        self._health = health

    @status_errors
    async def Report(
        self, request_iterator: AsyncIterator[pb.ReportRequest], context: Context
    ) -> AsyncIterator[pb.ReportResponse]:
        first = await anext(request_iterator, None)
        if first is None or not first.HasField("info"):
            raise InvalidArgument("no_info", "the first message of a stream must carry info")
        link = self._health.connect_node(
            wire.info_from_proto(first.info),
            wire.load_from_proto(first.load),
            http_serving=first.http_serving,
        )
        # Heartbeats are read beside this generator, which waits for the end.
        reader = asyncio.create_task(_feed(link, request_iterator), name="health-report-reader")
        try:
            interval_ms = wire.milliseconds(self._health.report_interval_s)
            yield pb.ReportResponse(report_interval_ms=interval_ms)
            await link.wait_ended()
            if reader.done():
                reader.result()
        finally:
            link.close()
            reader.cancel()
            await asyncio.wait([reader])

    @status_errors
    async def ListNodes(
        self, request: pb.ListNodesRequest, context: Context
    ) -> pb.ListNodesResponse:
        return pb.ListNodesResponse(nodes=wire.nodes_to_proto(await self._health.list_nodes()))

    @status_errors
    async def WatchNodes(
        self, request: pb.WatchNodesRequest, context: Context
    ) -> AsyncIterator[pb.WatchNodesResponse]:
        async with aclosing(self._health.watch()) as fleets:
            async for nodes in fleets:
                yield pb.WatchNodesResponse(nodes=wire.nodes_to_proto(nodes))


async def _feed(link: NodeLink, requests: AsyncIterator[pb.ReportRequest]) -> None:
    """Hand the heartbeats to node health until the stream ends, then close the link."""
    try:
        async for request in requests:
            if request.HasField("info"):
                raise InvalidArgument("second_info", "only the first message may carry info")
            link.report(wire.load_from_proto(request.load), http_serving=request.http_serving)
    finally:
        link.close()


def add_health_service(server: grpc.aio.Server, health: LocalNodeHealth) -> None:
    """Serve ``health`` on ``server``. To stop, stop node health first: it ends the streams."""
    pb_grpc.add_NodeHealthServiceServicer_to_server(NodeHealthServicer(health), server)


def health_service(health: LocalNodeHealth) -> GrpcService:
    """``health`` as a service for ``kvtide.runtime.start_grpc_server``."""
    return GrpcService(SERVICE_NAME, lambda server: add_health_service(server, health))
