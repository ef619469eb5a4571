"""What becomes of a turn whose prefill leg fails, with a lease in hand and without."""

from __future__ import annotations

import pytest

from kvtide.health import NodeRole
from kvtide.registry import ReadOutcome
from tests.router.harness import GRANTED_TOKENS, Harness, until
from tests.router.scripted import (
    ScriptedEngine,
    dies,
    hangs,
    prefills,
    prefills_like_stock,
    refuses,
    says,
)

FAILURES = {
    "500": refuses(500),
    "503": refuses(503),
    "dies": dies(),
    "no_json": says(b"oops"),
    "no_object": says(b"[]"),
}


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES.keys())
async def test_a_prefill_leg_that_fails_with_a_lease_is_repeated_without(harness: Harness, failure):
    """The turn is served by plain prefill, the claim is settled unknown, the reason counted."""
    await harness.chat()
    harness.p1.next.append(failure)
    answered = await harness.chat()
    assert answered.status == 200
    assert answered.report["reuse"] == "prefill_failed"
    assert answered.report["pulled_tokens"] == 0
    with_lease, without = harness.p1.requests[1:]
    assert with_lease.params["remote_num_tokens"] == GRANTED_TOKENS
    assert without.params == {"do_remote_decode": True, "do_remote_prefill": False}
    settlement = (await harness.settled(2))[1]
    assert settlement.read_outcome is ReadOutcome.UNKNOWN
    assert settlement.grant_expected
    metrics = harness.metrics()
    assert b'reuse="prefill_failed"' in metrics
    assert b"kvtide_router_leg_errors_total{kind=" in metrics


async def test_another_prefill_is_preferred_after_a_failure_with_a_lease(harness: Harness):
    """With two prefill nodes the repetition goes to the one that did not fail."""
    await harness.add("p2", NodeRole.PREFILL)
    await harness.chat()
    harness.p1.next.append(refuses(500))
    answered = await harness.chat()
    assert answered.report["prefill_node_id"] == "p2"
    assert answered.report["reuse"] == "prefill_failed"


async def test_a_prefill_that_cannot_be_reached_has_read_nothing(harness: Harness):
    """No connection, no read: the lease is free for the next turn at once."""
    await harness.chat()
    await harness.p1.stop()
    answered = await harness.chat()
    assert answered.status == 503
    assert answered.error["code"] == "engine_unavailable"
    assert answered.headers["Retry-After"]
    assert (await harness.settled(2))[1].read_outcome is ReadOutcome.NOT_READ
    port = int(harness.p1.url.rsplit(":", 1)[1])
    await harness.p1.start(port)
    assert (await harness.chat()).report["reuse"] == "pulled"


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES.keys())
async def test_a_plain_prefill_that_fails_is_tried_on_another_node(harness: Harness, failure):
    """The client sees nothing of the failure but the other node's name."""
    await harness.add("p2", NodeRole.PREFILL)
    harness.p1.next.append(failure)
    answered = await harness.chat()
    assert answered.status == 200
    assert answered.report["prefill_node_id"] == "p2"
    assert answered.report["reuse"] == "no_lease"


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (refuses(500), 502, "engine_failed"),
        (refuses(503), 503, "engine_unavailable"),
        (dies(), 502, "engine_failed"),
        (says(b"oops"), 502, "engine_failed"),
    ],
)
async def test_when_every_prefill_fails_the_client_is_told_so(
    harness: Harness, failure, status, code
):
    """Two failed tries make an honest error, and the decode engine never hears of the turn."""
    await harness.add("p2", NodeRole.PREFILL)
    harness.p1.script = harness.engines["p2"].script = failure
    answered = await harness.chat()
    assert answered.status == status
    assert answered.error["code"] == code
    assert "127.0.0.1" not in answered.error["message"]
    assert len(harness.p1.requests) + len(harness.engines["p2"].requests) == 2
    assert harness.d1.requests == []
    [settlement] = await harness.settled()
    assert not settlement.grant_expected
    assert harness.last_record()["status"] == "failed"


