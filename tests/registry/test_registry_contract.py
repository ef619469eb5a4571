"""The LeaseRegistry contract, in this process and over gRPC: the caller can't tell."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from kvtide.registry import (
    ConversationKey,
    LeaseQuery,
    LeaseState,
    MissReason,
    ReadOutcome,
    Settlement,
)
from kvtide.registry.ports import EndReason
from kvtide.runtime import InvalidArgument, NotFound, Unavailable
from kvtide.v1 import lease_pb2 as pb
from tests.registry.support import EPOCH, FLOOR, KEY, NODE, TTL_S, make_grant

if TYPE_CHECKING:
    from kvtide.registry import ClaimedLease
    from tests.registry.conftest import Harness


async def held(harness: Harness, *, time_left_s: float = TTL_S) -> int:
    """Open a turn and have its lease granted; gives the turn's generation."""
    engine = await harness.attach()
    turn = await harness.registry.claim(KEY)
    await engine.grant(make_grant(KEY, turn.generation, "request-1", time_left_s=time_left_s))
    await harness.until(lambda: harness.live() == 1)
    return turn.generation


async def claimed(harness: Harness) -> tuple[int, ClaimedLease]:
    await held(harness)
    turn = await harness.registry.claim(KEY)
    assert turn.claimed is not None
    return turn.generation, turn.claimed


async def test_first_turn_has_a_generation_and_no_lease(harness: Harness) -> None:
    """A conversation's first turn is opened and told that there is nothing to read."""
    turn = await harness.registry.claim(KEY)
    assert turn.generation == FLOOR
    assert turn.claimed is None
    assert turn.miss_reason == MissReason.NO_LEASE


async def test_second_turn_claims_what_the_first_one_left(harness: Harness) -> None:
    """The claim carries everything that the prefill engine needs, with the claim's deadline."""
    generation = await held(harness)
    grant = make_grant(KEY, generation, "request-1")
    turn = await harness.registry.claim(KEY)
    assert turn.generation == generation + 1
    assert turn.miss_reason == ""
    lease = turn.claimed
    assert lease is not None
    assert lease.node_id == NODE
    assert lease.generation == generation
    assert lease.handle.request_id == "request-1"
    assert lease.handle.block_groups == grant.handle.block_groups
    assert lease.handle.token_count == grant.handle.token_count
    assert lease.fingerprint == grant.fingerprint
    assert lease.claim_time_left_s == 60.0
    assert lease.ttl_s == TTL_S
    assert grant.handle.engine_clock_expiry_s is not None
    assert lease.handle.engine_clock_expiry_s == grant.handle.engine_clock_expiry_s - 5.0 - 420.0


async def test_claims_are_exclusive(harness: Harness) -> None:
    """Of many turns at once exactly one gets the lease, and all get their own generation."""
    await held(harness)
    turns = await asyncio.gather(*(harness.registry.claim(KEY) for _ in range(8)))
    assert sum(turn.claimed is not None for turn in turns) == 1
    assert len({turn.generation for turn in turns}) == 8
    assert {turn.miss_reason for turn in turns} == {"", MissReason.IN_USE}


@pytest.mark.parametrize(
    ("outcome", "state"),
    [
        (ReadOutcome.READ, LeaseState.CONSUMED),
        (ReadOutcome.NOT_READ, LeaseState.HELD),
        (ReadOutcome.UNKNOWN, LeaseState.CLAIMED),
        (ReadOutcome.UNSPECIFIED, LeaseState.CLAIMED),
    ],
)
async def test_settle(harness: Harness, outcome: ReadOutcome, state: LeaseState) -> None:
    """Settling says what became of the read, and may be repeated."""
    generation, lease = await claimed(harness)
    settlement = Settlement(KEY, generation, lease.claim_id, outcome)
    await harness.registry.settle(settlement)
    await harness.registry.settle(settlement)
    assert (await harness.registry.get_lease(KEY)).state is state


