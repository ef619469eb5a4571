"""The async client against a real router, and against a service that says what it is told."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

import grpc
import pytest

from kvtide import client as public
from kvtide.client import (
    AsyncKvtideClient,
    DeadlineExceededError,
    InvalidRequestError,
    KvtideClientError,
    NotFoundError,
    TurnCancelledError,
    TurnFailedError,
    UnavailableError,
)
from kvtide.client._errors import ERROR_BY_STATUS
from kvtide.client._messages import TurnReport
from kvtide.registry import ConversationKey
from kvtide.v1 import router_pb2, router_pb2_grpc
from tests.client.recorder import RecordingService, error_details
from tests.router.harness import GRANTED_TOKENS, Harness, until
from tests.router.scripted import answer_events, hangs, streams

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"


@pytest.fixture
async def service() -> AsyncIterator[tuple[RecordingService, AsyncKvtideClient]]:
    server = grpc.aio.server()
    recording = RecordingService()
    router_pb2_grpc.add_RouterServiceServicer_to_server(recording, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    address = f"127.0.0.1:{port}"
    async with AsyncKvtideClient(address, api_key="k", metadata={"Traceparent": "t"}) as client:
        yield recording, client
    await server.stop(0.1)


def test_the_public_face_is_what_it_says():
    """Every exported name exists, and the list is this one."""
    assert sorted(public.__all__) == [
        "AsyncKvtideClient",
        "AsyncTurnStream",
        "DeadlineExceededError",
        "Finish",
        "InvalidRequestError",
        "KvtideClient",
        "KvtideClientError",
        "LimitReachedError",
        "NotFoundError",
        "TurnCancelledError",
        "TurnFailedError",
        "TurnReport",
        "TurnStream",
        "UnavailableError",
    ]
    for name in public.__all__:
        assert hasattr(public, name)


def test_the_client_knows_every_field_of_the_report():
    """The dataclass mirrors the proto; a field that is added there must be added here."""
    names = [field.name for field in router_pb2.TurnReport.DESCRIPTOR.fields]
    assert list(TurnReport.__dataclass_fields__) == names


def test_the_table_of_errors_is_the_documented_one():
    """Each row of the table in the docstring is in the code, and the other way round."""
    documented = {
        tuple(line.split())
        for line in (AsyncKvtideClient.__doc__ or "").splitlines()
        if line.strip().split(" ")[0].isupper() and "Error" in line
    }
    assert documented == {(code.name, error.__name__) for code, error in ERROR_BY_STATUS.items()}


async def test_a_chat_streams_text_between_report_and_finish(
    harness: Harness, client: AsyncKvtideClient
):
    """The report is there with the first text, the finish after the last."""
    async with client.chat("m", MESSAGES, session_id="s") as answer:
        assert answer.report is None
        pieces = []
        async for text in answer:
            assert answer.report is not None
            assert answer.finish is None
            pieces.append(text)
    assert pieces == ["Hel", "lo ", "you"]
    assert answer.report.prefill_node_id == "p1"
    assert answer.report.reuse == "no_lease"
    assert answer.finish == public.Finish("stop", 1000, 3)


async def test_two_turns_of_one_session_reuse_the_first(client: AsyncKvtideClient):
    """A conversation through the client reads back what its last turn left."""
    await client.chat("m", MESSAGES, session_id="s").text()
    answer = client.chat("m", MESSAGES, session_id="s")
    assert await answer.text() == "Hello you"
    assert answer.report.reuse == "pulled"
    assert answer.report.pulled_tokens == GRANTED_TOKENS


async def test_a_completion_is_served_alike(harness: Harness, client: AsyncKvtideClient):
    """Complete takes a prompt instead of messages."""
    answer = client.complete("m", "Once", max_tokens=5, temperature=0.0, seed=7)
    assert await answer.text() == "Hello you"
    body = harness.d1.requests[0].body
    assert (body["prompt"], body["max_tokens"], body["temperature"]) == ("Once", 5, 0.0)
    assert body["seed"] == 7
    assert answer.report.reuse == "no_session"


async def test_parameters_travel(harness: Harness, client: AsyncKvtideClient):
    """Any OpenAI parameter by its name, nested ones included."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"a": [1, None, 0.5]}}}]
    await client.chat("m", MESSAGES, tools=tools, stop=["x", "y"], top_p=0.25).text()
    body = harness.d1.requests[0].body
    assert body["tools"] == tools
    assert (body["stop"], body["top_p"]) == (["x", "y"], 0.25)


