"""The gRPC face of the router. Converts; decides nothing."""

# ruff: noqa: N802 - method names are gRPC's; router.proto documents them.

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar

import orjson

from kvtide.router.errors import EngineFailed, EngineRefused, InvalidField
from kvtide.router.identity import session_key, tenant_of
from kvtide.router.openai_errors import refusal_body
from kvtide.router.requests import TRACE_HEADERS, TurnRequest, turn_request
from kvtide.router.shaping import CHAT_PATH, COMPLETIONS_PATH
from kvtide.router.sse import event_data, split_events
from kvtide.runtime import (
    GrpcService,
    Internal,
    InvalidArgument,
    KvtideError,
    NotFound,
    ResourceExhausted,
    Unavailable,
    status_errors,
)
from kvtide.v1 import router_pb2, router_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    import grpc
    from google.protobuf.struct_pb2 import Struct, Value

    from kvtide.router.router import Router

__all__ = ["SERVICE_NAME", "add_router_service", "router_service"]

SERVICE_NAME = router_pb2.DESCRIPTOR.services_by_name["RouterService"].full_name

_Response = TypeVar("_Response", router_pb2.ChatResponse, router_pb2.CompleteResponse)

# Fields of the messages themselves, and what decides about the form of the stream.
_RESERVED_PARAMETERS = frozenset(
    {
        "max_tokens",
        "messages",
        "model",
        "prompt",
        "session_id",
        "stream",
        "stream_options",
        "temperature",
    }
)
_ERROR_BY_HTTP_STATUS: dict[int, type[KvtideError]] = {
    HTTPStatus.NOT_FOUND: NotFound,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: ResourceExhausted,
    HTTPStatus.TOO_MANY_REQUESTS: ResourceExhausted,
    HTTPStatus.SERVICE_UNAVAILABLE: Unavailable,
}


def add_router_service(server: grpc.aio.Server, router: Router) -> None:
    """Serve a started router's `kvtide.v1.RouterService` on `server`."""
    router_pb2_grpc.add_RouterServiceServicer_to_server(_RouterServicer(router), server)


def router_service(router: Router) -> GrpcService:
    """The same, for `start_grpc_server`."""
    return GrpcService(SERVICE_NAME, lambda server: add_router_service(server, router))


