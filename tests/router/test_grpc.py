"""The gRPC face: the same turns, typed. Stubs straight against the server, without the client."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc
import pytest
from aiohttp import web
from google.protobuf.struct_pb2 import Struct
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from kvtide.registry import ConversationKey
from kvtide.router import SERVICE_NAME, router_service
from kvtide.runtime import GrpcServer, open_channel, start_grpc_server
from kvtide.v1 import router_pb2, router_pb2_grpc
from tests.router.harness import GRANTED_TOKENS, Harness, until
from tests.router.scripted import (
    DONE,
    answer_events,
    decodes,
    event,
    hangs,
    refuses,
    says,
    streams,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

CHAT = "/v1/chat/completions"


@pytest.fixture
async def server(harness: Harness) -> AsyncIterator[GrpcServer]:
    server = await start_grpc_server("127.0.0.1:0", [router_service(harness.router)])
    yield server
    await server.stop(grace_s=0.1)


@pytest.fixture
async def stub(server: GrpcServer) -> AsyncIterator[router_pb2_grpc.RouterServiceStub]:
    async with open_channel(server.address) as channel:
        yield router_pb2_grpc.RouterServiceStub(channel)


def chat_request(session: str = "s", **fields) -> router_pb2.ChatRequest:
    messages = [router_pb2.ChatMessage(role="user", content="Hi")]
    return router_pb2.ChatRequest(model="m", messages=messages, session_id=session, **fields)


def parameters(**values) -> Struct:
    struct = Struct()
    struct.update(values)
    return struct


async def events_of(call) -> list:
    return [response async for response in call]


async def status_of(call) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await events_of(call)
    return caught.value


def reason_of(error: grpc.aio.AioRpcError) -> str:
    status = rpc_status.from_call(error)
    assert status is not None
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    return info.reason


async def test_a_chat_is_a_report_then_text_then_a_finish(harness, stub):
    """The report comes first, the text in pieces as decode sent it, the finish last."""
    events = await events_of(stub.Chat(chat_request()))
    assert [e.WhichOneof("event") for e in events] == ["report", "text", "text", "text", "finish"]
    report = events[0].report
    assert (report.prefill_node_id, report.decode_node_id) == ("p1", "d1")
    assert (report.prompt_tokens, report.reuse) == (1000, "no_lease")
    assert report.decoder_kv_blocks_ttl_ms == 480_000
    assert report.kv_recompute_threshold_tokens == 64
    assert "".join(e.text for e in events) == "Hello you"
    finish = events[-1].finish
    assert (finish.reason, finish.prompt_tokens, finish.completion_tokens) == ("stop", 1000, 3)


async def test_a_completion_is_served_alike(harness, stub):
    """Complete uses the completions endpoint of the engines."""
    request = router_pb2.CompleteRequest(model="m", prompt="Once", session_id="s")
    events = await events_of(stub.Complete(request))
    assert harness.d1.requests[0].path == "/v1/completions"
    assert harness.d1.requests[0].body["prompt"] == "Once"
    assert "".join(e.text for e in events) == "Hello you"


async def test_the_same_conversation_over_http_and_grpc(harness, stub):
    """A turn over HTTP leaves a lease that a turn over gRPC reads, and the other way round."""
    await harness.chat("both")
    events = await events_of(stub.Chat(chat_request("both")))
    assert events[0].report.reuse == "pulled"
    assert events[0].report.pulled_tokens == GRANTED_TOKENS
    assert (await harness.chat("both")).report["reuse"] == "pulled"


async def test_parameters_reach_the_engine_as_openai_spells_them(harness, stub):
    """Integers stay integers, nested values stay nested, and the typed fields are set."""
    given = parameters(seed=42, top_p=0.5, stop=["x"], logit_bias={"5": -1}, user=None, ok=True)
    await events_of(stub.Chat(chat_request(max_tokens=9, temperature=0.0, parameters=given)))
    body = harness.d1.requests[0].body
    assert body["seed"] == 42
    assert isinstance(body["seed"], int)
    assert (body["top_p"], body["stop"], body["logit_bias"]) == (0.5, ["x"], {"5": -1})
    assert body["user"] is None
    assert body["ok"] is True
    assert (body["max_tokens"], body["temperature"]) == (9, 0.0)
    assert body["stream_options"] == {"include_usage": True}


async def test_what_is_not_set_is_not_sent(harness, stub):
    """Defaults are the engine's."""
    await events_of(stub.Chat(chat_request("")))
    body = harness.d1.requests[0].body
    assert body.keys().isdisjoint({"max_tokens", "temperature", "session_id"})