async def test_closing_a_conversation(harness: Harness, client: AsyncKvtideClient):
    """The router closes the conversation of the client's tenant."""
    await client.close_conversation("s")
    assert harness.registry.closed == [ConversationKey("default", "s")]
    with pytest.raises(InvalidRequestError):
        await client.close_conversation("")


@pytest.mark.parametrize("how", ["close", "context", "task"])
async def test_leaving_early_frees_the_engine(harness: Harness, client: AsyncKvtideClient, how):
    """However the stream is left, decode's request is cancelled."""
    harness.d1.script = streams(answer_events(CHAT, ("a", "b"))[:1], then="hang")
    answer = client.chat("m", MESSAGES, session_id="s")
    if how == "context":
        async with answer:
            assert await anext(answer) == "a"
    else:
        assert await anext(answer) == "a"
    if how == "close":
        answer.close()
        with pytest.raises(TurnCancelledError):
            await anext(answer)
    if how == "task":
        reading = asyncio.ensure_future(anext(answer))
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
    await until(lambda: harness.d1.abandoned == 1, "the abandoned request")
    assert len(await harness.settled()) == 1


async def test_errors_of_a_real_router(harness: Harness, client: AsyncKvtideClient):
    """Each kind of failure has its class, its code and, where it helps, a time to retry."""
    with pytest.raises(NotFoundError) as missing:
        await client.chat("x", MESSAGES).text()
    assert missing.value.code == "model_not_found"
    with pytest.raises(InvalidRequestError) as wrong:
        await client.chat("m", []).text()
    assert "messages" in wrong.value.message
    harness.d1.script = hangs()
    with pytest.raises(DeadlineExceededError):
        await client.chat("m", MESSAGES, timeout_s=0.2).text()
    harness.d1.script = streams(answer_events(CHAT, ("a", "b"))[:1])
    with pytest.raises(TurnFailedError):
        await client.chat("m", MESSAGES).text()
    harness.links["p1"].close()
    await until(lambda: not harness.router.ready, "the suspicion")
    with pytest.raises(UnavailableError) as later:
        await client.chat("m", MESSAGES).text()
    assert later.value.code == "no_ready_engine"
    assert later.value.retry_after_s == 2.0


async def test_a_router_that_is_not_there_is_unavailable():
    """Connecting is part of the call."""
    async with AsyncKvtideClient("127.0.0.1:1") as client:
        with pytest.raises(UnavailableError):
            await client.chat("m", MESSAGES).text()
        with pytest.raises(UnavailableError):
            await client.close_conversation("s")


@pytest.mark.parametrize("code", [c for c in grpc.StatusCode if c is not grpc.StatusCode.OK])
async def test_every_status_code_has_its_exception(service, code):
    """The table decides; what it does not have is the base class, with the code's name."""
    recording, client = service
    recording.code = code
    for call in (client.chat("m", MESSAGES).text(), client.close_conversation("s")):
        with pytest.raises(KvtideClientError) as caught:
            await call
        assert type(caught.value) is ERROR_BY_STATUS.get(code, KvtideClientError)
        assert caught.value.code == code.name.lower()
        assert caught.value.message == "told to"
        assert caught.value.retry_after_s is None


