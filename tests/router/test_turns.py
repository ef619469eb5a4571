"""Turns that go well: both endpoints, streamed and not, first and second turns."""

from __future__ import annotations

import asyncio
import json

import pytest

from kvtide.health import NodeRole
from kvtide.registry import ConversationKey, ReadOutcome
from tests.router.harness import GRANTED_TOKENS, THRESHOLD_TOKENS, TTL_S, Harness, until
from tests.router.scripted import DONE, answer_events, decodes, prefills, streams

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize("vllm", ["0.32", "0.33"])
@pytest.mark.parametrize("endpoint", ["chat", "complete"])
async def test_a_stream_is_relayed_without_engine_internals(harness: Harness, endpoint, vllm):
    """The client gets the decode engine's events, those of 0.33 without their parameters."""
    harness.d1.script = decodes(("a", "b", "c"), vllm)
    answered = await getattr(harness, endpoint)()
    path = harness.d1.requests[0].path
    assert answered.status == 200
    assert answered.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert answered.body == b"".join(answer_events(path, ("a", "b", "c"))) + DONE


@pytest.mark.parametrize("vllm", ["0.32", "0.33"])
@pytest.mark.parametrize("endpoint", ["chat", "complete"])
async def test_a_whole_answer_is_relayed_without_engine_internals(harness: Harness, endpoint, vllm):
    """The client gets the decode engine's JSON with its usage, without transfer parameters."""
    harness.d1.script = decodes(("a", "b", "c"), vllm)
    answered = await getattr(harness, endpoint)(stream=False)
    assert answered.status == 200
    assert answered.headers["Content-Type"].startswith("application/json")
    assert "kv_transfer_params" not in answered.json
    assert answered.json["usage"] == {"prompt_tokens": 1000, "completion_tokens": 3}
    choice = answered.json["choices"][0]
    assert (choice.get("text") or choice["message"]["content"]) == "abc"


async def test_the_first_turn_opens_a_conversation(harness: Harness):
    """No lease to claim: prefill computes everything, and decode is told whose turn it is."""
    answered = await harness.chat("s1", max_tokens=50)
    [prefill], [decode] = harness.p1.requests, harness.d1.requests
    assert prefill.path == decode.path == CHAT
    assert prefill.params == {"do_remote_decode": True, "do_remote_prefill": False}
    assert prefill.body["max_tokens"] == 1
    assert prefill.body["stream"] is False
    assert decode.body["max_tokens"] == 50
    assert decode.body["stream"] is True
    [claim] = harness.registry.claims
    assert decode.own == {
        "tenant": "default",
        "conversation_id": "s1",
        "generation": claim.generation,
        "prompt_digest": "d1ge57",
    }
    assert decode.params["remote_request_id"] == "p-1000"
    assert answered.report["reuse"] == "no_lease"


async def test_the_report_says_what_became_of_the_prompt(harness: Harness):
    """Header, listing and metrics of a second turn all tell the same."""
    await harness.chat()
    answered = await harness.chat(stream_options={"include_usage": True})
    report = answered.report
    expected = {
        "prefill_node_id": "p1",
        "decode_node_id": "d1",
        "prompt_tokens": 1000,
        "pulled_tokens": GRANTED_TOKENS,
        "cached_tokens": 0,
        "recomputed_tokens": 1000 - GRANTED_TOKENS,
        "reuse": "pulled",
        "decoder_kv_blocks_ttl_ms": TTL_S * 1000,
        "kv_recompute_threshold_tokens": THRESHOLD_TOKENS,
    }
    assert {name: report[name] for name in expected} == expected
    await harness.settled(2)
    listed = json.loads((await harness.request("GET", "/kvtide/turns")).body)["turns"]
    assert [turn["reuse"] for turn in listed] == ["no_lease", "pulled"]
    assert {name: listed[1][name] for name in report} == report
    assert listed[1]["status"] == "completed"
    assert listed[1]["finish_reason"] == "stop"
    assert listed[1]["completion_tokens"] == 3
    assert 0 <= listed[1]["ttft_ms"] <= listed[1]["total_ms"]
    metrics = harness.metrics().decode()
    assert f'kvtide_router_prompt_tokens_total{{source="pulled"}} {GRANTED_TOKENS}.0' in metrics


async def test_the_second_turn_reads_back_what_the_first_left(harness: Harness):
    """Prefill gets the granted handle and its fingerprint, and the claim is settled as read."""
    await harness.chat()
    await harness.chat()
    prefill = harness.p1.requests[1]
    assert prefill.params["remote_engine_id"] == "d1-epoch"
    assert prefill.params["remote_num_tokens"] == GRANTED_TOKENS
    assert prefill.own["fingerprint"]["token_count"] == GRANTED_TOKENS
    first, second = await harness.settled(2)
    assert (first.claim_id, first.read_outcome) == ("", ReadOutcome.UNSPECIFIED)
    assert first.grant_expected
    claim = harness.registry.claims[1]
    assert claim.claimed is not None
    assert second.claim_id == claim.claimed.claim_id
    assert second.generation == claim.generation
    assert second.read_outcome is ReadOutcome.READ
    assert second.grant_expected


