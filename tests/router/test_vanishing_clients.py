"""Clients that leave, in every phase of a turn: engines are let go, the turn is settled once."""

from __future__ import annotations

import asyncio
import json

import pytest

from kvtide.registry import ReadOutcome
from tests.router.harness import Harness, until
from tests.router.scripted import DONE, answer_events, hangs, streams

CHAT = "/v1/chat/completions"
EVENTS = answer_events(CHAT, ("a", "b", "c"))


async def second_turn_is_served(harness: Harness, reuse: str) -> None:
    harness.registry.claim_gate = None
    answered = await harness.chat()
    assert answered.status == 200
    assert answered.report["reuse"] == reuse


async def test_a_client_that_leaves_during_the_claim_gives_the_lease_back(harness: Harness):
    """The claim that nobody waits for any more is settled unread when it arrives."""
    await harness.chat()
    gate = harness.registry.claim_gate = asyncio.Event()
    client = await harness.open_chat()
    await until(lambda: harness.registry.claims_begun == 2, "the claim")
    await client.leave()
    await harness.quiet()
    assert len(harness.registry.settlements) == 1
    gate.set()
    settlement = (await harness.settled(2))[1]
    assert settlement.claim_id
    assert settlement.read_outcome is ReadOutcome.NOT_READ
    assert not settlement.grant_expected
    assert len(harness.p1.requests) == 1
    await second_turn_is_served(harness, "pulled")
    assert harness.router.history.records()[1].outcome == "aborted"


async def test_a_client_that_leaves_during_prefill_frees_the_prefill_engine(harness: Harness):
    """The prefill request is cancelled, decode never hears of it, the read stays unknown."""
    await harness.chat()
    harness.p1.next.append(hangs())
    client = await harness.open_chat()
    await until(lambda: len(harness.p1.requests) == 2, "the prefill leg")
    await client.leave()
    await until(lambda: harness.p1.abandoned == 1, "the abandoned request")
    settlement = (await harness.settled(2))[1]
    assert settlement.read_outcome is ReadOutcome.UNKNOWN
    assert not settlement.grant_expected
    assert len(harness.d1.requests) == 1
    assert harness.last_record()["status"] == "aborted"
    await second_turn_is_served(harness, "in_use")


async def test_a_client_that_leaves_during_a_plain_prefill_claims_nothing(harness: Harness):
    """Without a lease there is no read to tell of; the turn is settled all the same."""
    harness.p1.next.append(hangs())
    client = await harness.open_chat()
    await until(lambda: harness.p1.requests, "the prefill leg")
    await client.leave()
    [settlement] = await harness.settled()
    assert (settlement.claim_id, settlement.read_outcome) == ("", ReadOutcome.UNSPECIFIED)


async def test_a_client_that_leaves_before_the_answer_frees_the_decode_engine(harness: Harness):
    """The decode request is cancelled at admission; the lease that prefill read is gone."""
    await harness.chat()
    harness.d1.next.append(hangs())
    client = await harness.open_chat()
    await until(lambda: len(harness.d1.requests) == 2, "the decode leg")
    await client.leave()
    await until(lambda: harness.d1.abandoned == 1, "the abandoned request")
    settlement = (await harness.settled(2))[1]
    assert settlement.read_outcome is ReadOutcome.READ
    assert not settlement.grant_expected
    await second_turn_is_served(harness, "no_lease")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_during_the_answer_frees_the_decode_engine(
    harness: Harness, stream
):
    """In the middle of an answer, streamed or not, the engine is let go at once."""
    script = streams(EVENTS[:1], then="hang") if stream else hangs()
    harness.d1.next.append(script)
    client = await harness.open_chat(stream=stream)
    if stream:
        await client.read_until(b'"content":"a"')
    else:
        await until(lambda: harness.d1.requests, "the decode leg")
    await client.leave()
    await until(lambda: harness.d1.abandoned == 1, "the abandoned request")
    [settlement] = await harness.settled()
    assert not settlement.grant_expected
    assert harness.last_record()["status"] == "aborted"
    await second_turn_is_served(harness, "no_lease")


async def test_a_client_that_leaves_after_the_finish_chunk_has_its_turn_completed(
    harness: Harness,
):
    """The answer is finished: the grant is expected, whoever stayed to read the rest."""
    harness.d1.next.append(streams(EVENTS, then="hang"))
    client = await harness.open_chat()
    await client.read_until(b'"finish_reason":"stop"')
    await client.leave()
    [settlement] = await harness.settled()
    assert settlement.grant_expected
    assert harness.last_record()["status"] == "completed"
    harness.grant_now("d1", harness.d1.requests[0])
    await second_turn_is_served(harness, "pulled")


async def test_a_client_that_leaves_a_stalled_connection_is_noticed(harness: Harness):
    """A client that stops reading holds its own turn only, and leaving ends that, too."""
    big = answer_events(CHAT, ["x" * 100_000] * 200)
    harness.d1.next.append(streams([*big[:-1], big[-1]], then="end"))
    client = await harness.open_chat()
    await client.read_until(b"content")
    assert (await harness.chat("other")).status == 200
    await client.leave()
    await until(lambda: harness.d1.abandoned == 1, "the abandoned request")
    assert len(await harness.settled(2)) == 2


async def test_a_client_that_leaves_while_it_sends_starts_no_turn(harness: Harness):
    """Half a body is no request."""
    _, writer = await asyncio.open_connection("127.0.0.1", harness.http.port)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{")
    await writer.drain()
    writer.transport.abort()
    assert (await harness.chat()).status == 200
    assert len(harness.p1.requests) == 1


async def test_many_clients_that_leave_leave_nothing_behind(harness: Harness):
    """Fifty turns cut off at random-ish moments: fifty settlements, nothing in flight."""
    harness.d1.script = streams([*EVENTS, DONE])
    for index in range(50):
        client = await harness.open_chat(f"s{index}")
        for _ in range(index % 10):
            await asyncio.sleep(0)
        if index % 3 == 0:
            await until(lambda: harness.p1.requests, "a prefill leg")
        await client.leave()
    desk, registry = harness.router._desk, harness.registry

    def all_settled() -> bool:
        # The last requests may not even have been read when their clients were gone.
        settled = sorted(settlement.generation for settlement in registry.settlements)
        return not desk._tasks and settled == sorted(claim.generation for claim in registry.claims)

    await until(all_settled, "one settlement a claim")
    await harness.quiet()
    await until(all_settled, "one settlement a claim")
    assert not desk._settling


async def test_pipelined_requests_on_one_connection_are_all_answered(harness: Harness):
    """Keep-alive: one connection carries turn after turn."""
    reader, writer = await asyncio.open_connection("127.0.0.1", harness.http.port)
    raw = json.dumps(
        {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
    ).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n".encode()
    for _ in range(3):
        writer.write(head + raw)
        await reader.readuntil(b"[DONE]")
        await reader.readuntil(b"0\r\n\r\n")
    writer.close()
    assert len(harness.d1.requests) == 3
