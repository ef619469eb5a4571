"""What becomes of a turn whose decode leg fails, before and after its first byte."""

from __future__ import annotations

import asyncio
import json

import pytest
from aiohttp import web

from kvtide.health import NodeRole
from kvtide.registry import ReadOutcome
from kvtide.router.sse import event_data, split_events
from tests.router.harness import Harness, until
from tests.router.scripted import (
    DONE,
    answer_events,
    chunk,
    dies,
    event,
    hangs,
    refuses,
    says,
    streams,
)

CHAT = "/v1/chat/completions"
EVENTS = answer_events(CHAT, ("a", "b", "c"))
USAGE = event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}})


def error_of(last_event: bytes) -> dict[str, object]:
    error = json.loads(event_data(last_event))["error"]
    assert isinstance(error, dict)
    return error


@pytest.mark.parametrize("status", [400, 404, 422, 429, 500, 503])
async def test_what_decode_refuses_is_passed_on(harness: Harness, status):
    """The engine's own status and message reach the client; no grant is awaited."""
    await harness.chat()
    harness.d1.next.append(refuses(status, "not with me", **{"Retry-After": "3"}))
    answered = await harness.chat()
    assert answered.status == status
    assert answered.error["message"] == "not with me"
    assert answered.headers["Retry-After"] == "3"
    settlement = (await harness.settled(2))[1]
    assert settlement.read_outcome is ReadOutcome.READ
    assert not settlement.grant_expected
    assert harness.last_record()["status"] == "refused"


async def test_a_decode_node_that_cannot_be_reached_is_passed_over(harness: Harness):
    """Nothing was read from prefill yet, so another decode node may do it."""
    await harness.add("d2", NodeRole.DECODE)
    await harness.d1.stop()
    answered = await harness.chat()
    assert answered.status == 200
    assert answered.report["decode_node_id"] == "d2"
    assert b'kind="connect",leg="decode"' in harness.metrics()


async def test_when_no_decode_node_can_be_reached_the_client_is_told_so(harness: Harness):
    """The only decode node is gone: 503 with a time to come back."""
    await harness.d1.stop()
    answered = await harness.chat()
    assert answered.status == 503
    assert answered.error["code"] == "engine_unavailable"
    assert answered.headers["Retry-After"]


async def test_a_decode_leg_that_reached_its_engine_is_not_repeated(harness: Harness):
    """The engine may have read prefill's blocks, which can be read once: 502, no second try."""
    await harness.add("d2", NodeRole.DECODE)
    harness.d1.next.append(dies())
    answered = await harness.chat()
    assert answered.status == 502
    assert answered.error["code"] == "engine_failed"
    assert harness.engines["d2"].requests == []
    [settlement] = await harness.settled()
    assert not settlement.grant_expected


@pytest.mark.parametrize("cut", [1, 2])
async def test_a_stream_that_dies_ends_with_an_error_event(harness: Harness, cut):
    """The client gets what came, then a clear error, and no [DONE]."""
    kill = asyncio.Event()
    harness.d1.script = streams(EVENTS[:cut], then="die", kill=kill)
    answered = await harness.chat_until(EVENTS[cut - 1], kill)
    assert answered.status == 200
    *relayed, last = split_events(answered.body)
    assert relayed == EVENTS[:cut]
    assert error_of(last)["code"] == "engine_failed"
    assert b"[DONE]" not in answered.body
    [settlement] = await harness.settled()
    assert not settlement.grant_expected
    assert harness.last_record()["status"] == "failed"
    assert b'leg="decode"' in harness.metrics()


async def test_half_an_event_of_a_dead_stream_is_not_relayed(harness: Harness):
    """What never became a whole event could not be checked, so it stays here."""
    kill = asyncio.Event()
    harness.d1.script = streams([b": hi\n\n", EVENTS[0], EVENTS[1][:20]], "die", kill=kill)
    answered = await harness.chat_until(EVENTS[0], kill)
    _, first, last = split_events(answered.body)
    assert first == EVENTS[0]
    assert error_of(last)["type"] == "server_error"


async def test_a_stream_that_ends_without_finishing_is_an_error(harness: Harness):
    """A clean end of the connection is no end of the answer."""
    harness.d1.script = streams(EVENTS[:2])
    answered = await harness.chat()
    *relayed, last = split_events(answered.body)
    assert relayed == EVENTS[:2]
    assert error_of(last)["code"] == "engine_failed"
    assert harness.last_record()["status"] == "failed"