async def test_metadata_carries_tenant_trace_and_switch(harness, stub):
    """authorization, traceparent and x-kvtide-readback mean what the headers mean."""
    metadata = (("authorization", "Bearer k"), ("traceparent", "00-a-b-01"), ("x-raw-bin", b"\xff"))
    await events_of(stub.Chat(chat_request(), metadata=metadata))
    assert harness.d1.requests[0].own["tenant"].startswith("key-")
    assert harness.d1.requests[0].headers["traceparent"] == "00-a-b-01"
    off = await events_of(stub.Chat(chat_request(), metadata=(("x-kvtide-readback", "off"),)))
    assert off[0].report.reuse == "readback_off"


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (router_pb2.ChatRequest(model="m"), "messages"),
        (router_pb2.ChatRequest(messages=[router_pb2.ChatMessage(role="user")]), "model"),
        (chat_request("x" * 257), "session_id"),
        (chat_request(parameters=parameters(stream=False)), "stream"),
        (chat_request(parameters=parameters(model="other")), "model"),
        (chat_request(parameters=parameters(session_id="other")), "session_id"),
        (chat_request(parameters=parameters(n=2)), "several"),
    ],
)
async def test_a_bad_request_is_an_invalid_argument(harness, stub, request_, param):
    """The message names the field, and no engine is asked."""
    error = await status_of(stub.Chat(request_))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert param in error.details()
    assert harness.p1.requests == harness.d1.requests == []


async def test_an_unknown_model_is_not_found(harness, stub):
    """NOT_FOUND, with OpenAI's code as the reason."""
    error = await status_of(stub.Chat(router_pb2.ChatRequest(model="x", messages=[{}])))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert reason_of(error) == "MODEL_NOT_FOUND"


async def test_no_ready_engine_is_unavailable_with_a_time_to_retry(harness, stub):
    """UNAVAILABLE with RetryInfo."""
    harness.links["p1"].close()
    await until(lambda: not harness.router.ready, "the suspicion")
    error = await status_of(stub.Chat(chat_request()))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    status = rpc_status.from_call(error)
    assert status is not None
    retry = error_details_pb2.RetryInfo()
    assert any(detail.Unpack(retry) for detail in status.details)
    assert retry.retry_delay.seconds >= 1


