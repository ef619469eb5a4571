"""The unmodified openai client against the router."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import openai
import pytest

from tests.router.harness import GRANTED_TOKENS, Harness
from tests.router.scripted import decodes, refuses, streams

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture
async def client(harness: Harness) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{harness.url}/v1", api_key="k", max_retries=0
    ) as client:
        yield client


@pytest.mark.parametrize("vllm", ["0.32", "0.33"])
async def test_streamed_turns_of_one_conversation(harness: Harness, client, vllm):
    """Text, finish reason and usage arrive in the client's own types, turn after turn."""
    harness.d1.script = decodes(vllm=vllm, on_finish=lambda recorded: harness.grant("d1", recorded))
    for reuse in ("no_lease", "pulled"):
        stream = await client.chat.completions.create(
            model="m",
            messages=MESSAGES,
            stream=True,
            stream_options={"include_usage": True},
            extra_headers={"X-Session-ID": "s"},
        )
        assert json.loads(stream.response.headers["X-Kvtide-Turn"])["reuse"] == reuse
        chunks = [chunk async for chunk in stream]
        text = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
        assert "".join(text) == "Hello you"
        assert chunks[-2].choices[0].finish_reason == "stop"
        assert chunks[-1].usage.completion_tokens == 3


async def test_whole_answers_and_a_session_id_in_the_body(harness: Harness, client):
    """Chat and completions without streaming; `extra_body` names the conversation."""
    body = {"session_id": "s"}
    chat = await client.chat.completions.create(model="m", messages=MESSAGES, extra_body=body)
    assert chat.choices[0].message.content == "Hello you"
    raw = await client.completions.with_raw_response.create(model="m", prompt="Hi", extra_body=body)
    report = json.loads(raw.headers["X-Kvtide-Turn"])
    assert (report["reuse"], report["pulled_tokens"]) == ("pulled", GRANTED_TOKENS)
    assert raw.parse().choices[0].text == "Hello you"


async def test_models_are_listed(client):
    """The client pages through /v1/models."""
    assert [model.id async for model in client.models.list()] == ["m"]


async def test_errors_become_the_clients_exceptions(harness: Harness, client):
    """Each status class is the exception that openai users expect, with code and param."""
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="x", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        await client.chat.completions.create(model="m", messages=[])
    assert wrong.value.param == "messages"
    harness.d1.next.append(refuses(429, "slow down"))
    with pytest.raises(openai.RateLimitError, match="slow down"):
        await client.chat.completions.create(model="m", messages=MESSAGES)
    await harness.d1.stop()
    with pytest.raises(openai.InternalServerError) as later:
        await client.chat.completions.create(model="m", messages=MESSAGES)
    assert later.value.status_code == 503
    assert later.value.code == "engine_unavailable"


async def test_a_stream_that_breaks_raises_in_the_client(harness: Harness, client):
    """The error event ends the iteration with an exception, never as if it were the end."""
    harness.d1.script = streams([b'data: {"choices": []}\n\n'])
    stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
    with pytest.raises(openai.APIError, match="decode engine failed"):
        [chunk async for chunk in stream]