async def test_an_error_event_of_the_engine_is_passed_on(harness: Harness):
    """The engine's own error event is relayed as it is, once, and the turn counts as failed."""
    parts = [EVENTS[0], event({"error": {"message": "boom", "code": 500}}), DONE]
    harness.d1.script = streams(parts)
    answered = await harness.chat()
    assert answered.body == b"".join(parts)
    [settlement] = await harness.settled()
    assert not settlement.grant_expected
    assert harness.last_record()["status"] == "failed"


async def test_an_engine_that_dies_after_the_finish_chunk_has_answered(harness: Harness):
    """All of the answer is there: the end mark is supplied, the turn counts as completed."""
    kill = asyncio.Event()
    harness.d1.script = streams(EVENTS, then="die", kill=kill)
    answered = await harness.chat_until(EVENTS[-1], kill)
    assert answered.body == b"".join(EVENTS) + DONE
    [settlement] = await harness.settled()
    assert settlement.grant_expected
    assert harness.last_record()["status"] == "completed"


async def test_usage_that_was_asked_for_and_lost_is_an_error(harness: Harness):
    """When the usage chunk is missing the stream does not pretend to be whole."""
    options = {"include_usage": True}
    kill = asyncio.Event()
    harness.d1.script = streams(EVENTS, then="die", kill=kill)
    answered = await harness.chat_until(EVENTS[-1], kill, stream_options=options)
    assert error_of(split_events(answered.body)[-1])["code"] == "engine_failed"
    kill.clear()
    harness.d1.script = streams([*EVENTS, USAGE], then="die", kill=kill)
    answered = await harness.chat_until(USAGE, kill, stream_options=options)
    assert answered.body == b"".join([*EVENTS, USAGE, DONE])


@pytest.mark.parametrize("reason", ["abort", "error"])
async def test_an_answer_that_decode_gave_up_leaves_no_grant(harness: Harness, reason):
    """Decode pins only what it finished, so nothing is awaited after an abort."""
    harness.d1.script = streams([chunk(CHAT, "a", reason), DONE])
    await harness.chat()
    [settlement] = await harness.settled()
    assert not settlement.grant_expected


async def test_a_stream_that_falls_silent_is_given_up():
    """Past decode_idle_timeout_s without a byte the stream ends with an error event."""
    harness = Harness(decode_idle_timeout_s=0.2)
    await harness.start()
    try:
        harness.d1.script = streams(EVENTS[:1], then="hang")
        answered = await harness.chat()
        first, last = split_events(answered.body)
        assert first == EVENTS[0]
        assert "in time" in str(error_of(last)["message"])
        await until(lambda: harness.d1.abandoned == 1, "the abandoned request")
    finally:
        await harness.stop()


async def test_a_decode_leg_that_never_answers_is_given_up():
    """Past decode_idle_timeout_s without a status line the client gets a 502."""
    harness = Harness(decode_idle_timeout_s=0.2)
    await harness.start()
    try:
        harness.d1.script = hangs()
        assert (await harness.chat()).status == 502
    finally:
        await harness.stop()


async def test_a_whole_answer_that_breaks_off_is_a_502(harness: Harness):
    """A JSON answer is relayed only when all of it is here."""

    async def breaks_off(recorded, request):
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        await response.write(b'{"choices": [')
        await asyncio.sleep(0)
        request.transport.abort()
        return response

    harness.d1.script = breaks_off
    answered = await harness.chat(stream=False)
    assert answered.status == 502
    [settlement] = await harness.settled()
    assert not settlement.grant_expected


@pytest.mark.parametrize("body", [b"oops", b"[]", b'{"choices": []}', b'{"choices": [7]}'])
async def test_an_answer_of_an_unknown_shape_is_relayed_and_not_counted_on(harness: Harness, body):
    """A 200 is the engine's word; without a finish reason no grant is awaited."""
    harness.d1.script = says(body)
    answered = await harness.chat(stream=False)
    assert answered.status == 200
    assert answered.body == body
    [settlement] = await harness.settled()
    assert not settlement.grant_expected


async def test_the_node_is_free_again_after_every_kind_of_failure(harness: Harness):
    """No failure leaves a leg counted: `quiet` looks at the counts after each."""
    for script in (refuses(400), refuses(500), dies(), streams(EVENTS[:1]), says(b"oops")):
        harness.d1.next.append(script)
        await harness.chat()
        await harness.quiet()
