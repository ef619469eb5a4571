"""An engine that says what it is told: a real HTTP server on loopback that records requests.

It computes nothing. What it answers is a *script*: a coroutine function of the recorded request
and aiohttp's, put into `script` for every request, or into `next` for the coming ones only.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

DONE = b"data: [DONE]\n\n"


@dataclass
class Recorded:
    """One request that reached an engine."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str]

    @property
    def params(self) -> dict[str, Any]:
        return self.body.get("kv_transfer_params") or {}

    @property
    def own(self) -> dict[str, Any]:
        """The part of the parameters that is kvtide's own."""
        return self.params.get("kvtide") or {}


Script = Callable[[Recorded, web.Request], Awaitable[web.StreamResponse]]


@dataclass
class ScriptedEngine:
    """One engine. `start` it, read `url`, `stop` it."""

    script: Script
    requests: list[Recorded] = field(default_factory=list)
    next: deque[Script] = field(default_factory=deque)
    abandoned: int = 0
    """Requests whose client closed the connection before the answer was complete."""
    completed: int = 0
    url: str = ""
    _runner: web.AppRunner | None = None

    async def start(self, port: int = 0) -> None:
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_post("/{path:.*}", self._handle)
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        recorded = Recorded(request.path, await request.json(), dict(request.headers))
        self.requests.append(recorded)
        script = self.next.popleft() if self.next else self.script
        try:
            response = await script(recorded, request)
        except (asyncio.CancelledError, ConnectionError):
            self.abandoned += 1
            raise
        self.completed += 1
        return response


# --- prefill ---------------------------------------------------------------------------------


def prefills(
    prompt_tokens: int = 1000,
    reuse: str | None = None,
    read: str | None = None,
    pulled: int | None = None,
    **extra: Any,
) -> Script:
    """What our prefill connector answers: pulls what it is offered, unless told otherwise."""

    async def script(recorded: Recorded, request: web.Request) -> web.StreamResponse:
        offered = recorded.params.get("remote_num_tokens", 0)
        taken = offered if pulled is None else pulled
        own = {
            "prompt_tokens": prompt_tokens,
            "pulled_tokens": taken,
            "cached_tokens": 0,
            "recomputed_tokens": prompt_tokens - taken,
            "reuse": reuse or ("pulled" if offered else "no_handle"),
            "read": read or ("read" if offered else "not_read"),
            "prompt_digest": "d1ge57",
        }
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": "prefill-epoch",
            "remote_request_id": f"p-{prompt_tokens}",
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
            "remote_block_ids": [[1, 2, 3]],
            "kvtide": own,
            **extra,
        }
        return web.json_response(
            {
                "id": "x",
                "choices": [{"index": 0, "finish_reason": "length"}],
                "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": 1},
                "kv_transfer_params": params,
            }
        )

    return script


def prefills_like_stock() -> Script:
    """A vLLM without our connector: no word of what it read, and no parameters at all."""

    async def script(recorded: Recorded, request: web.Request) -> web.StreamResponse:
        usage = {"prompt_tokens": 77, "completion_tokens": 1}
        return web.json_response({"choices": [], "usage": usage, "kv_transfer_params": None})

    return script


# --- decode ----------------------------------------------------------------------------------


def event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"


def chunk(path: str, text: str, finish: str | None = None, **extra: Any) -> bytes:
    """One event of a stream, as vLLM spells it."""
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish}
    if path.endswith("chat/completions"):
        choice["delta"] = {"content": text}
    else:
        choice["text"] = text
    return event({"id": "c-1", "created": 1, "model": "m", "choices": [choice], **extra})


def answer_events(path: str, words: Sequence[str], vllm: str = "0.32") -> list[bytes]:
    """A streamed answer: in the 0.33 form the finish chunk carries `kv_transfer_params`."""
    extra = {"kv_transfer_params": {"remote_host": "10.9.8.7"}} if vllm == "0.33" else {}
    return [*(chunk(path, word) for word in words[:-1]), chunk(path, words[-1], "stop", **extra)]


def decodes(
    words: Sequence[str] = ("Hel", "lo ", "you"),
    vllm: str = "0.32",
    on_finish: Callable[[Recorded], None] | None = None,
) -> Script:
    """Answers with these words, streamed or not as asked; `on_finish` runs before the last."""

    async def script(recorded: Recorded, request: web.Request) -> web.StreamResponse:
        usage = {"prompt_tokens": 1000, "completion_tokens": len(words)}
        if not recorded.body.get("stream"):
            if on_finish is not None:
                on_finish(recorded)
            choice: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
            if recorded.path.endswith("chat/completions"):
                choice["message"] = {"role": "assistant", "content": "".join(words)}
            else:
                choice["text"] = "".join(words)
            params = {"remote_host": "10.9.8.7"} if vllm == "0.33" else None
            return web.json_response(
                {"id": "c-1", "choices": [choice], "usage": usage, "kv_transfer_params": params}
            )
        events = answer_events(recorded.path, words, vllm)
        tail = [DONE]
        if (recorded.body.get("stream_options") or {}).get("include_usage"):
            tail.insert(0, event({"id": "c-1", "choices": [], "usage": usage}))
        stream = await open_stream(request)
        for part in events[:-1]:
            await stream.write(part)
        if on_finish is not None:
            on_finish(recorded)
        for part in [events[-1], *tail]:
            await stream.write(part)
        await stream.write_eof()
        return stream

    return script


def streams(
    parts: Sequence[bytes],
    then: str = "end",
    pause: asyncio.Event | None = None,
    kill: asyncio.Event | None = None,
) -> Script:
    """Streams these bytes, then ends, hangs or dies.

    Waits for `pause` before the last part, and for `kill` before it dies: a connection that
    breaks takes along what its reader has not read yet.
    """

    async def script(recorded: Recorded, request: web.Request) -> web.StreamResponse:
        stream = await open_stream(request)
        for index, part in enumerate(parts):
            if pause is not None and index == len(parts) - 1:
                await pause.wait()
            await stream.write(part)
        if then == "hang":
            await asyncio.Event().wait()
        if then == "die":
            assert kill is not None
            await kill.wait()
            _abort(request)
            await asyncio.Event().wait()
        await stream.write_eof()
        return stream

    return script


async def open_stream(request: web.Request) -> web.StreamResponse:
    stream = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await stream.prepare(request)
    return stream


# --- trouble ---------------------------------------------------------------------------------


def refuses(status: int, message: str = "no", **headers: str) -> Script:
    """Answers with an OpenAI error of this status."""

    async def script(recorded: Recorded, request: web.Request) -> web.StreamResponse:
        error = {"message": message, "type": "Error", "param": None, "code": status}
        return web.json_response({"error": error}, status=status, headers=headers)

    return script


def hangs() -> Script:
    """Never answers."""

    async def script(recorded: Recorded, request: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    return script


def dies() -> Script:
    """Breaks the connection instead of answering."""

    async def script(recorded: Recorded, request: web.Request) -> web.StreamResponse:
        _abort(request)
        await asyncio.Event().wait()
        raise AssertionError

    return script


def says(body: bytes, content_type: str = "application/json") -> Script:
    """Answers 200 with these very bytes."""

    async def script(recorded: Recorded, request: web.Request) -> web.StreamResponse:
        return web.Response(body=body, content_type=content_type)

    return script


def _abort(request: web.Request) -> None:
    transport = request.transport
    assert isinstance(transport, asyncio.Transport)
    transport.abort()
