"""The Attach stream over a real server: grants, releases, restarts, replaced streams, stops."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

import grpc.aio
import pytest
import structlog

from kvtide.registry import (
    ConversationKey,
    GrpcLeaseRegistry,
    LeaseRules,
    LeaseState,
    LocalLeaseRegistry,
    MissReason,
    ReadOutcome,
    Settlement,
    registry_service,
    wire,
)
from kvtide.registry.events import EngineReport
from kvtide.registry.links import MAX_BATCH, MAX_PENDING_RELEASES, EngineLink
from kvtide.runtime import (
    FailedPrecondition,
    InvalidArgument,
    ManualClock,
    Unavailable,
    error_from_rpc,
    open_channel,
    start_grpc_server,
)
from kvtide.v1 import lease_pb2 as pb
from kvtide.v1 import lease_pb2_grpc as pb_grpc
from tests.registry.scripted_engine import WAIT_S, ScriptedEngine
from tests.registry.support import EPOCH, FLOOR, KEY, NODE, make_grant

if TYPE_CHECKING:
    from tests.registry.conftest import Harness

pytestmark = pytest.mark.parametrize("harness", ["local"], indirect=True)
KEYS = [ConversationKey("t", f"c{number}") for number in range(3)]


async def test_welcome_says_how_often_to_report(harness: Harness) -> None:
    """The first answer carries the inventory interval."""
    engine = await harness.attach()
    assert engine.welcome is not None
    assert engine.welcome.inventory_interval_ms == 30_000


async def test_a_full_life(harness: Harness) -> None:
    """Grant, claim, read and the engine's word of it, over the wire."""
    engine = await harness.attach()
    turn = await harness.registry.claim(KEY)
    await engine.grant(make_grant(KEY, turn.generation, "r1"))
    await harness.until(lambda: harness.live() == 1)
    assert (await harness.registry.claim(KEY)).claimed is not None
    await engine.ended("r1", pb.LEASE_END_CAUSE_READ)
    await harness.until(lambda: harness.live() == 0)
    assert (await harness.registry.get_lease(KEY)).state is LeaseState.CONSUMED


async def test_superseded_leases_are_released(harness: Harness) -> None:
    """When the next turn leaves its own lease, the engine is told to free the one before."""
    engine = await harness.attach()
    for number in (1, 2):
        turn = await harness.registry.claim(KEY)
        if turn.claimed is not None:
            claim_id = turn.claimed.claim_id
            await harness.registry.settle(
                Settlement(KEY, turn.generation, claim_id, ReadOutcome.NOT_READ)
            )
        await engine.grant(make_grant(KEY, turn.generation, f"r{number}"))
        await harness.until(partial(live_are, harness, number))
    await engine.wait_released("r1")
    assert engine.released == ["r1"]


def live_are(harness: Harness, expected: int) -> bool:
    return harness.live() == expected


async def test_leases_outlive_a_broken_stream(harness: Harness) -> None:
    """While the stream is gone nothing is offered; after it is back everything is."""
    engine = await harness.attach()
    turn = await harness.registry.claim(KEY)
    grant = make_grant(KEY, turn.generation, "r1")
    await engine.grant(grant)
    await harness.until(lambda: harness.live() == 1)
    await engine.break_off()
    await harness.until(lambda: not harness.local._links)
    assert (await harness.registry.claim(KEY)).miss_reason == MissReason.ENGINE_DETACHED
    await harness.attach(grant)
    assert (await harness.registry.claim(KEY)).claimed is not None


async def test_a_release_that_nobody_heard_is_sent_on_the_next_stream(harness: Harness) -> None:
    """Releases are at-least-once: the inventory of a reconnected engine brings them back."""
    engine = await harness.attach()
    turn = await harness.registry.claim(KEY)
    grant = make_grant(KEY, turn.generation, "r1")
    await engine.grant(grant)
    await harness.until(lambda: harness.live() == 1)
    await engine.hang_up()
    await harness.registry.close_conversation(KEY)
    again = await harness.attach(grant)
    await again.wait_released("r1")


async def test_a_newer_stream_ends_the_older_one(harness: Harness) -> None:
    """The same engine attaching twice keeps the newer stream; the older one ends and is ignored."""
    old = await harness.attach()
    turn = await harness.registry.claim(KEY)
    grant = make_grant(KEY, turn.generation, "r1")
    new = await harness.attach(grant)
    await old.wait_over()
    assert await old.call.code() == grpc.StatusCode.OK
    await harness.registry.close_conversation(KEY)
    await new.wait_released("r1")
    assert old.released == []