class _RouterServicer(router_pb2_grpc.RouterServiceServicer):
    def __init__(self, router: Router) -> None:
        self._router = router

    @status_errors
    async def Chat(
        self, request: router_pb2.ChatRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[router_pb2.ChatResponse]:
        body = _body(request)
        body["messages"] = [
            {"role": message.role, "content": message.content} for message in request.messages
        ]
        turn = _turn_request(CHAT_PATH, body, context)
        async for response in self._serve(turn, router_pb2.ChatResponse):
            yield response

    @status_errors
    async def Complete(
        self, request: router_pb2.CompleteRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[router_pb2.CompleteResponse]:
        body = _body(request)
        body["prompt"] = request.prompt
        turn = _turn_request(COMPLETIONS_PATH, body, context)
        async for response in self._serve(turn, router_pb2.CompleteResponse):
            yield response

    @status_errors
    async def CloseConversation(
        self,
        request: router_pb2.RouterServiceCloseConversationRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> router_pb2.RouterServiceCloseConversationResponse:
        tenant = tenant_of(_metadata(context).get("authorization"))
        key = session_key(tenant, request.session_id, "session_id")
        await self._router.close_conversation(key)
        return router_pb2.RouterServiceCloseConversationResponse()

    async def _serve(
        self, request: TurnRequest, response_type: type[_Response]
    ) -> AsyncIterator[_Response]:
        if request.undivided in {"n", "best_of", "prompt"}:
            message = "a gRPC stream carries one answer; use the HTTP endpoint for several"
            raise InvalidField(request.undivided, message)
        try:
            async with self._router.turns.open(request) as turn:
                if not turn.is_event_stream:
                    raise EngineFailed("decode", "it did not stream its answer")
                yield response_type(report=router_pb2.TurnReport(**turn.report.as_json()))
                finish = router_pb2.Finish()
                async for data in turn:
                    for event in split_events(data):
                        text = _take_event(event, finish)
                        if text:
                            yield response_type(text=text)
                yield response_type(finish=finish)
        except EngineRefused as refused:
            raise _refusal(refused) from refused


def _turn_request(
    path: str, body: Mapping[str, Any], context: grpc.aio.ServicerContext[Any, Any]
) -> TurnRequest:
    metadata = _metadata(context)
    return turn_request(
        path,
        body,
        authorization=metadata.get("authorization"),
        readback_header=metadata.get("x-kvtide-readback"),
        trace_headers={name: metadata[name] for name in TRACE_HEADERS if name in metadata},
    )


def _body(request: router_pb2.ChatRequest | router_pb2.CompleteRequest) -> dict[str, Any]:
    """What both requests have in common, as an OpenAI body that asks for a stream."""
    body = _from_struct(request.parameters)
    for name in body:
        if name in _RESERVED_PARAMETERS:
            message = f"{name} has no place in parameters: the request has a field for it, or none"
            raise InvalidField(name, message)
    body["model"] = request.model
    body["stream"] = True
    body["stream_options"] = {"include_usage": True}
    if request.session_id:
        body["session_id"] = request.session_id
    if request.max_tokens:
        body["max_tokens"] = request.max_tokens
    if request.HasField("temperature"):
        body["temperature"] = request.temperature
    return body


def _take_event(event: bytes, finish: router_pb2.Finish) -> str:
    """The text of one event of the stream; notes in `finish` what belongs there.

    Raises `Internal` when the event reports an error.
    """
    data = event_data(event)
    if not data or data == b"[DONE]":
        return ""
    chunk = orjson.loads(data)
    error = chunk.get("error")
    if isinstance(error, dict):
        raise Internal("engine_failed", str(error.get("message", "the engine failed")))
    usage = chunk.get("usage")
    if isinstance(usage, dict):
        finish.prompt_tokens = usage.get("prompt_tokens") or 0
        finish.completion_tokens = usage.get("completion_tokens") or 0
    for choice in chunk.get("choices") or ():
        reason = choice.get("finish_reason")
        if reason:
            finish.reason = reason
        delta = choice.get("delta")
        text = delta.get("content") if isinstance(delta, dict) else choice.get("text")
        # One answer, so one choice.
        return text or ""
    return ""


def _refusal(refused: EngineRefused) -> KvtideError:
    """The engine's own error, by the class of its HTTP status."""
    client_fault = refused.status < HTTPStatus.INTERNAL_SERVER_ERROR
    default = InvalidArgument if client_fault else Internal
    error_type = _ERROR_BY_HTTP_STATUS.get(refused.status, default)
    return error_type("engine_refused", _refusal_message(refused))


def _refusal_message(refused: EngineRefused) -> str:
    try:
        error = orjson.loads(refusal_body(refused.status, refused.body))["error"]
        return str(error["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return refused.message


def _metadata(context: grpc.aio.ServicerContext[Any, Any]) -> dict[str, str]:
    """Text metadata of the call; binary entries are none of ours."""
    return {
        name: value for name, value in context.invocation_metadata() or () if isinstance(value, str)
    }


def _from_struct(parameters: Struct) -> dict[str, Any]:
    return {name: _from_value(value) for name, value in parameters.fields.items()}


def _from_value(value: Value) -> Any:
    kind = value.WhichOneof("kind")
    if kind == "number_value":
        # A Struct knows only doubles, and engines refuse 42.0 for a seed.
        number = value.number_value
        return int(number) if number.is_integer() else number
    if kind == "struct_value":
        return _from_struct(value.struct_value)
    if kind == "list_value":
        return [_from_value(item) for item in value.list_value.values]
    if kind is None or kind == "null_value":
        return None
    return getattr(value, kind)
