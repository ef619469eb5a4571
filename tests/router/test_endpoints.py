"""Everything that is no turn: models, health, readiness, metrics, history; start and stop."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import ClientConnectionError, ClientPayloadError

from kvtide import router as public
from kvtide.health import LocalNodeHealth
from kvtide.registry import LocalLeaseRegistry
from kvtide.router import Router, start_http
from kvtide.router.answer import Answer
from kvtide.runtime import FailedPrecondition, Settings
from tests.router.harness import Harness, until
from tests.router.scripted import answer_events, hangs, streams

CHAT = "/v1/chat/completions"
EVENTS = answer_events(CHAT, ("a", "b"))


def test_the_public_face_is_what_it_says():
    """Every exported name exists, and nothing else is meant to be used."""
    assert sorted(public.__all__) == [
        "READBACK_HEADER",
        "Router",
        "RouterHttp",
        "SERVICE_NAME",
        "SESSION_HEADER",
        "TURN_HEADER",
        "TurnReport",
        "add_router_service",
        "router_service",
        "start_http",
    ]
    for name in public.__all__:
        assert hasattr(public, name)


async def test_models_are_listed_as_openai_does(harness: Harness):
    """The models of the fleet, in OpenAI's form."""
    answered = await harness.request("GET", "/v1/models")
    assert answered.status == 200
    assert answered.json["object"] == "list"
    [model] = answered.json["data"]
    assert (model["id"], model["object"], model["owned_by"]) == ("m", "model", "kvtide")
    assert isinstance(model["created"], int)


async def test_ready_follows_the_fleet_and_health_does_not(harness: Harness):
    """Without a prefill engine the router is alive and not ready."""
    assert (await harness.request("GET", "/ready")).status == 200
    harness.links["p1"].close()
    await until(lambda: not harness.router.ready, "the suspicion")
    answered = await harness.request("GET", "/ready")
    assert answered.status == 503
    assert answered.error["code"] == "not_ready"
    assert (await harness.request("GET", "/health")).status == 200


async def test_the_fleet_view_outlives_node_health(harness: Harness):
    """When node health goes away the last view stays in use."""
    await harness.health.stop()
    assert (await harness.chat()).status == 200


async def test_metrics_are_prometheus_text(harness: Harness):
    """Turns by path, status and reuse; first bytes by reuse."""
    await harness.chat()
    await harness.quiet()
    answered = await harness.request("GET", "/metrics")
    assert answered.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    text = answered.body.decode()
    assert (
        'kvtide_router_turns_total{path="/v1/chat/completions",reuse="no_lease",'
        'status="completed"} 1.0' in text
    )
    assert 'kvtide_router_ttft_seconds_count{reuse="no_lease"} 1.0' in text
    assert "kvtide_router_turns_running 0.0" in text


async def test_two_routers_in_one_process_count_apart(harness: Harness):
    """Metrics belong to a router, not to the process."""
    other = Harness()
    await other.start()
    await other.chat()
    await other.quiet()
    assert b"kvtide_router_turns_total{" in other.metrics()
    assert b"kvtide_router_turns_total{" not in harness.metrics()
    await other.stop()


async def test_the_history_keeps_as_many_turns_as_set():
    """turn_history bounds the listing, which names no tenant and no conversation."""
    harness = Harness(turn_history=2)
    await harness.start()
    try:
        for _ in range(3):
            await harness.chat("secret-session", headers={"Authorization": "Bearer k"})
        await harness.quiet()
        answered = await harness.request("GET", "/kvtide/turns")
        assert len(answered.json["turns"]) == 2
        assert b"secret-session" not in answered.body
        assert b"key-" not in answered.body
    finally:
        await harness.stop()