async def test_settle_of_what_nobody_knows_is_no_error(harness: Harness) -> None:
    """A claim that ended long ago, or never was, can still be settled."""
    await harness.registry.settle(Settlement(KEY, 7, "no-such-claim", ReadOutcome.READ))
    with pytest.raises(NotFound):
        await harness.registry.get_lease(KEY)


async def test_the_next_turn_waits_for_a_grant_that_is_on_its_way(harness: Harness) -> None:
    """A turn that arrives between settle and grant waits for the grant and then claims it."""
    engine = await harness.attach()
    first = await harness.registry.claim(KEY)
    await harness.registry.settle(Settlement(KEY, first.generation, grant_expected=True))
    claims = [asyncio.create_task(harness.registry.claim(KEY, grant_wait_s=30.0)) for _ in range(2)]
    await harness.until(lambda: KEY in harness.local._grant_waits._waiting)
    await engine.grant(make_grant(KEY, first.generation, "request-1"))
    turns = await asyncio.gather(*claims)
    assert sorted(turn.miss_reason for turn in turns) == ["", MissReason.IN_USE]
    assert harness.local._grant_waits._waiting == {}


@pytest.mark.parametrize("grant_wait_s", [None, 0.0, 0.01, 30.0])
async def test_a_grant_that_does_not_come_costs_a_short_wait(
    harness: Harness, grant_wait_s: float | None
) -> None:
    """Without its grant a turn goes on, whatever wait was asked for."""
    await harness.attach()
    first = await harness.registry.claim(KEY)
    await harness.registry.settle(Settlement(KEY, first.generation, grant_expected=True))
    turn = await harness.registry.claim(KEY, grant_wait_s=grant_wait_s)
    assert turn.miss_reason == MissReason.NO_LEASE
    assert harness.local._grant_waits._waiting == {}


async def test_a_cancelled_wait_opens_no_turn(harness: Harness) -> None:
    """A client that leaves while its claim waits leaves nothing behind."""
    await harness.attach()
    first = await harness.registry.claim(KEY)
    await harness.registry.settle(Settlement(KEY, first.generation, grant_expected=True))
    claim = asyncio.create_task(harness.registry.claim(KEY, grant_wait_s=30.0))
    await harness.until(lambda: KEY in harness.local._grant_waits._waiting)
    claim.cancel()
    with pytest.raises(asyncio.CancelledError):
        await claim
    await harness.until(lambda: not harness.local._grant_waits._waiting)
    assert (await harness.registry.claim(KEY, grant_wait_s=0.0)).generation == first.generation + 1


async def test_close_releases_on_the_engine(harness: Harness) -> None:
    """Closing a conversation frees its blocks, and closing it again is harmless."""
    await held(harness)
    await harness.registry.close_conversation(KEY)
    await harness.registry.close_conversation(KEY)
    engine = harness.engines[0]
    await engine.wait_released("request-1")
    await engine.ended("request-1", pb.LEASE_END_CAUSE_RELEASED)
    await harness.until(lambda: harness.live() == 0)
    lease = await harness.registry.get_lease(KEY)
    assert (lease.state, lease.end_reason) == (LeaseState.RELEASED, EndReason.CLOSED)
    assert engine.released == ["request-1"]


async def test_get_shows_everything(harness: Harness) -> None:
    """A lease on record can be looked at, with the time that is left by the registry's clock."""
    generation = await held(harness)
    harness.clock.advance(80.0)
    lease = await harness.registry.get_lease(KEY)
    assert (lease.key, lease.generation) == (KEY, generation)
    assert (lease.node_id, lease.epoch) == (NODE, EPOCH)
    assert (lease.state, lease.end_reason) == (LeaseState.HELD, None)
    assert (lease.token_count, lease.block_count) == (40, 3)
    assert lease.time_left_s == TTL_S - 80.0


