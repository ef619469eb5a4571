"""kvtide's own client, over gRPC: the same turns, typed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from kvtide.client import AsyncKvtideClient, KvtideClient, NotFoundError
from tests.suite.conversation import request, salted_text
from tests.suite.fleets import nothing_is_kept

if TYPE_CHECKING:
    import aiohttp

    from tests.suite.fleets import Fleet


async def test_a_chat_over_grpc_is_pulled_and_right(
    http: aiohttp.ClientSession, fleet: Fleet, salt: str
) -> None:
    """Three turns of a chat stream: text, report and finish as over HTTP; closing frees."""
    messages = []
    async with AsyncKvtideClient(fleet.grpc_address) as client:
        for number in range(3):
            messages.append({"role": "user", "content": salted_text(200, f"{salt}{number}")})
            body = {
                "model": fleet.model,
                "messages": messages,
                "max_tokens": 12,
                "temperature": 0,
                "ignore_eos": True,
            }
            expected = await request(http, fleet.reference_url, "chat", body)
            async with client.chat(
                fleet.model,
                messages,
                session_id="grpc-chat",
                max_tokens=12,
                temperature=0,
                ignore_eos=True,
            ) as answer:
                text = await answer.text()
            assert text == expected.text
            assert answer.report is not None
            assert answer.report.reuse == ("pulled" if number else "no_lease")
            assert answer.report.prompt_tokens == expected.usage["prompt_tokens"]
            assert answer.finish is not None
            assert answer.finish.reason == "length"
            messages.append({"role": "assistant", "content": text})
        await client.close_conversation("grpc-chat")
    await nothing_is_kept(fleet, "decode")


async def test_http_and_grpc_share_a_conversation(
    http: aiohttp.ClientSession, fleet: Fleet, salt: str
) -> None:
    """A turn over HTTP and the next one over gRPC, from a thread, are one conversation."""
    prompt = salted_text(300, salt)
    body = {"model": fleet.model, "prompt": prompt, "max_tokens": 12, "temperature": 0}
    body |= {"ignore_eos": True, "session_id": "http-and-grpc"}
    first = await request(http, fleet.base_url, "completions", body)
    prompt += first.text + "go on"
    expected = await request(http, fleet.reference_url, "completions", body | {"prompt": prompt})

    def next_turn() -> tuple[str, str]:
        with KvtideClient(fleet.grpc_address) as client:
            with client.complete(
                fleet.model,
                prompt,
                session_id="http-and-grpc",
                max_tokens=12,
                temperature=0,
                ignore_eos=True,
            ) as answer:
                text = "".join(answer)
            client.close_conversation("http-and-grpc")
            assert answer.report is not None
            return text, answer.report.reuse

    assert await asyncio.to_thread(next_turn) == (expected.text, "pulled")


async def test_an_unknown_model_is_not_found(fleet: Fleet) -> None:
    """Errors come as the client's own exceptions."""
    async with AsyncKvtideClient(fleet.grpc_address) as client:
        with pytest.raises(NotFoundError):
            async with client.chat("nobody", [{"role": "user", "content": "hello"}]) as answer:
                await answer.text()
