"""The OpenAI-compatible HTTP face of the router. Converts; decides nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

from kvtide.router.errors import EngineRefused, InvalidField
from kvtide.router.identity import SESSION_HEADER, session_key, tenant_of
from kvtide.router.openai_errors import error_body, error_reply, refusal_body
from kvtide.router.placement import model_names
from kvtide.router.report import report_header
from kvtide.router.requests import READBACK_HEADER, TRACE_HEADERS, turn_request
from kvtide.router.shaping import CHAT_PATH, COMPLETIONS_PATH
from kvtide.runtime import FailedPrecondition, KvtideError, get_logger
from kvtide.runtime.address import join_address

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtide.router.router import Router
    from kvtide.router.turn import Turn

__all__ = ["TURN_HEADER", "RouterHttp", "start_http"]

TURN_HEADER = "X-Kvtide-Turn"
_AUTHORIZATION = "Authorization"
_JSON = "application/json"
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Turns are over by then; this is for handlers to write their last bytes.
_CLEANUP_TIMEOUT_S = 1.0

_log = get_logger(__name__)


class RouterHttp:
    """A running HTTP server."""

    def __init__(self, router: Router, runner: web.AppRunner, site: web.TCPSite, host: str) -> None:
        self._router = router
        self._runner = runner
        self._site = site
        self._host = host
        self._stopping = False
        self.port: int = runner.addresses[0][1]
        """The port that was really bound."""

    @property
    def address(self) -> str:
        """The address that was really bound, as host:port."""
        return join_address(self._host, self.port)

    async def stop(self) -> None:
        """Refuse new connections, let running turns finish as the router's drain allows, close.

        Harmless twice.
        """
        if self._stopping:
            return
        self._stopping = True
        await self._site.stop()
        await self._router.drain()
        await self._runner.cleanup()


async def start_http(router: Router, host: str, port: int) -> RouterHttp:
    """Serve a started router on `host`:`port` (0 for any free port).

    Raises `FailedPrecondition` when the address can't be bound.
    """
    app = web.Application(
        client_max_size=router.settings.router.max_body_bytes, middlewares=[_openai_errors]
    )
    app[_ROUTER] = router
    app.router.add_post(CHAT_PATH, _serve_turn)
    app.router.add_post(COMPLETIONS_PATH, _serve_turn)
    app.router.add_get("/v1/models", _models)
    app.router.add_delete("/v1/conversations/{session_id}", _close_conversation)
    app.router.add_get("/kvtide/turns", _turns)
    app.router.add_get("/health", _health)
    app.router.add_get("/ready", _ready)
    app.router.add_get("/metrics", _metrics)
    runner = web.AppRunner(
        app,
        access_log=None,
        # A client that leaves ends its turn at once, in whatever phase it is.
        handler_cancellation=True,
        shutdown_timeout=_CLEANUP_TIMEOUT_S,
    )
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    try:
        await site.start()
    except OSError as error:
        await runner.cleanup()
        address = join_address(host, port)
        message = (
            f"can't listen on {address}: {error.strerror or error}; "
            "choose another address with --http.listen"
        )
        raise FailedPrecondition("listen_failed", message) from error
    return RouterHttp(router, runner, site, host)


_ROUTER: web.AppKey[Router] = web.AppKey("router")


async def _serve_turn(request: web.Request) -> web.StreamResponse:
    router = request.app[_ROUTER]
    body = await _json_object(request)
    headers = request.headers
    checked = turn_request(
        request.path,
        body,
        authorization=headers.get(_AUTHORIZATION),
        session_header=headers.get(SESSION_HEADER),
        readback_header=headers.get(READBACK_HEADER),
        trace_headers={
            # A list over several headers is one list.
            name: ",".join(headers.getall(name))
            for name in TRACE_HEADERS
            if name in headers
        },
    )
    async with router.turns.open(checked) as turn:
        return await _send_answer(request, turn)


async def _send_answer(request: web.Request, turn: Turn) -> web.StreamResponse:
    response = web.StreamResponse(
        headers={"Content-Type": turn.content_type, TURN_HEADER: report_header(turn.report)}
    )
    if turn.is_event_stream:
        response.headers["Cache-Control"] = "no-cache"
        # Proxies such as nginx would hold a stream back to fill their buffers.
        response.headers["X-Accel-Buffering"] = "no"
        await response.prepare(request)
        try:
            async for data in turn:
                await response.write(data)
        except ConnectionError:
            raise
        except Exception as error:
            # A second status line would be read as part of the answer: break the connection.
            _log.exception("relay_failed", turn_id=turn.turn_id)
            raise ConnectionAbortedError("the answer broke off") from error
    else:
        body = b"".join([data async for data in turn])
        response.content_length = len(body)
        await response.prepare(request)
        await response.write(body)
    await response.write_eof()
    return response


async def _json_object(request: web.Request) -> Mapping[str, Any]:
    limit = request.app[_ROUTER].settings.router.max_body_bytes
    if (request.content_length or 0) > limit:
        raise web.HTTPRequestEntityTooLarge(limit, request.content_length or 0)
    raw = await request.read()
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        # orjson's own text says where; it quotes nothing of the body.
        raise InvalidField("body", f"the body is no JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise InvalidField("body", "the body must be a JSON object")
    return body


async def _close_conversation(request: web.Request) -> web.Response:
    tenant = tenant_of(request.headers.get(_AUTHORIZATION))
    key = session_key(tenant, request.match_info["session_id"], "session_id")
    await request.app[_ROUTER].close_conversation(key)
    closed = {"id": key.conversation_id, "object": "conversation.deleted", "deleted": True}
    return _json(closed)


async def _models(request: web.Request) -> web.Response:
    router = request.app[_ROUTER]
    models = [
        {"id": name, "object": "model", "created": router.started_at, "owned_by": "kvtide"}
        for name in model_names(router.nodes)
    ]
    return _json({"object": "list", "data": models})


async def _turns(request: web.Request) -> web.Response:
    records = request.app[_ROUTER].history.records()
    return _json({"turns": [record.as_json() for record in records]})


async def _health(_request: web.Request) -> web.Response:
    return _json({"status": "ok"})


async def _ready(request: web.Request) -> web.Response:
    if request.app[_ROUTER].ready:
        return _json({"status": "ready"})
    message = "no model has both a ready prefill and a ready decode engine, or this router stops"
    body = error_body(503, message, code="not_ready")
    return web.Response(status=503, body=body, content_type=_JSON)


async def _metrics(request: web.Request) -> web.Response:
    body = request.app[_ROUTER].metrics.exposition()
    return web.Response(body=body, headers={"Content-Type": _METRICS_TYPE})


@web.middleware
async def _openai_errors(request: web.Request, handler: Any) -> web.StreamResponse:
    """Answer every error in OpenAI's form."""
    try:
        response: web.StreamResponse = await handler(request)
    except EngineRefused as refused:
        headers = {"Retry-After": refused.retry_after} if refused.retry_after else {}
        headers["Content-Type"] = refused.content_type
        body = refusal_body(refused.status, refused.body)
        return web.Response(status=refused.status, body=body, headers=headers)
    except KvtideError as error:
        reply = error_reply(error)
        return web.Response(
            status=reply.status, body=reply.body, headers=reply.headers, content_type=_JSON
        )
    except web.HTTPRequestEntityTooLarge:
        limit = request.app[_ROUTER].settings.router.max_body_bytes
        body = error_body(413, f"the body is larger than {limit} bytes", code="body_too_large")
        return web.Response(status=413, body=body, content_type=_JSON)
    except web.HTTPException as error:
        message = f"{request.method} {request.path}: {error.reason}"
        body = error_body(error.status, message, code=None)
        # Such as Allow, with a 405.
        headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
        return web.Response(status=error.status, body=body, headers=headers, content_type=_JSON)
    except ConnectionError:
        # The client left while it was being written to; there is nobody to answer.
        raise
    except Exception:  # noqa: BLE001 - the last resort, logged with its traceback
        _log.exception("request_failed", method=request.method, path=request.path)
        body = error_body(500, "internal error; the server's log has the details", code="internal")
        return web.Response(status=500, body=body, content_type=_JSON)
    return response


def _json(value: object) -> web.Response:
    return web.Response(body=orjson.dumps(value), content_type=_JSON)