@pytest.mark.parametrize(
    ("http_status", "code"),
    [
        (400, grpc.StatusCode.INVALID_ARGUMENT),
        (404, grpc.StatusCode.NOT_FOUND),
        (422, grpc.StatusCode.INVALID_ARGUMENT),
        (413, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (429, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (500, grpc.StatusCode.INTERNAL),
        (503, grpc.StatusCode.UNAVAILABLE),
    ],
)
async def test_an_engines_refusal_keeps_its_class_and_message(harness, stub, http_status, code):
    """The engine's HTTP status becomes the gRPC code of the same kind."""
    harness.d1.script = refuses(http_status, "because")
    error = await status_of(stub.Chat(chat_request()))
    assert error.code() is code
    assert error.details() == "because"
    assert reason_of(error) == "ENGINE_REFUSED"


async def test_a_refusal_without_a_message_still_says_what_happened(harness, stub):
    """An engine's error page is no OpenAI error; its status is named."""

    async def page(recorded, request):
        return web.Response(status=400, body=b"<html>")

    harness.d1.script = page
    error = await status_of(stub.Chat(chat_request()))
    assert "400" in error.details()


@pytest.mark.parametrize("then", ["die", "end"])
async def test_an_engine_that_fails_after_the_start_is_internal(harness, stub, then):
    """The text so far arrives, then INTERNAL; there is no finish."""
    kill = asyncio.Event()
    harness.d1.script = streams(answer_events(CHAT, ("a", "b", "c"))[:2], then, kill=kill)
    call = stub.Chat(chat_request())
    received = []

    async def read() -> None:
        async for response in call:
            received.append(response)
            if response.text == "b":
                kill.set()

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read()
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert [r.text for r in received if r.text] == ["a", "b"]
    assert not any(r.HasField("finish") for r in received)


async def test_an_error_event_of_the_engine_is_internal(harness, stub):
    """What the engine says of its failure reaches the caller."""
    harness.d1.script = streams([event({"error": {"message": "boom"}}), DONE])
    error = await status_of(stub.Chat(chat_request()))
    assert error.code() is grpc.StatusCode.INTERNAL
    assert error.details() == "boom"


async def test_a_json_answer_to_a_stream_request_is_no_text(harness, stub):
    """An engine that ignores `stream` does not make the router invent an answer."""
    harness.d1.script = says(b'{"choices": []}')
    error = await status_of(stub.Chat(chat_request()))
    assert error.code() is grpc.StatusCode.INTERNAL


async def test_events_without_text_make_no_messages(harness, stub):
    """Comments, role chunks and tool calls carry no text; the finish tells the rest."""
    role = event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    call = {"index": 0, "function": {"name": "f", "arguments": "{}"}}
    tools = event({"choices": [{"delta": {"tool_calls": [call]}, "finish_reason": None}]})
    end = event({"choices": [{"delta": {"content": None}, "finish_reason": "tool_calls"}]})
    harness.d1.script = streams([b": ping\n\n", role, tools, end, DONE])
    events = await events_of(stub.Chat(chat_request()))
    assert [e.WhichOneof("event") for e in events] == ["report", "finish"]
    assert events[-1].finish.reason == "tool_calls"
    [settlement] = await harness.settled()
    assert settlement.grant_expected


@pytest.mark.parametrize("phase", ["prefill", "decode", "answer"])
async def test_a_cancelled_call_frees_the_engines(harness, stub, phase):
    """Cancelling the stream closes the request that runs at an engine, and settles once."""
    engine = harness.p1 if phase == "prefill" else harness.d1
    words = answer_events(CHAT, ("a", "b"))[:1]
    engine.script = streams(words, then="hang") if phase == "answer" else hangs()
    call = stub.Chat(chat_request())
    if phase == "answer":
        assert (await call.read()).HasField("report")
        assert (await call.read()).text == "a"
    else:
        reading = asyncio.ensure_future(call.read())
        await until(lambda: engine.requests, "the leg")
    call.cancel()
    if phase != "answer":
        await asyncio.gather(reading, return_exceptions=True)
    await until(lambda: engine.abandoned == 1, "the abandoned request")
    [settlement] = await harness.settled()
    assert not settlement.grant_expected
    assert harness.last_record()["status"] == "aborted"


async def test_a_deadline_ends_the_turn(harness, stub):
    """A deadline that passes frees the engines like any cancellation."""
    harness.d1.script = hangs()
    error = await status_of(stub.Chat(chat_request(), timeout=0.3))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: harness.d1.abandoned == 1, "the abandoned request")
    assert len(await harness.settled()) == 1


async def test_closing_a_conversation(harness, stub):
    """The conversation of this tenant is closed; a bad id is refused."""
    request = router_pb2.RouterServiceCloseConversationRequest(session_id="s")
    await stub.CloseConversation(request)
    assert harness.registry.closed == [ConversationKey("default", "s")]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.CloseConversation(router_pb2.RouterServiceCloseConversationRequest())
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_long_answers_arrive_whole(harness, stub):
    """Thousands of pieces, in order."""
    words = [f"{i} " for i in range(3000)]
    harness.d1.script = decodes(words)
    events = await events_of(stub.Chat(chat_request()))
    assert "".join(e.text for e in events) == "".join(words)


def test_the_service_name_is_the_protos():
    """Health checks and reflection use the full name."""
    assert SERVICE_NAME == "kvtide.v1.RouterService"
