"""What goes to the router and what comes back, as plain Python."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from google.protobuf.struct_pb2 import Struct

from kvtide.v1 import router_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_LARGEST_EXACT_INT = 2**53

# Keepalive finds a dead router within seconds; the router's side allows for it.
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", 16 * 1024 * 1024),
    ("grpc.max_receive_message_length", 16 * 1024 * 1024),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)


@dataclass(frozen=True, slots=True)
class TurnReport:
    """What became of the prompt of one turn."""

    turn_id: str
    prefill_node_id: str
    decode_node_id: str
    prompt_tokens: int
    pulled_tokens: int
    """Tokens whose KV prefill read back from decode."""
    cached_tokens: int
    """Tokens that prefill had in its own cache."""
    recomputed_tokens: int
    """Tokens that prefill computed."""
    reuse: str
    """"pulled", or why nothing was."""
    decoder_kv_blocks_ttl_ms: int
    """How long decode keeps this turn's KV for the next one, in milliseconds."""
    kv_recompute_threshold_tokens: int
    """With fewer tokens than this to pull, prefill recomputes."""


@dataclass(frozen=True, slots=True)
class Finish:
    """How an answer ended. The counts are the decode engine's, 0 when it gave none."""

    reason: str
    """"stop", "length", "tool_calls", …"""
    prompt_tokens: int
    completion_tokens: int


Response = router_pb2.ChatResponse | router_pb2.CompleteResponse


class Progress:
    """What a stream has brought so far, apart from its text."""

    def __init__(self) -> None:
        self.report: TurnReport | None = None
        self.finish: Finish | None = None

    def take(self, response: Response) -> str:
        """The text of one message of the stream, "" when it has none."""
        kind = response.WhichOneof("event")
        if kind == "report":
            message = response.report
            values = {field.name: getattr(message, field.name) for field in fields(TurnReport)}
            self.report = TurnReport(**values)
        elif kind == "finish":
            end = response.finish
            self.finish = Finish(end.reason, end.prompt_tokens, end.completion_tokens)
        return response.text if kind == "text" else ""


def chat_request(
    model: str,
    messages: Iterable[Mapping[str, str]],
    *,
    session_id: str,
    max_tokens: int,
    temperature: float | None,
    parameters: Mapping[str, Any],
) -> router_pb2.ChatRequest:
    """Raises ValueError for a message or a parameter that can't travel, naming it."""
    return router_pb2.ChatRequest(
        model=model,
        messages=[_message(message) for message in messages],
        session_id=session_id,
        max_tokens=max_tokens,
        temperature=temperature,
        parameters=_struct(parameters),
    )


def complete_request(
    model: str,
    prompt: str,
    *,
    session_id: str,
    max_tokens: int,
    temperature: float | None,
    parameters: Mapping[str, Any],
) -> router_pb2.CompleteRequest:
    """Raises ValueError for a parameter that can't travel, naming it."""
    return router_pb2.CompleteRequest(
        model=model,
        prompt=prompt,
        session_id=session_id,
        max_tokens=max_tokens,
        temperature=temperature,
        parameters=_struct(parameters),
    )


def call_metadata(
    api_key: str | None, headers: Mapping[str, str] | None
) -> tuple[tuple[str, str], ...]:
    """Metadata of every call: who is calling, and what the caller adds."""
    own = (("authorization", f"Bearer {api_key}"),) if api_key else ()
    return (*own, *((name.lower(), value) for name, value in (headers or {}).items()))


def _message(message: Mapping[str, str]) -> router_pb2.ChatMessage:
    unknown = message.keys() - {"role", "content"}
    if unknown or len(message) != 2:
        text = f"a message has exactly a role and a content, got {sorted(message)}"
        raise ValueError(text)
    return router_pb2.ChatMessage(role=message["role"], content=message["content"])


def _struct(parameters: Mapping[str, Any]) -> Struct:
    struct = Struct()
    for name, value in parameters.items():
        _require_exact(name, value)
        try:
            struct.update({name: value})
        except (TypeError, ValueError) as error:
            text = f"the parameter {name} can't be sent: {error}"
            raise ValueError(text) from error
    return struct


def _require_exact(name: str, value: object) -> None:
    """Numbers travel as doubles: refuse an integer that would arrive as another one."""
    if isinstance(value, int) and abs(value) > _LARGEST_EXACT_INT:
        text = f"the parameter {name} is {value}; integers beyond 2**53 can't be sent exactly"
        raise ValueError(text)
    if isinstance(value, dict):
        for key, item in value.items():
            _require_exact(f"{name}.{key}", item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _require_exact(f"{name}[{index}]", item)