@pytest.mark.parametrize("stream", [True, False])
async def test_the_next_turn_may_come_before_the_grant(harness: Harness, stream):
    """A turn that starts the moment the last chunk arrives waits for the grant on its way."""
    harness.granting = False
    await harness.chat(stream=stream)
    second = asyncio.create_task(harness.chat(stream=stream))
    await until(lambda: harness.registry.claims_begun == 2, "the second claim")
    harness.grant_now("d1", harness.d1.requests[0])
    assert (await second).report["reuse"] == "pulled"


async def test_the_turn_is_settled_before_its_finish_chunk_goes_out(harness: Harness):
    """When the client sees the finish chunk, the registry expects the grant already."""
    parts = answer_events(CHAT, ("a", "b"))
    harness.d1.script = streams(parts, then="hang")
    client = await harness.open_chat()
    await client.read_until(b'"finish_reason":"stop"')
    assert [s.grant_expected for s in harness.registry.settlements] == [True]
    await client.leave()
    assert len(await harness.settled()) == 1


async def test_the_next_claim_waits_for_the_last_settlement(harness: Harness):
    """A slow settlement is not overtaken by the next claim of the same conversation."""
    gate = harness.registry.settle_gate = asyncio.Event()
    await harness.chat()
    second = asyncio.create_task(harness.chat())
    await asyncio.sleep(0.05)
    assert harness.registry.claims_begun == 1
    gate.set()
    assert (await second).report["reuse"] == "pulled"


async def test_other_conversations_do_not_wait_for_a_settlement(harness: Harness):
    """A slow settlement holds up nobody else."""
    gate = harness.registry.settle_gate = asyncio.Event()
    await harness.chat("slow")
    assert (await harness.chat("other")).report["reuse"] == "no_lease"
    gate.set()
    await harness.settled(2)


async def test_decode_follows_the_lease(harness: Harness):
    """The next turn decodes where the last one did, however idle other nodes are."""
    await harness.add("d0", NodeRole.DECODE)
    for _ in range(2):
        report = (await harness.chat("a")).report
    assert report["decode_node_id"] == "d0"
    hung = harness.d1.script = streams([b": hello\n\n"], then="hang")
    harness.engines["d0"].next.append(hung)
    client = await harness.open_chat("b")
    await client.read_until(b"hello")
    # d0 is busy now, and still the conversation's node.
    assert (await harness.chat("a")).report["decode_node_id"] == "d0"
    await client.leave()


async def test_new_conversations_go_to_the_least_busy_nodes(harness: Harness):
    """While a node streams, a new conversation goes to the other one."""
    await harness.add("d0", NodeRole.DECODE)
    harness.engines["d0"].next.append(streams([b": hello\n\n"], then="hang"))
    client = await harness.open_chat("b")
    await client.read_until(b"hello")
    assert (await harness.chat("new")).report["decode_node_id"] == "d1"
    await client.leave()


async def test_a_lease_of_another_tenant_is_not_found(harness: Harness):
    """The same session id with another key is another conversation."""
    await harness.chat("same", headers={"Authorization": "Bearer one"})
    other = await harness.chat("same", headers={"Authorization": "Bearer two"})
    again = await harness.chat("same", headers={"Authorization": "Bearer one"})
    assert other.report["reuse"] == "no_lease"
    assert again.report["reuse"] == "pulled"
    assert {request.own["tenant"] for request in harness.d1.requests} != {"default"}


async def test_without_a_session_nothing_is_kept(harness: Harness):
    """No id: no claim, and decode is not told to pin."""
    answered = await harness.chat(None)
    assert answered.report["reuse"] == "no_session"
    assert harness.d1.requests[0].own == {"prompt_digest": "d1ge57"}
    assert harness.registry.claims_begun == 0


async def test_a_session_id_in_the_body_counts_and_stays_here(harness: Harness):
    """The body's session_id names the conversation, and engines don't see it."""
    await harness.chat(None, session_id="b1")
    assert harness.d1.requests[0].own["conversation_id"] == "b1"
    for request in (*harness.p1.requests, *harness.d1.requests):
        assert "session_id" not in request.body


@pytest.mark.parametrize("value", ["off", "OFF", " Off "])
async def test_a_client_can_switch_readback_off_for_one_turn(harness: Harness, value):
    """With the header there is neither a claim nor a grant; the lease before it stays."""
    await harness.chat()
    off = await harness.chat(headers={"X-Kvtide-Readback": value})
    assert off.report["reuse"] == "readback_off"
    assert harness.d1.requests[1].own == {"prompt_digest": "d1ge57"}
    assert harness.registry.claims_begun == 1
    assert (await harness.chat()).report["reuse"] == "pulled"