async def test_a_stopping_router_lets_running_turns_finish():
    """A stop refuses new turns and connections, and waits for the one that runs."""
    harness = Harness(drain_timeout_s=20)
    await harness.start()
    go = asyncio.Event()
    harness.d1.script = streams(EVENTS, pause=go)
    client = await harness.open_chat()
    await client.read_until(b'"content":"a"')
    idle = await harness.request("GET", "/health")
    assert idle.status == 200
    stopping = asyncio.create_task(harness.http.stop())
    await until(lambda: not harness.router.ready, "the drain")
    # This goes over the connection that the session kept open.
    refused = await harness.chat("other")
    assert refused.status == 503
    assert refused.error["code"] == "router_stopping"
    assert not stopping.done()
    go.set()
    await client.read_until(b'"finish_reason":"stop"')
    await stopping
    with pytest.raises(ClientConnectionError):
        await harness.request("GET", "/health")
    [settlement] = await harness.settled()
    assert settlement.grant_expected
    await harness.stop()


async def test_a_turn_that_outlasts_the_drain_is_cancelled():
    """After drain_timeout_s the engines are let go and the turn is settled."""
    harness = Harness(drain_timeout_s=0.1)
    await harness.start()
    harness.d1.script = streams(EVENTS[:1], then="hang")
    client = await harness.open_chat()
    await client.read_until(b'"content":"a"')
    await harness.http.stop()
    await until(lambda: harness.d1.abandoned == 1, "the abandoned request")
    [settlement] = await harness.settled()
    assert not settlement.grant_expected
    await harness.stop()


async def test_stopping_finishes_the_settlements(harness: Harness):
    """No settlement is lost by a stop that comes right after the turn."""
    gate = harness.registry.settle_gate = asyncio.Event()
    await harness.chat()
    stopping = asyncio.create_task(harness.router.stop())
    await asyncio.sleep(0.05)
    assert not stopping.done()
    gate.set()
    await stopping
    assert not harness.router._desk._tasks


async def test_a_port_that_is_taken_is_an_error_that_says_so(harness: Harness):
    """The message names the address and the setting."""
    other = Router(Settings(), LocalLeaseRegistry(), LocalNodeHealth())
    await other.start()
    with pytest.raises(FailedPrecondition) as caught:
        await start_http(other, "127.0.0.1", harness.http.port)
    assert caught.value.code == "listen_failed"
    assert f"127.0.0.1:{harness.http.port}" in caught.value.message
    assert "--http.listen" in caught.value.message
    await other.stop()


async def test_a_router_that_was_not_started_opens_no_turn():
    """Using it too early is a bug of the caller, and says so; stopping it is harmless."""
    router = Router(Settings(), LocalLeaseRegistry(), LocalNodeHealth())
    with pytest.raises(RuntimeError):
        router.turns  # noqa: B018 - reading it is the point
    assert not router.ready
    await router.stop()


async def test_an_unexpected_error_is_a_500_without_details(harness: Harness, monkeypatch):
    """A bug is answered in OpenAI's form, and its text goes to the log only."""

    def broken(request: object) -> object:
        raise KeyError("secret detail")

    monkeypatch.setattr(harness.router.turns, "open", broken)
    answered = await harness.chat()
    assert answered.status == 500
    assert answered.error["code"] == "internal"
    assert b"secret" not in answered.body


async def test_a_bug_in_the_relay_breaks_the_connection(harness: Harness, monkeypatch):
    """After the status line an error can't be answered any more; it is not hidden either."""
    harness.d1.script = streams(EVENTS[:1], then="hang")

    async def broken(self: Answer) -> bytes:
        raise KeyError("bug")

    monkeypatch.setattr(Answer, "read", broken)
    with pytest.raises(ClientPayloadError):
        await harness.chat()
    await until(lambda: harness.d1.abandoned == 1, "the abandoned request")
    assert len(await harness.settled()) == 1


async def test_slow_turns_do_not_hold_up_probes(harness: Harness):
    """Health is answered while turns hang."""
    harness.p1.script = hangs()
    clients = [await harness.open_chat(f"s{i}") for i in range(5)]
    await until(lambda: len(harness.p1.requests) == 5, "the prefill legs")
    assert (await harness.request("GET", "/health")).status == 200
    for client in clients:
        await client.leave()
    await harness.settled(5)
