"""Heartbeat and watch streams over a real server: restarts, leftovers, stops, outages."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING

import grpc.aio
import pytest

from kvtide.health import (
    GrpcNodeHealth,
    LocalNodeHealth,
    NodeRole,
    NodeState,
    health_service,
    wire,
)
from kvtide.runtime import (
    FailedPrecondition,
    InvalidArgument,
    ManualClock,
    Unavailable,
    error_from_rpc,
    open_channel,
    start_grpc_server,
)
from kvtide.v1 import node_pb2 as pb
from kvtide.v1 import node_pb2_grpc as pb_grpc
from tests.health.conftest import WAIT_S, ScriptedNode
from tests.health.support import make_info

if TYPE_CHECKING:
    from tests.health.conftest import Harness

pytestmark = pytest.mark.parametrize("harness", ["grpc"], indirect=True)


async def test_the_answer_says_how_often_to_report(harness: Harness) -> None:
    """The first heartbeat is answered with the interval."""
    node = await harness.node()
    assert node.answers[0].report_interval_ms == 1000


@pytest.mark.parametrize("how", ["hang_up", "break_off"])
async def test_a_lost_stream_makes_the_node_suspect(harness: Harness, how: str) -> None:
    """However a heartbeat stream ends, the node gets no new turns from then on."""
    node = await harness.node()
    await getattr(node, how)()
    await harness.until(lambda: harness.now()[0].state is NodeState.SUSPECT)


async def test_a_newer_stream_ends_the_older_one(harness: Harness) -> None:
    """The same engine reporting twice keeps the newer stream, and stays ready."""
    old = await harness.node()
    await harness.node()
    await old.wait_over()
    assert await old.call.code() == grpc.StatusCode.OK
    assert harness.now()[0].state is NodeState.READY


async def test_a_leftover_process_is_refused(harness: Harness) -> None:
    """A stream of a replaced epoch gets FAILED_PRECONDITION while the newer one reports."""
    await harness.node()
    await harness.node(make_info(epoch="epoch-b"))
    leftover = ScriptedNode(harness.channel)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await leftover.begin()
    assert isinstance(error_from_rpc(caught.value), FailedPrecondition)


@pytest.mark.parametrize(
    "first",
    [
        None,
        pb.ReportRequest(http_serving=True),
        pb.ReportRequest(info=pb.NodeInfo(node_id="n", epoch="e", engine_url="http://h:1")),
        pb.ReportRequest(info=pb.NodeInfo(epoch="e", role=pb.NODE_ROLE_DECODE)),
    ],
    ids=["nothing", "no info", "no role", "no node id"],
)
async def test_a_stream_must_begin_with_info(
    harness: Harness, first: pb.ReportRequest | None
) -> None:
    """Without proper facts a stream ends with INVALID_ARGUMENT, and no node appears."""
    call = pb_grpc.NodeHealthServiceStub(harness.channel).Report()
    if first is not None:
        await call.write(first)
    await call.done_writing()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert isinstance(error_from_rpc(caught.value), InvalidArgument)
    assert harness.now() == []


async def test_a_second_info_is_an_error(harness: Harness) -> None:
    """A stream speaks for one engine start from beginning to end."""
    node = await harness.node()
    await node.call.write(pb.ReportRequest(info=wire.info_to_proto(make_info("other"))))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await node.wait_over()
    assert isinstance(error_from_rpc(caught.value), InvalidArgument)
    harness.nodes.clear()


async def test_stop_ends_all_streams_cleanly(harness: Harness) -> None:
    """When node health stops, heartbeats and watches end with OK, and the server can stop."""
    node = await harness.node()
    watch = pb_grpc.NodeHealthServiceStub(harness.channel).WatchNodes(pb.WatchNodesRequest())
    assert len((await watch.read()).nodes) == 1
    await harness.local.stop()
    await node.wait_over()
    assert await node.call.code() == grpc.StatusCode.OK
    async with asyncio.timeout(WAIT_S):
        while await watch.read() is not grpc.aio.EOF:
            pass
        assert await watch.code() == grpc.StatusCode.OK
        await harness.server.stop(grace_s=WAIT_S)


async def test_a_watch_survives_a_restart_of_the_service(harness: Harness) -> None:
    """A watcher reconnects by itself, and in between the last view stands."""
    address = harness.server.address
    await harness.node(make_info("before"))
    remote = harness.health
    async with aclosing(remote.watch()) as fleets:
        assert len(await asyncio.wait_for(anext(fleets), WAIT_S)) == 1
        following = asyncio.create_task(anext(fleets))
        await harness.local.stop()
        await harness.server.stop(grace_s=1.0)
        assert [node.info.node_id for node in await remote.list_nodes()] == ["before"]

        second = LocalNodeHealth(clock=ManualClock())
        server = await start_grpc_server(address, [health_service(second)])
        second.connect_node(
            make_info("after", role=NodeRole.PREFILL),
            wire.load_from_proto(pb.NodeLoad()),
            http_serving=True,
        )
        fleet = await asyncio.wait_for(following, WAIT_S)
        assert [node.info.node_id for node in fleet] == ["after"]
    await second.stop()
    await server.stop(grace_s=1.0)


async def test_a_watch_may_begin_before_the_service_does(harness: Harness) -> None:
    """A watcher of a service that is not there yet waits for it; a list says that it is not."""
    await harness.server.stop(grace_s=0.0)
    address = harness.server.address
    async with open_channel(address) as channel:
        remote = GrpcNodeHealth(channel, first_retry_s=0.01)
        with pytest.raises(Unavailable):
            await remote.list_nodes()
        async with aclosing(remote.watch()) as fleets:
            first = asyncio.create_task(anext(fleets))
            await asyncio.sleep(0.05)
            assert not first.done()
            late = LocalNodeHealth(clock=ManualClock())
            server = await start_grpc_server(address, [health_service(late)])
            assert await asyncio.wait_for(first, WAIT_S) == []
        await late.stop()
        await server.stop(grace_s=1.0)


async def test_a_watcher_that_leaves_is_forgotten(harness: Harness) -> None:
    """Leaving a watch ends its stream on the server, so that the server can stop at once."""
    async with aclosing(harness.health.watch()) as fleets:
        await asyncio.wait_for(anext(fleets), WAIT_S)
    async with asyncio.timeout(WAIT_S):
        await harness.server.stop(grace_s=WAIT_S * 2)


def test_values_of_a_newer_version(harness: Harness) -> None:
    """A state that is not known gets no new turns; a node of an unknown role is left out."""
    message = pb.Node(info=wire.info_to_proto(make_info()), state=99)  # type: ignore[arg-type]
    assert wire.node_from_proto(message).state is NodeState.SUSPECT
    other = pb.Node(info=wire.info_to_proto(make_info()))
    other.info.role = 99  # type: ignore[assignment]
    assert len(wire.nodes_from_proto([message, other])) == 1