async def test_the_setting_switches_readback_off():
    """readback_enabled = false: no turn talks to the registry."""
    harness = Harness(readback_enabled=False)
    await harness.start()
    try:
        report = (await harness.chat(headers={"X-Kvtide-Readback": "on"})).report
        assert report["reuse"] == "readback_off"
        assert harness.registry.claims_begun == 0
    finally:
        await harness.stop()


@pytest.mark.parametrize(
    "fields", [{"n": 2}, {"echo": True}, {"prompt": ["a", "b"]}, {"max_tokens": "x"}]
)
async def test_what_two_legs_cannot_serve_is_served_by_decode_alone(harness: Harness, fields):
    """Such a request goes to decode as it is, reads nothing and leaves nothing."""
    answered = await harness.complete(**fields)
    assert answered.status == 200
    assert answered.report["reuse"] == "not_disaggregated"
    assert answered.report["prefill_node_id"] == ""
    assert harness.p1.requests == []
    assert "kv_transfer_params" not in harness.d1.requests[0].body
    assert harness.registry.claims_begun == 0


@pytest.mark.parametrize(
    ("reuse", "read", "outcome"),
    [
        ("history_changed", "not_read", ReadOutcome.NOT_READ),
        ("below_threshold", "read", ReadOutcome.READ),
        ("transfer_failed", "unknown", ReadOutcome.UNKNOWN),
        ("expired", "not_read", ReadOutcome.NOT_READ),
        ("cached", "surprise", ReadOutcome.UNKNOWN),
    ],
)
async def test_prefills_own_reason_is_reported_and_settled(harness: Harness, reuse, read, outcome):
    """What prefill says of the lease goes into the report and into the settlement."""
    await harness.chat()
    harness.p1.script = prefills(reuse=reuse, read=read, pulled=0)
    answered = await harness.chat()
    assert answered.status == 200
    assert answered.report["reuse"] == reuse
    assert answered.report["pulled_tokens"] == 0
    assert (await harness.settled(2))[1].read_outcome is outcome


async def test_trace_context_reaches_both_legs_and_credentials_neither(harness: Harness):
    """Trace headers are passed on; the client's key, cookies and id are not."""
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    await harness.chat(
        headers={
            "traceparent": parent,
            "tracestate": "a=b",
            "Authorization": "Bearer sk-secret",
            "Cookie": "c=1",
        }
    )
    for request in (harness.p1.requests[0], harness.d1.requests[0]):
        headers = {name.lower(): value for name, value in request.headers.items()}
        assert headers["traceparent"] == parent
        assert headers["tracestate"] == "a=b"
        assert headers.keys().isdisjoint({"authorization", "cookie", "x-session-id"})
        assert "sk-secret" not in str(request)


async def test_clients_cannot_smuggle_transfer_parameters(harness: Harness):
    """What a client puts into kv_transfer_params reaches no engine."""
    evil = {"remote_host": "169.254.169.254", "remote_block_ids": [[1]]}
    await harness.chat(kv_transfer_params=evil, vllm_xargs={"kv_transfer_params": "x"})
    for request in (harness.p1.requests[0], harness.d1.requests[0]):
        assert "169.254.169.254" not in str(request.body)
        assert request.body["vllm_xargs"] == {}


async def test_a_large_prompt_reaches_both_legs_whole(harness: Harness):
    """Hundreds of kilobytes of history arrive unchanged, non-ASCII text included."""
    messages = [{"role": "user", "content": "жук 🐞 \\ \u2028" * 40_000}]
    await harness.chat(messages=messages)
    assert harness.p1.requests[0].body["messages"] == messages
    assert harness.d1.requests[0].body["messages"] == messages


async def test_concurrent_turns_of_one_conversation_share_no_lease(harness: Harness):
    """Two turns at once: one reads the lease back, the other is told that it is in use."""
    await harness.chat()
    pause = asyncio.Event()
    harness.d1.next.append(streams(answer_events(CHAT, ("a",)), pause=pause))
    first = asyncio.create_task(harness.chat())
    await until(lambda: len(harness.d1.requests) == 2, "the first decode leg")
    second = await harness.chat()
    pause.set()
    assert (await first).report["reuse"] == "pulled"
    # The first has read it, the registry does not know that yet.
    assert second.report["reuse"] == "in_use"
    assert len(await harness.settled(3)) == 3


async def test_closing_a_conversation_releases_its_lease(harness: Harness):
    """DELETE ends the conversation of this tenant; the next turn starts anew."""
    await harness.chat("a b/c")
    answered = await harness.request("DELETE", "/v1/conversations/a%20b%2Fc")
    assert answered.status == 200
    assert answered.json == {"id": "a b/c", "object": "conversation.deleted", "deleted": True}
    assert harness.registry.closed == [ConversationKey("default", "a b/c")]
    assert (await harness.chat("a b/c")).report["reuse"] == "no_lease"