async def test_a_restarted_engine_loses_its_leases(harness: Harness) -> None:
    """A new epoch under the same node id ends every lease of the old one at once."""
    engine = await harness.attach()
    turn = await harness.registry.claim(KEY)
    await engine.grant(make_grant(KEY, turn.generation, "r1"))
    await harness.until(lambda: harness.live() == 1)
    await harness.attach(epoch="epoch-b")
    assert (await harness.registry.get_lease(KEY)).state is LeaseState.LOST
    assert (await harness.registry.claim(KEY)).miss_reason == MissReason.NO_LEASE


async def test_a_leftover_process_is_refused(harness: Harness) -> None:
    """A stream of a replaced epoch gets FAILED_PRECONDITION while the newer one is attached."""
    await harness.attach()
    await harness.attach(epoch="epoch-b")
    leftover = ScriptedEngine(harness.channel, NODE, EPOCH)
    hello = pb.EngineHello(node_id=NODE, epoch=EPOCH)
    await leftover.send(pb.AttachRequest(hello=hello))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await leftover.call.read()
    error = error_from_rpc(caught.value)
    assert isinstance(error, FailedPrecondition)
    assert error.code == "newer_epoch_attached"


@pytest.mark.parametrize(
    "first",
    [
        None,
        pb.AttachRequest(),
        pb.AttachRequest(inventory=pb.EngineInventory()),
        pb.AttachRequest(hello=pb.EngineHello(epoch="e")),
        pb.AttachRequest(hello=pb.EngineHello(node_id="n")),
    ],
    ids=["nothing", "empty", "no hello", "no node id", "no epoch"],
)
async def test_a_stream_must_begin_with_hello(
    harness: Harness, first: pb.AttachRequest | None
) -> None:
    """Without a proper hello a stream ends with INVALID_ARGUMENT."""
    call = pb_grpc.LeaseRegistryServiceStub(harness.channel).Attach()
    if first is not None:
        await call.write(first)
    await call.done_writing()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert isinstance(error_from_rpc(caught.value), InvalidArgument)


async def test_a_second_hello_is_an_error(harness: Harness) -> None:
    """A stream speaks for one engine from beginning to end."""
    engine = await harness.attach()
    await engine.send(pb.AttachRequest(hello=pb.EngineHello(node_id="other", epoch="e")))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await engine.wait_over()
    assert isinstance(error_from_rpc(caught.value), InvalidArgument)
    assert harness.local._links == {}
    harness.engines.clear()


async def test_one_bad_grant_does_not_cost_the_stream(harness: Harness) -> None:
    """A malformed grant is told to be freed, and the good one beside it stands."""
    engine = await harness.attach()
    turn = await harness.registry.claim(KEY)
    good = wire.grant_to_proto(make_grant(KEY, turn.generation, "good"))
    no_key = wire.grant_to_proto(make_grant(KEY, turn.generation, "no-key"))
    no_key.ClearField("conversation")
    no_digests = wire.grant_to_proto(make_grant(KEY, turn.generation, "no-digests"))
    no_digests.ClearField("fingerprint")
    no_expiry = wire.grant_to_proto(make_grant(KEY, turn.generation, "no-expiry", expiry_s=None))
    await engine.send(pb.AttachRequest(grants=[no_key, no_digests, no_expiry, good]))
    await engine.wait_released("no-key", "no-digests", "no-expiry")
    claimed = (await harness.registry.claim(KEY)).claimed
    assert claimed is not None
    assert claimed.handle.request_id == "good"
    assert harness.local.ignored_events["grant_refused"] == 3


async def test_stop_ends_the_streams_cleanly(harness: Harness) -> None:
    """When the registry stops, engines see their stream end with OK, and the server can stop."""
    engine = await harness.attach()
    await harness.local.stop()
    await engine.wait_over()
    assert await engine.call.code() == grpc.StatusCode.OK
    async with asyncio.timeout(WAIT_S):
        await harness.server.stop(grace_s=WAIT_S)


async def test_an_empty_registry_is_right_after_one_exchange(harness: Harness) -> None:
    """An engine that brings its leases to a new registry makes it know them all at once."""
    await harness.attach(*(make_grant(key, 5, f"r-{key.conversation_id}") for key in KEYS))
    for key in KEYS:
        assert (await harness.registry.get_lease(key)).state is LeaseState.HELD
        turn = await harness.registry.claim(key)
        assert turn.generation >= FLOOR
        assert turn.miss_reason == MissReason.IN_USE
    harness.clock.advance(60.0)
    for key in KEYS:
        assert (await harness.registry.claim(key)).claimed is not None


