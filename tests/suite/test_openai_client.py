"""An unmodified OpenAI client, as agents use it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError

from tests.suite.conversation import request, salted_text

if TYPE_CHECKING:
    import aiohttp

    from tests.suite.fleets import Fleet

_KEY = "an-agents-key"
_TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Looks something up.",
            "parameters": {"type": "object", "properties": {"what": {"type": "string"}}},
        },
    }
]
_EXTRA = {"ignore_eos": True}


def _client(fleet: Fleet, session_id: str) -> AsyncOpenAI:
    return AsyncOpenAI(
        base_url=f"{fleet.base_url}/v1",
        api_key=_KEY,
        max_retries=0,
        default_headers={"X-Session-ID": session_id},
    )


async def _close(http: aiohttp.ClientSession, fleet: Fleet, session_id: str) -> None:
    url = f"{fleet.base_url}/v1/conversations/{session_id}"
    async with http.delete(url, headers={"Authorization": f"Bearer {_KEY}"}) as response:
        assert response.status == 200


async def test_a_tool_loop_over_three_streamed_turns(
    http: aiohttp.ClientSession, fleet: Fleet, salt: str
) -> None:
    """System prompt, tools, tool results: each answer is the monolith's, each history pulled."""
    messages: list[Any] = [{"role": "system", "content": salted_text(300, salt)}]
    reports = []
    async with _client(fleet, "openai-chat") as client:
        for number in range(3):
            role = "tool" if number else "user"
            messages.append({"role": role, "content": salted_text(80, f"{salt}{number}")})
            if role == "tool":
                messages[-1]["tool_call_id"] = f"call-{number}"
            asked = {
                "model": fleet.model,
                "messages": list(messages),
                "tools": _TOOLS,
                "tool_choice": "none",
                "max_tokens": 20,
                "temperature": 0,
            }
            expected = await request(http, fleet.reference_url, "chat", asked | _EXTRA)
            raw = await client.chat.completions.with_raw_response.create(
                **asked, stream=True, extra_body=_EXTRA
            )
            reports.append(json.loads(raw.headers["X-Kvtide-Turn"]))
            text = ""
            async for chunk in raw.parse():
                text += chunk.choices[0].delta.content or ""
            assert text == expected.text
            messages.append({"role": "assistant", "content": text})
    assert [report["reuse"] for report in reports] == ["no_lease", "pulled", "pulled"]
    await _close(http, fleet, "openai-chat")


async def test_completions_without_streaming(
    http: aiohttp.ClientSession, fleet: Fleet, salt: str
) -> None:
    """The older endpoint, a whole answer at a time, with usage as the client expects it."""
    prompt = salted_text(300, salt)
    async with _client(fleet, "openai-text") as client:
        for _ in range(2):
            asked = {"model": fleet.model, "prompt": prompt, "max_tokens": 20, "temperature": 0}
            expected = await request(http, fleet.reference_url, "completions", asked | _EXTRA)
            answer = await client.completions.create(**asked, extra_body=_EXTRA)
            assert answer.choices[0].text == expected.text
            assert answer.usage is not None
            assert answer.usage.prompt_tokens == len(prompt)
            prompt += answer.choices[0].text + "go on"
    await _close(http, fleet, "openai-text")


async def test_its_exceptions_are_the_usual_ones(fleet: Fleet) -> None:
    """A wrong model and a wrong parameter raise what the client raises elsewhere."""
    async with _client(fleet, "openai-errors") as client:
        models = await client.models.list()
        assert [model.id for model in models.data] == [fleet.model]
        hello: list[Any] = [{"role": "user", "content": "hello"}]
        with pytest.raises(NotFoundError) as missing:
            await client.chat.completions.create(model="nobody", messages=hello)
        assert missing.value.code == "model_not_found"
        with pytest.raises(BadRequestError):
            await client.chat.completions.create(model=fleet.model, messages=hello, temperature=-1)
