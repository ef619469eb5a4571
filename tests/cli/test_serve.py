"""The services as processes: they come up, answer, and stop when told."""

import asyncio
import json
import signal
import urllib.request

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvtide.health import GrpcNodeHealth
from kvtide.registry import ConversationKey, GrpcLeaseRegistry
from kvtide.runtime import open_channel
from kvtide.v1 import lease_pb2, node_pb2
from kvtide.v1 import lease_pb2_grpc as lease_grpc
from kvtide.v1 import node_pb2_grpc as node_grpc
from tests.cli.processes import run, serving

ANY_GRPC = ("--grpc.listen", "127.0.0.1:0")
ANY_HTTP = ("--http.listen", "127.0.0.1:0")
SERVICES = {
    "registry": "kvtide.v1.LeaseRegistryService",
    "health": "kvtide.v1.NodeHealthService",
    "router": "kvtide.v1.RouterService",
}


async def _is_serving(address: str, name: str) -> bool:
    async with open_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
        return answer.status == health_pb2.HealthCheckResponse.SERVING


def _get(url: str) -> dict:
    with urllib.request.urlopen(url, timeout=30) as response:
        return json.load(response)


async def test_up_serves_everything_in_one_process():
    """One process has the three gRPC services on one port, and the HTTP endpoint."""
    async with serving("up", *ANY_GRPC, *ANY_HTTP) as up:
        for name in SERVICES.values():
            assert await _is_serving(up.grpc, name)
        assert await asyncio.to_thread(_get, f"http://{up.http}/health") == {"status": "ok"}
        async with open_channel(up.grpc) as channel:
            key = ConversationKey("default", "c")
            assert (await GrpcLeaseRegistry(channel).claim(key)).claimed is None
            assert await GrpcNodeHealth(channel).list_nodes() == []


async def test_services_run_apart():
    """Registry, node health and a router that uses both are three processes."""
    async with serving("registry", *ANY_GRPC) as registry, serving("health", *ANY_GRPC) as health:
        addresses = ("--registry.address", registry.grpc, "--health.address", health.grpc)
        async with serving("router", *ANY_GRPC, *ANY_HTTP, *addresses) as router:
            assert await _is_serving(registry.grpc, SERVICES["registry"])
            assert await _is_serving(health.grpc, SERVICES["health"])
            assert await _is_serving(router.grpc, SERVICES["router"])
            found = await asyncio.to_thread(_get, f"http://{router.http}/v1/models")
            assert found["data"] == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signal_stops_gracefully(number):
    """SIGTERM and Ctrl-C end a service with status 0, its streams closed."""
    async with serving("up", *ANY_GRPC, *ANY_HTTP) as up, open_channel(up.grpc) as channel:
        watch = node_grpc.NodeHealthServiceStub(channel).WatchNodes(node_pb2.WatchNodesRequest())
        assert (await watch.read()).nodes == []
        attach = lease_grpc.LeaseRegistryServiceStub(channel).Attach()
        hello = lease_pb2.EngineHello(node_id="d", epoch="e")
        await attach.write(
            lease_pb2.AttachRequest(hello=hello, inventory=lease_pb2.EngineInventory())
        )
        assert (await attach.read()).HasField("welcome")
        up.process.send_signal(number)
        assert (await up.next_event("stopping"))["signal"] == number.name
        await up.next_event("stopped")
        assert await up.wait() == 0
        watch.cancel()
        attach.cancel()


async def test_taken_port_is_an_error():
    """A second service on a port ends with status 1 and a message that names the flag."""
    async with serving("registry", *ANY_GRPC) as registry:
        finished = await run("registry", "--grpc.listen", registry.grpc)
    assert finished.status == 1
    assert f"can't listen on {registry.grpc}" in finished.err
    assert "--grpc.listen" in finished.err
    assert "Traceback" not in finished.err


async def test_taken_http_port_is_an_error():
    """A router whose HTTP port is taken stops again, and names the flag."""
    async with serving("up", *ANY_GRPC, *ANY_HTTP) as up:
        finished = await run("up", *ANY_GRPC, "--http.listen", up.http)
    assert finished.status == 1
    assert f"can't listen on {up.http}" in finished.err
    assert "--http.listen" in finished.err
    assert "Traceback" not in finished.err


async def test_settings_come_from_the_environment_too():
    """A service that is started without flags takes its settings from the environment."""
    async with serving("health", KVTIDE_GRPC__LISTEN="127.0.0.1:0") as health:
        assert not health.grpc.endswith(":7400")
