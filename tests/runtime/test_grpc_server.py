"""The gRPC server that every service runs in."""

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvtide.runtime import (
    FailedPrecondition,
    GrpcServer,
    GrpcService,
    open_channel,
    start_grpc_server,
)
from kvtide.runtime.grpc_options import CHANNEL_OPTIONS, SERVER_OPTIONS
from kvtide.v1 import node_pb2 as pb
from kvtide.v1 import node_pb2_grpc as pb_grpc

NAME = "kvtide.v1.NodeHealthService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Servicer(pb_grpc.NodeHealthServiceServicer):
    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.release = asyncio.Event()

    async def ListNodes(self, request, context):
        self.entered.set()
        await self.release.wait()
        return pb.ListNodesResponse()


@pytest.fixture
def servicer():
    return Servicer()


@pytest.fixture
async def server(servicer):
    service = GrpcService(
        NAME, lambda server: pb_grpc.add_NodeHealthServiceServicer_to_server(servicer, server)
    )
    server = await start_grpc_server("127.0.0.1:0", [service])
    yield server
    await server.stop(grace_s=0)


async def _check(channel, name: str) -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status


async def test_address_has_the_real_port(server):
    """A server on port 0 says which port it got."""
    assert server.port > 0
    assert server.address == f"127.0.0.1:{server.port}"


@pytest.mark.parametrize("name", ["", NAME])
async def test_health_check_answers(server, name):
    """Standard health checks see the server and each service, until a stop is announced."""
    async with open_channel(server.address) as channel:
        assert await _check(channel, name) == SERVING
        await server.announce_stop()
        assert await _check(channel, name) == NOT_SERVING


async def test_reflection_lists_the_services(server):
    """Tools such as grpcurl find the service, health and reflection without proto files."""
    async with open_channel(server.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        call = stub.ServerReflectionInfo(iter([request]))
        answer = await call.read()
        call.cancel()
    names = {service.name for service in answer.list_services_response.service}
    assert names == {
        NAME,
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }


async def test_taken_port_is_an_error(server):
    """A second server on a port fails, and names the address and the setting."""
    with pytest.raises(FailedPrecondition, match=rf"{server.address}.*--grpc\.listen") as caught:
        await start_grpc_server(server.address, [])
    assert caught.value.code == "listen_failed"


async def test_stop_lets_running_calls_finish(server, servicer):
    """A call that runs when the stop comes gets its answer; a new one does not get in."""
    async with open_channel(server.address) as channel:
        stub = pb_grpc.NodeHealthServiceStub(channel)
        running = asyncio.ensure_future(stub.ListNodes(pb.ListNodesRequest()))
        await servicer.entered.wait()
        stopping = asyncio.create_task(server.stop(grace_s=60))
        async with open_channel(server.address) as late_channel:
            late = pb_grpc.NodeHealthServiceStub(late_channel)
            while True:
                # The port closes a moment after the stop began.
                servicer.entered.clear()
                attempt = asyncio.ensure_future(late.ListNodes(pb.ListNodesRequest()))
                entered = asyncio.ensure_future(servicer.entered.wait())
                await asyncio.wait([attempt, entered], return_when=asyncio.FIRST_COMPLETED)
                entered.cancel()
                if attempt.done():
                    break
            # Refused at the door, or just inside of it: the status tells which.
            with pytest.raises(grpc.aio.AioRpcError):
                await attempt
        servicer.release.set()
        assert await running == pb.ListNodesResponse()
        await stopping


async def test_stop_ends_calls_after_the_grace(server, servicer):
    """A call that outlives the grace is cancelled, so that a stop always ends."""
    async with open_channel(server.address) as channel:
        stub = pb_grpc.NodeHealthServiceStub(channel)
        running = asyncio.ensure_future(stub.ListNodes(pb.ListNodesRequest()))
        await servicer.entered.wait()
        await server.stop(grace_s=0)
        with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
            await running


async def test_bound_server_can_stop_without_a_start():
    """A process that fails between binding and serving can clean up all the same."""
    server = GrpcServer("127.0.0.1:0", [])
    await server.stop(grace_s=0)


def test_keepalive_is_agreed_on():
    """Clients ping no more often than servers allow, with and without calls."""
    client, server = dict(CHANNEL_OPTIONS), dict(SERVER_OPTIONS)
    allowed_ms = server["grpc.http2.min_ping_interval_without_data_ms"]
    assert client["grpc.keepalive_time_ms"] > allowed_ms
    assert client["grpc.keepalive_permit_without_calls"] == 1
    assert server["grpc.keepalive_permit_without_calls"] == 1
