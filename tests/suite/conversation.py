"""A client's side of a conversation, over HTTP, with the monolith's answer beside each turn."""

from __future__ import annotations

import json
import random
import string
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

if TYPE_CHECKING:
    import aiohttp

    from tests.suite.fleets import Fleet

Endpoint = Literal["chat", "completions"]

PATHS: dict[Endpoint, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
LOGPROB_TOLERANCE = 1e-4

_LETTERS = string.ascii_letters + string.digits + "    .,"
_GREEDY = {"temperature": 0, "ignore_eos": True}


def salted_text(length: int, salt: str) -> str:
    """Text of that many characters (and, on the tiny model, tokens) that no other salt gives."""
    return "".join(random.Random(salt).choices(_LETTERS, k=length))


@dataclass(slots=True)
class Answer:
    """What one request got: a whole answer or a stream, put together."""

    status: int
    report: dict[str, Any] = field(default_factory=dict)
    body: dict[str, Any] = field(default_factory=dict)
    text: str = ""
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    chunks: list[dict[str, Any]] = field(default_factory=list)
    done: bool = True

    @property
    def error(self) -> dict[str, Any]:
        """The error body's ``error``."""
        error: dict[str, Any] = self.body["error"]
        return error

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV decode has when it is done: all but the last one sampled."""
        return int(self.usage["prompt_tokens"]) + int(self.usage["completion_tokens"]) - 1

    def take(self, body: dict[str, Any]) -> None:
        """Add a whole answer, or one chunk of a stream."""
        if "error" in body:
            self.body = body
        if body.get("usage"):
            self.usage = body["usage"]
        for choice in body.get("choices", ()):
            piece = choice.get("delta") or choice.get("message") or choice
            self.text += (piece["text"] if "text" in piece else piece.get("content")) or ""
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            self._take_logprobs(choice.get("logprobs") or {})

    def _take_logprobs(self, logprobs: dict[str, Any]) -> None:
        for entry in logprobs.get("content") or ():
            self.tokens.append(entry["token"])
            self.logprobs.append(entry["logprob"])
        self.tokens += logprobs.get("tokens") or []
        self.logprobs += logprobs.get("token_logprobs") or []


def assert_same_answer(got: Answer, expected: Answer) -> None:
    """The same tokens with, up to rounding, the same log probabilities."""
    assert got.status == expected.status == 200, (got.status, got.body, expected.body)
    assert got.text == expected.text
    assert got.tokens == expected.tokens
    pairs = zip(got.logprobs, expected.logprobs, strict=True)
    worst = max((abs(one - other) for one, other in pairs), default=0.0)
    assert worst < LOGPROB_TOLERANCE, f"log probabilities differ by {worst}"
    assert got.finish_reason == expected.finish_reason
    for count in ("prompt_tokens", "completion_tokens"):
        assert got.usage[count] == expected.usage[count]


async def request(
    http: aiohttp.ClientSession,
    url: str,
    endpoint: Endpoint,
    body: dict[str, Any],
    headers: dict[str, str] | None = None,
) -> Answer:
    """Send one request and read all that comes back."""
    sent = dict(body)
    if sent.get("stream"):
        sent.setdefault("stream_options", {"include_usage": True})
    async with http.post(url + PATHS[endpoint], json=sent, headers=headers) as response:
        report = json.loads(response.headers.get("X-Kvtide-Turn", "{}"))
        answer = Answer(response.status, report)
        if response.content_type != "text/event-stream":
            answer.body = await response.json()
            answer.take(answer.body)
            return answer
        answer.done = False
        async for line in response.content:
            data = line.strip().removeprefix(b"data: ")
            if data == b"[DONE]":
                answer.done = True
            elif data:
                answer.chunks.append(json.loads(data))
                answer.take(answer.chunks[-1])
    return answer


@dataclass(slots=True)
class Conversation:
    """An agent that resends the whole history every turn.

    ``history`` is what the next turn builds on; tests edit it as clients do.
    Every turn is compared with the monolith's answer to the same prompt.
    """

    http: aiohttp.ClientSession
    fleet: Fleet
    session_id: str
    endpoint: Endpoint = "completions"
    stream: bool = False
    headers: dict[str, str] = field(default_factory=dict)
    history: list[dict[str, str]] = field(default_factory=list)

    @property
    def prompt(self) -> str:
        """The history as the prompt of a completion."""
        return "".join(message["content"] for message in self.history)

    def body(self, max_tokens: int, **more: Any) -> dict[str, Any]:
        """The next request."""
        body: dict[str, Any] = {"model": self.fleet.model, "max_tokens": max_tokens}
        if self.endpoint == "chat":
            body |= {"messages": list(self.history), "logprobs": True, "top_logprobs": 1}
        else:
            body |= {"prompt": self.prompt, "logprobs": 1}
        return body | _GREEDY | more

    def say(self, text: str, role: str = "user") -> None:
        """Add a message to the history, without sending anything."""
        self.history.append({"role": role, "content": text})

    async def send(self, max_tokens: int = 16, **more: Any) -> Answer:
        """Send the history as it is, and add the answer to it; compares nothing."""
        body = self.body(max_tokens, stream=self.stream, **more)
        headers = {"X-Session-ID": self.session_id, **self.headers} if self.session_id else {}
        answer = await request(
            self.http, self.fleet.base_url, self.endpoint, body, headers | self.headers
        )
        if answer.status == 200:
            self.say(answer.text, "assistant")
        return answer

    async def turn(self, text: str = "", max_tokens: int = 16, **more: Any) -> Answer:
        """Say something, and get the answer that the monolith gives."""
        if text:
            self.say(text)
        expected = await self.expected(max_tokens, **more)
        answer = await self.send(max_tokens, **more)
        assert_same_answer(answer, expected)
        assert answer.done
        if answer.report["prompt_tokens"]:
            assert_counts_add_up(answer)
        return answer

    async def close(self) -> None:
        """Tell kvtide that the conversation is over."""
        url = f"{self.fleet.base_url}/v1/conversations/{quote(self.session_id, safe='')}"
        async with self.http.delete(url, headers=self.headers) as response:
            assert response.status == 200

    async def expected(self, max_tokens: int = 16, **more: Any) -> Answer:
        """The monolith's answer to the history as it is."""
        body = self.body(max_tokens, **more)
        return await request(self.http, self.fleet.reference_url, self.endpoint, body)


def assert_counts_add_up(answer: Answer) -> None:
    """Every prompt token was pulled, cached or recomputed, and the report knows the prompt."""
    report = answer.report
    parts = [report[f"{kind}_tokens"] for kind in ("pulled", "cached", "recomputed")]
    assert sum(parts) == report["prompt_tokens"] == answer.usage["prompt_tokens"]