async def test_a_turn_that_failed_leaves_the_conversation_usable(harness: Harness):
    """After an error the next turn of the conversation is served as if nothing had been."""
    harness.p1.next.append(refuses(500))
    assert (await harness.chat()).status == 502
    assert (await harness.chat()).status == 200
    assert (await harness.chat()).report["reuse"] == "pulled"


@pytest.mark.parametrize("status", [400, 404, 413, 422, 429])
async def test_what_prefill_refuses_is_passed_on_and_not_repeated(harness: Harness, status):
    """A 4xx is the engine's answer to the client, word for word; the lease stays unread."""
    await harness.chat()
    harness.p1.next.append(refuses(status, "too long by 7 tokens", **{"Retry-After": "9"}))
    answered = await harness.chat()
    assert answered.status == status
    assert answered.error["message"] == "too long by 7 tokens"
    assert answered.headers["Retry-After"] == "9"
    assert len(harness.p1.requests) == 2
    assert len(harness.d1.requests) == 1
    settlement = (await harness.settled(2))[1]
    assert settlement.read_outcome is ReadOutcome.NOT_READ
    assert not settlement.grant_expected
    assert (await harness.chat()).report["reuse"] == "pulled"


async def test_a_refusal_that_may_come_late_leaves_the_read_unknown(harness: Harness):
    """A timeout of some proxy says nothing about what prefill has read by then."""
    await harness.chat()
    harness.p1.next.append(refuses(408))
    assert (await harness.chat()).status == 408
    assert (await harness.settled(2))[1].read_outcome is ReadOutcome.UNKNOWN


async def test_a_refusal_that_quotes_internals_is_withheld(harness: Harness):
    """Engines may quote the request in an error; handles, hosts and ports stay here."""
    await harness.chat()
    harness.p1.next.append(refuses(400, "bad input: {'kv_transfer_params': {'remote_host': 'h'}}"))
    answered = await harness.chat()
    assert answered.status == 400
    assert answered.error["code"] == "engine_refused"
    assert b"remote_host" not in answered.body


async def test_a_prefill_that_hangs_is_given_up():
    """Past prefill_timeout_s the leg counts as failed and its connection is closed."""
    harness = Harness(prefill_timeout_s=0.2)
    await harness.start()
    try:
        await harness.chat()
        harness.p1.next.append(hangs())
        answered = await harness.chat()
        assert answered.report["reuse"] == "prefill_failed"
        assert (await harness.settled(2))[1].read_outcome is ReadOutcome.UNKNOWN
        await until(lambda: harness.p1.abandoned == 1, "the abandoned request")
        assert b'kind="timeout",leg="prefill"' in harness.metrics()
    finally:
        await harness.stop()


async def test_a_prefill_without_parameters_is_counted(harness: Harness):
    """When prefill keeps no KV for decode the turn still works, and the silence is counted."""
    await harness.chat()
    harness.p1.script = prefills_like_stock()
    answered = await harness.chat()
    assert answered.status == 200
    assert answered.report["reuse"] == "unreported"
    assert answered.report["prompt_tokens"] == 77
    assert b'kind="no_params",leg="prefill"' in harness.metrics()
    assert (await harness.settled(2))[1].read_outcome is ReadOutcome.UNKNOWN


async def test_odd_counts_of_an_engine_do_no_harm(harness: Harness):
    """Numbers that are no counts are reported as zero."""
    harness.p1.script = prefills(kvtide={"prompt_tokens": "many", "pulled_tokens": -1, "reuse": 3})
    answered = await harness.chat()
    assert answered.status == 200
    assert answered.report["pulled_tokens"] == 0
    assert answered.report["prompt_tokens"] == 1000


async def test_a_redirect_of_an_engine_is_not_followed(harness: Harness):
    """An engine can't send the router elsewhere with the client's prompt."""
    elsewhere = ScriptedEngine(prefills())
    await elsewhere.start()
    harness.p1.script = refuses(307, Location=elsewhere.url + "/v1/chat/completions")
    assert (await harness.chat()).status == 502
    assert elsewhere.requests == []
    await elsewhere.stop()