async def test_expiry_by_the_clock_alone(harness: Harness) -> None:
    """A late turn finds an expired lease, and nothing to read."""
    await held(harness)
    harness.clock.advance(TTL_S)
    assert (await harness.registry.claim(KEY)).miss_reason == MissReason.NO_LEASE
    lease = await harness.registry.get_lease(KEY)
    assert (lease.state, lease.time_left_s) == (LeaseState.EXPIRED, 0.0)


async def test_the_last_seconds_are_not_offered(harness: Harness) -> None:
    """A lease with too little time for queueing and transfer is not claimed, and says so."""
    await held(harness, time_left_s=30.0)
    harness.clock.advance(20.5)
    assert (await harness.registry.claim(KEY)).miss_reason == MissReason.TOO_LITTLE_TIME


async def test_list_pages_and_filters(harness: Harness) -> None:
    """Listing goes newest first, in pages, and each filter narrows it."""
    engine = await harness.attach()
    for number in range(5):
        key = ConversationKey(f"tenant-{number % 2}", f"c{number}")
        turn = await harness.registry.claim(key)
        await engine.grant(make_grant(key, turn.generation, f"r{number}"))
    await harness.until(lambda: harness.live() == 5)
    names = []
    query = LeaseQuery(page_size=2)
    while True:
        page = await harness.registry.list_leases(query)
        names += [lease.key.conversation_id for lease in page.leases]
        if not page.next_page_token:
            break
        query = LeaseQuery(page_size=2, page_token=page.next_page_token)
    assert names == ["c4", "c3", "c2", "c1", "c0"]
    only = await harness.registry.list_leases(LeaseQuery(tenant="tenant-1", node_id=NODE))
    assert [lease.key.conversation_id for lease in only.leases] == ["c3", "c1"]
    assert (await harness.registry.list_leases(LeaseQuery(state=LeaseState.LOST))).leases == ()


@pytest.mark.parametrize("bad", [LeaseQuery(page_size=-1), LeaseQuery(page_token="nonsense")])
async def test_bad_queries(harness: Harness, bad: LeaseQuery) -> None:
    """A negative page size and a foreign page token are the caller's errors."""
    with pytest.raises(InvalidArgument) as caught:
        await harness.registry.list_leases(bad)
    assert caught.value.code in {"invalid_page_size", "invalid_page_token"}


async def test_bad_arguments(harness: Harness) -> None:
    """Impossible arguments are named in an error and change nothing."""
    with pytest.raises(InvalidArgument, match="grant_wait_s"):
        await harness.registry.claim(KEY, grant_wait_s=-1.0)
    with pytest.raises(InvalidArgument, match="generation") as caught:
        await harness.registry.settle(Settlement(KEY, 0))
    assert caught.value.code == "invalid_generation"


async def test_not_found_names_the_conversation(harness: Harness) -> None:
    """Asking for a lease that is not there says which conversation was asked for."""
    with pytest.raises(NotFound, match="conversation-1") as caught:
        await harness.registry.get_lease(KEY)
    assert caught.value.code == "no_lease"


async def test_a_stopped_registry_is_unavailable(harness: Harness) -> None:
    """After stop every call says so, and a claim that was waiting does not hang."""
    first = await harness.registry.claim(KEY)
    await harness.registry.settle(Settlement(KEY, first.generation, grant_expected=True))
    waiting = asyncio.create_task(harness.registry.claim(KEY, grant_wait_s=30.0))
    await harness.until(lambda: KEY in harness.local._grant_waits._waiting)
    await harness.local.stop()
    with pytest.raises(Unavailable) as caught:
        await waiting
    assert caught.value.code == "registry_stopped"
    for call in (
        harness.registry.claim(KEY),
        harness.registry.settle(Settlement(KEY, 1)),
        harness.registry.close_conversation(KEY),
        harness.registry.get_lease(KEY),
        harness.registry.list_leases(LeaseQuery()),
    ):
        with pytest.raises(Unavailable):
            await call
