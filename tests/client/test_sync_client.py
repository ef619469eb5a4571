"""The client for threads: the same behaviour, against the same router."""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING, TypeVar

import pytest

from kvtide.client import (
    AsyncKvtideClient,
    InvalidRequestError,
    KvtideClient,
    NotFoundError,
    TurnCancelledError,
    TurnFailedError,
    UnavailableError,
)
from tests.router.harness import GRANTED_TOKENS, Harness, until
from tests.router.scripted import answer_events, streams

if TYPE_CHECKING:
    from collections.abc import Callable

MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"
T = TypeVar("T")


async def in_thread(address: str, work: Callable[[KvtideClient], T]) -> T:
    """Run blocking work while the router runs in this loop."""

    def run() -> T:
        with KvtideClient(address) as client:
            return work(client)

    return await asyncio.to_thread(run)


@pytest.mark.parametrize("method", ["__init__", "chat", "complete", "close_conversation"])
def test_both_clients_take_the_same_arguments(method):
    """Code moves from one to the other by adding or dropping awaits."""
    ours, theirs = (
        inspect.signature(getattr(client, method)).parameters
        for client in (KvtideClient, AsyncKvtideClient)
    )
    assert ours == theirs


async def test_a_chat_streams_text_between_report_and_finish(harness: Harness, address: str):
    """Report, text and finish arrive in this order."""

    def work(client: KvtideClient):
        with client.chat("m", MESSAGES, session_id="s") as answer:
            assert answer.report is None
            pieces = list(answer)
        return pieces, answer.report, answer.finish

    pieces, report, finish = await in_thread(address, work)
    assert pieces == ["Hel", "lo ", "you"]
    assert report.decode_node_id == "d1"
    assert (finish.reason, finish.completion_tokens) == ("stop", 3)


async def test_two_turns_of_one_session_reuse_the_first(harness: Harness, address: str):
    """The second turn pulls."""

    def work(client: KvtideClient):
        client.chat("m", MESSAGES, session_id="s").text()
        answer = client.complete("m", "x", session_id="s", seed=3)
        assert answer.text() == "Hello you"
        return answer.report

    report = await in_thread(address, work)
    assert (report.reuse, report.pulled_tokens) == ("pulled", GRANTED_TOKENS)
    assert harness.d1.requests[1].body["seed"] == 3


async def test_closing_early_frees_the_engine(harness: Harness, address: str):
    """Leaving the context in the middle cancels the turn."""
    harness.d1.script = streams(answer_events(CHAT, ("a", "b"))[:1], then="hang")

    def work(client: KvtideClient):
        with client.chat("m", MESSAGES, session_id="s") as answer:
            first = next(answer)
        with pytest.raises(TurnCancelledError):
            next(answer)
        return first

    assert await in_thread(address, work) == "a"
    await until(lambda: harness.d1.abandoned == 1, "the abandoned request")


async def test_errors_have_their_classes(harness: Harness, address: str):
    """The same table as the async client's."""

    def work(client: KvtideClient):
        with pytest.raises(NotFoundError) as missing:
            client.chat("x", MESSAGES).text()
        with pytest.raises(InvalidRequestError):
            client.close_conversation("")
        client.close_conversation("s")
        return missing.value.code

    assert await in_thread(address, work) == "model_not_found"
    harness.d1.script = streams(answer_events(CHAT, ("a", "b"))[:1])

    def failing(client: KvtideClient):
        with pytest.raises(TurnFailedError):
            client.chat("m", MESSAGES).text()

    await in_thread(address, failing)


def test_a_router_that_is_not_there_is_unavailable():
    """Connecting is part of the call."""
    with KvtideClient("127.0.0.1:1") as client, pytest.raises(UnavailableError):
        client.chat("m", MESSAGES).text()