async def test_registry_restart_on_the_same_address(harness: Harness) -> None:
    """A registry that comes back empty serves engines and turns on, with nothing lost."""
    address = harness.server.address
    engine = await harness.attach()
    turn = await harness.registry.claim(KEY)
    grant = make_grant(KEY, turn.generation, "r1")
    await engine.grant(grant)
    await harness.until(lambda: harness.live() == 1)
    await harness.local.stop()
    await engine.wait_over()
    await harness.server.stop(grace_s=1.0)
    remote = GrpcLeaseRegistry(harness.channel)
    with pytest.raises(Unavailable):
        await remote.claim(KEY)

    second = LocalLeaseRegistry(
        rules=LeaseRules(restored_wait_s=0.0), clock=ManualClock(), generation_floor=FLOOR * 2
    )
    server = await start_grpc_server(address, [registry_service(second)])
    async with second, open_channel(address) as channel:
        await asyncio.wait_for(channel.channel_ready(), WAIT_S)
        back = await ScriptedEngine(channel, NODE, EPOCH).attach(grant)
        turn = await GrpcLeaseRegistry(channel).claim(KEY)
        assert turn.generation == FLOOR * 2
        assert turn.claimed is not None
        await back.hang_up()
    await server.stop(grace_s=1.0)


async def test_the_sweep_runs_by_itself(harness: Harness) -> None:
    """A started registry ends leases without being asked."""
    await harness.attach()
    turn = await harness.registry.claim(KEY)
    await harness.engines[0].grant(make_grant(KEY, turn.generation, "r1"))
    await harness.until(lambda: harness.live() == 1)
    harness.clock.advance(1000.0)
    await harness.local.start()
    await harness.until(lambda: harness.live() == 0)


async def test_what_happens_to_a_lease_is_in_the_log(harness: Harness) -> None:
    """Attaching, granting, claiming, ending and detaching each leave one structured event."""
    with structlog.testing.capture_logs() as logs:
        engine = await harness.attach()
        turn = await harness.registry.claim(KEY)
        await engine.grant(make_grant(KEY, turn.generation, "r1"))
        await harness.until(lambda: harness.live() == 1)
        await harness.registry.claim(KEY)
        await engine.ended("r1", pb.LEASE_END_CAUSE_READ)
        await engine.hang_up()
    assert [entry["event"] for entry in logs] == [
        "engine.attached",
        "lease.granted",
        "lease.claimed",
        "lease.ended",
        "engine.detached",
    ]
    assert logs[3]["reason"] == "consumed"
    assert logs[3]["conversation_id"] == KEY.conversation_id


# ---- the outbox of one stream ------------------------------------------------------------------


def make_link() -> EngineLink:
    return EngineLink(
        NODE, EPOCH, 1, on_report=lambda link, report: None, on_close=lambda link: None
    )


async def test_commands_are_coalesced_by_lease(harness: Harness) -> None:
    """However often a release is asked for before it is sent, it is sent once, in order."""
    link = make_link()
    for request_id in ("a", "b", "a", "c", "b"):
        assert link.send_release(request_id)
    assert await link.next_releases() == ("a", "b", "c")


async def test_the_outbox_is_bounded_and_batched(harness: Harness) -> None:
    """A stream that does not read keeps a bounded number of commands, sent in batches."""
    link = make_link()
    fits = [link.send_release(f"r{number}") for number in range(MAX_PENDING_RELEASES + 5)]
    assert sum(fits) == MAX_PENDING_RELEASES
    assert link.send_release("r0"), "what is in it already needs no room"
    batch = await link.next_releases()
    assert batch is not None
    assert len(batch) == MAX_BATCH
    assert batch[0] == "r0"


async def test_a_closed_link_ends_and_reports_no_more(harness: Harness) -> None:
    """Closing twice detaches once, and what a closed stream still reports is dropped."""
    reports: list[EngineReport] = []
    closes: list[EngineLink] = []
    link = EngineLink(
        NODE, EPOCH, 1, on_report=lambda _, report: reports.append(report), on_close=closes.append
    )
    link.send_release("a")
    link.close()
    link.close()
    link.report(EngineReport())
    assert await link.next_releases() is None
    assert (reports, closes) == ([], [link])