async def test_the_routers_own_code_and_delay_are_read(service):
    """ErrorInfo and RetryInfo come out as `code` and `retry_after_s`."""
    recording, client = service
    recording.code = grpc.StatusCode.UNAVAILABLE
    recording.details = error_details("NO_READY_ENGINE", 1500)
    with pytest.raises(UnavailableError) as caught:
        await client.chat("m", MESSAGES).text()
    assert (caught.value.code, caught.value.retry_after_s) == ("no_ready_engine", 1.5)


async def test_without_googleapis_errors_are_still_told_apart(service, monkeypatch):
    """The details need a package that the client does not depend on; the class does not."""
    monkeypatch.setitem(sys.modules, "google.rpc", None)
    recording, client = service
    recording.code = grpc.StatusCode.UNAVAILABLE
    recording.details = error_details("NO_READY_ENGINE", 1500)
    with pytest.raises(UnavailableError) as caught:
        await client.chat("m", MESSAGES).text()
    assert (caught.value.code, caught.value.retry_after_s) == ("unavailable", None)


async def test_an_error_in_the_middle_comes_after_the_text(service):
    """What arrived before the failure is not lost."""
    recording, client = service
    recording.responses = [{"report": {"turn_id": "t"}}, {"text": "a"}]
    recording.code = grpc.StatusCode.INTERNAL
    answer = client.chat("m", MESSAGES)
    assert await anext(answer) == "a"
    with pytest.raises(TurnFailedError):
        await anext(answer)
    assert answer.report.turn_id == "t"
    assert answer.finish is None


async def test_a_stream_without_a_finish_is_no_success(service):
    """A router that just stops talking has not answered."""
    recording, client = service
    recording.responses = [{"text": "a"}]
    answer = client.chat("m", MESSAGES)
    assert await anext(answer) == "a"
    with pytest.raises(TurnCancelledError):
        await anext(answer)


async def test_every_call_says_who_is_calling(service):
    """The key and the client's metadata go with chat, complete and close alike."""
    recording, client = service
    recording.responses = [{"finish": {"reason": "stop"}}]
    await client.chat("m", MESSAGES).text()
    await client.complete("m", "x").text()
    await client.close_conversation("s")
    assert len(recording.metadata) == 3
    for metadata in recording.metadata:
        assert metadata["authorization"] == "Bearer k"
        assert metadata["traceparent"] == "t"


async def test_what_is_not_said_is_not_sent(service):
    """Unset arguments are absent on the wire, a temperature of 0 is not."""
    recording, client = service
    recording.responses = [{"finish": {"reason": "stop"}}]
    await client.chat("m", MESSAGES).text()
    await client.chat("m", MESSAGES, temperature=0.0).text()
    first, second = recording.requests
    assert not first.HasField("temperature")
    assert second.HasField("temperature")
    assert (first.session_id, first.max_tokens, len(first.parameters.fields)) == ("", 0, 0)


@pytest.mark.parametrize(
    ("parameters", "name"),
    [
        ({"seed": 2**53 + 1}, "seed"),
        ({"a": {"b": [1, 2**60]}}, r"a\.b\[1\]"),
        ({"a": object()}, "a"),
        ({"a": {1: 2}}, "a"),
    ],
)
async def test_parameters_that_cannot_travel_are_refused_here(parameters, name):
    """A number that would arrive as another one is an error, not a surprise."""
    async with AsyncKvtideClient("127.0.0.1:1") as client:
        with pytest.raises(ValueError, match=name):
            client.chat("m", MESSAGES, **parameters)


@pytest.mark.parametrize("message", [{}, {"role": "user"}, {"role": "u", "content": "", "x": ""}])
async def test_messages_that_cannot_travel_are_refused_here(message):
    """What the proto has no field for is not dropped in silence."""
    async with AsyncKvtideClient("127.0.0.1:1") as client:
        with pytest.raises(ValueError, match="role and a content"):
            client.chat("m", [message])
