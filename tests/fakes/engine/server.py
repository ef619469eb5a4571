"""The engine's OpenAI HTTP server, as far as kvtide and its clients use it."""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from dataclasses import asdict
from typing import TYPE_CHECKING

from aiohttp import web

from tests.fakes.engine.api_errors import ApiError, http_error, internal_error
from tests.fakes.engine.api_requests import (
    ChatRequest,
    CommonRequest,
    CompletionRequest,
    admit,
    parse,
)
from tests.fakes.engine.api_responses import ChoiceState, ResponseBuilder
from tests.fakes.engine.listener import Listener
from tests.fakes.engine.request import EngineRequest, Output
from tests.fakes.engine.scheduler import EngineCore, EngineDeadError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from tests.fakes.engine.config import EngineConfig
    from tests.fakes.engine.faults import Faults
    from tests.fakes.engine.metrics import EngineMetrics

_MAX_BODY_BYTES = 64 * 1024 * 1024


class EngineServer:
    """Routes, and the life of each HTTP request from body to last chunk.

    ``seen`` keeps the bodies of the requests that parsed, for tests that ask
    what an engine was sent.
    """

    def __init__(
        self, config: EngineConfig, core: EngineCore, faults: Faults, metrics: EngineMetrics
    ) -> None:
        self._config = config
        self._core = core
        self._faults = faults
        self._metrics = metrics
        self.seen: list[CommonRequest] = []
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[_errors])
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/version", self._version)
        app.router.add_get("/metrics", self._metrics_text)
        # Not vLLM's: how tests reach into an engine in another process.
        app.router.add_get("/fake/pool", self._pool)
        app.router.add_post("/fake/faults", self._set_faults)
        self.listener = Listener(app, config.host)

    async def _pool(self, _request: web.Request) -> web.Response:
        return web.json_response(asdict(self._core.pool_state()))

    async def _set_faults(self, request: web.Request) -> web.Response:
        for name, value in (await request.json()).items():
            fault = getattr(self._faults, name)
            if isinstance(fault, asyncio.Event):
                fault.set() if value else fault.clear()
            else:
                setattr(self._faults, name, type(fault)(value))
        return web.Response()

    # ---- plain routes --------------------------------------------------------

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response(status=503 if self._core.dead else 200)

    async def _version(self, _request: web.Request) -> web.Response:
        return web.json_response({"version": self._config.vllm_version})

    async def _metrics_text(self, _request: web.Request) -> web.Response:
        text = self._metrics.expose(self._core.pool_state())
        return web.Response(body=text, content_type="text/plain")

    async def _models(self, _request: web.Request) -> web.Response:
        card = {
            "id": self._config.model,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "vllm",
            "root": self._config.model,
            "parent": None,
            "max_model_len": self._config.max_model_len_tokens,
            "permission": [],
        }
        return web.json_response({"object": "list", "data": [card]})

    # ---- generation ----------------------------------------------------------

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, await parse(request, ChatRequest, self._config))

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        parsed = await parse(request, CompletionRequest, self._config)
        return await self._generate(request, parsed)

    async def _generate(self, http: web.Request, parsed: CommonRequest) -> web.StreamResponse:
        self.seen.append(parsed)
        if self._faults.take("fail_next_requests"):
            raise internal_error()
        prefix = "chatcmpl" if isinstance(parsed, ChatRequest) else "cmpl"
        base = http.headers.get("X-Request-Id") or parsed.request_id or uuid.uuid4().hex
        builder = ResponseBuilder(
            parsed,
            f"{prefix}-{base}",
            self._config.model,
            prompt_tokens_details=self._config.prompt_tokens_details,
        )
        requests = self._admit(parsed, f"{prefix}-{base}")
        choices = [
            ChoiceState(index, request.prompt_token_ids) for index, request in enumerate(requests)
        ]
        try:
            for request in requests:
                self._core.add(request)
            if parsed.stream:
                return await self._stream(http, parsed, builder, requests, choices)
            await asyncio.gather(*map(self._collect, requests, choices))
            return web.json_response(builder.full(choices))
        except EngineDeadError as error:
            raise internal_error(f"EngineCore encountered an issue: {error}") from error
        finally:
            for request in requests:
                self._core.abort(request.request_id)

    def _admit(self, parsed: CommonRequest, base_id: str) -> list[EngineRequest]:
        """Make the engine requests; a refusal lets prefill free what it keeps for them."""
        try:
            admitted = admit(parsed, self._config, self._faults)
        except ApiError:
            self._core.reject(parsed.kv_transfer_params)
            raise
        copies = itertools.product(enumerate(admitted), range(parsed.n or 1))
        return [
            EngineRequest(
                # vLLM makes ids unique by a random suffix, whatever the client sent.
                request_id=f"{base_id}-{number}-{copy}-{uuid.uuid4().hex[:8]}",
                prompt_token_ids=prompt,
                sampling=sampling,
                kv_transfer_params=dict(parsed.kv_transfer_params)
                if parsed.kv_transfer_params
                else None,
                cache_salt=parsed.cache_salt or "",
            )
            for (number, (prompt, sampling)), copy in copies
        ]

    async def _collect(self, request: EngineRequest, choice: ChoiceState) -> None:
        while choice.finish_reason is None:
            choice.add(await _next_output(request))

    async def _stream(
        self,
        http: web.Request,
        parsed: CommonRequest,
        builder: ResponseBuilder,
        requests: Sequence[EngineRequest],
        choices: Sequence[ChoiceState],
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(http)
        queue: asyncio.Queue[tuple[ChoiceState, Output]] = asyncio.Queue()
        pumps = [
            asyncio.create_task(_pump(request, choice, queue))
            for request, choice in zip(requests, choices, strict=True)
        ]
        try:
            started = False
            while any(choice.finish_reason is None for choice in choices):
                choice, output = await queue.get()
                if not started:
                    for event in builder.first_chunks(choices):
                        await self._send(response, event)
                    started = True
                if output.error is not None or output.finish_reason == "error":
                    # The status is out already: the error becomes the last event.
                    await self._send(response, internal_error().event())
                    break
                choice.add(output)
                event = builder.chunk(choice, output, with_params=self._config.params_in_stream)
                await self._send(response, event)
            else:
                if parsed.include_usage:
                    await self._send(response, builder.usage_chunk(choices))
            await self._send(response, "[DONE]")
        finally:
            for pump in pumps:
                pump.cancel()
        await response.write_eof()
        return response

    async def _send(self, response: web.StreamResponse, event: str) -> None:
        await self.listener.awake()
        await response.write(f"data: {event}\n\n".encode())


async def _pump(
    request: EngineRequest,
    choice: ChoiceState,
    queue: asyncio.Queue[tuple[ChoiceState, Output]],
) -> None:
    while True:
        output = await request.outputs.get()
        queue.put_nowait((choice, output))
        if output.finish_reason is not None or output.error is not None:
            return


async def _next_output(request: EngineRequest) -> Output:
    output = await request.outputs.get()
    if output.error is not None:
        raise output.error
    if output.finish_reason == "error":
        raise internal_error()
    return output


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except ApiError as error:
        return error.response()
    except web.HTTPException as error:
        return http_error(error.status).response()
