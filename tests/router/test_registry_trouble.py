"""A registry that is down, slow or wrong never fails a turn."""

from __future__ import annotations

import asyncio

import pytest

from kvtide.registry import ReadOutcome
from kvtide.runtime import Unavailable
from tests.router.harness import Harness, until


@pytest.mark.parametrize(
    "error", [Unavailable("registry_down", "gone"), RuntimeError("bug"), TimeoutError()]
)
async def test_a_registry_that_fails_costs_only_the_reuse(harness: Harness, error):
    """The turn is served by plain prefill, says why, and decode pins nothing."""
    harness.registry.fail = error
    answered = await harness.chat()
    assert answered.status == 200
    assert answered.report["reuse"] == "registry_unavailable"
    assert harness.d1.requests[0].own == {"prompt_digest": "d1ge57"}
    assert harness.registry.settlements == []


async def test_a_registry_that_comes_back_is_used_again(harness: Harness):
    """One turn without, the next with."""
    harness.registry.fail = Unavailable("registry_down", "gone")
    await harness.chat()
    harness.registry.fail = None
    await harness.chat()
    assert (await harness.chat()).report["reuse"] == "pulled"


async def test_a_slow_registry_is_not_waited_for_and_its_late_lease_is_given_back():
    """Past claim_timeout_s the turn goes on without; the claim that comes late is returned."""
    harness = Harness(claim_timeout_s=0.3)
    await harness.start()
    try:
        await harness.chat()
        gate = harness.registry.claim_gate = asyncio.Event()
        answered = await harness.chat()
        assert answered.report["reuse"] == "registry_unavailable"
        assert answered.report["pulled_tokens"] == 0
        gate.set()
        late = (await harness.settled(2))[1]
        assert late.claim_id
        assert late.read_outcome is ReadOutcome.NOT_READ
        harness.registry.claim_gate = None
        assert (await harness.chat()).report["reuse"] == "pulled"
    finally:
        await harness.stop()


async def test_a_settlement_that_fails_is_nobodys_problem(harness: Harness):
    """The client has its answer; the next turn is served."""
    await harness.chat()
    harness.registry.settle_gate = asyncio.Event()
    second = asyncio.create_task(harness.chat())
    await second
    await until(lambda: len(harness.registry.settlements) == 2, "the settlement")
    harness.registry.fail = RuntimeError("bug")
    harness.registry.settle_gate.set()
    await harness.quiet()
    harness.registry.fail = None
    assert (await harness.chat()).status == 200


async def test_a_settlement_that_hangs_delays_the_conversation_only_for_the_claim_timeout():
    """The next turn of the conversation gives the registry up like any slow one."""
    harness = Harness(claim_timeout_s=0.3)
    await harness.start()
    try:
        gate = harness.registry.settle_gate = asyncio.Event()
        await harness.chat()
        assert (await harness.chat()).report["reuse"] == "registry_unavailable"
        gate.set()
        await harness.settled(1)
    finally:
        await harness.stop()


async def test_closing_a_conversation_without_a_registry_is_a_503(harness: Harness):
    """Whether the blocks were freed is unknown, so it is not called done."""
    harness.registry.fail = Unavailable("registry_down", "gone")
    answered = await harness.request("DELETE", "/v1/conversations/s")
    assert answered.status == 503
    assert answered.error["code"] == "registry_down"


async def test_a_lease_that_ran_out_is_not_offered(harness: Harness):
    """After the TTL the next turn recomputes, and says so."""
    await harness.chat()
    harness.clock.advance(481)
    # The engines' heartbeats go on: only the lease is old.
    answered = await harness.chat()
    assert answered.status == 200
    assert answered.report["reuse"] == "no_lease"


async def test_a_lease_of_a_detached_engine_is_not_offered(harness: Harness):
    """While decode has no stream to the registry its leases are not read."""
    await harness.chat()
    harness.lease_links["d1"].close()
    assert (await harness.chat()).report["reuse"] == "engine_detached"
