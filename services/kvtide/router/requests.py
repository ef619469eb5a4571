"""A client's request, checked: what HTTP and gRPC both hand to the turn engine. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvtide.router.errors import InvalidField
from kvtide.router.identity import conversation_of, tenant_of
from kvtide.router.shaping import check_body, client_body, why_not_disaggregated

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtide.registry.ports import ConversationKey

__all__ = ["READBACK_HEADER", "TRACE_HEADERS", "TurnRequest", "turn_request"]

READBACK_HEADER = "X-Kvtide-Readback"
TRACE_HEADERS = ("traceparent", "tracestate")
"""All that is passed on of a client's headers; vLLM looks at no others of use to it. Above all
`Authorization` is not: it is the client's credential for this router, not for engines."""


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """One turn that a client asks for."""

    path: str
    """Path of the OpenAI endpoint, the same here and on the engines."""
    model: str
    body: dict[str, Any]
    """The body as engines may see it (`shaping.client_body`)."""
    tenant: str
    key: ConversationKey | None
    """None when the request names no conversation."""
    readback: bool = True
    """False when the client switched reuse off for this turn."""
    undivided: str = ""
    """The parameter for which only one engine alone can serve the turn; "" if two legs can."""
    engine_headers: Mapping[str, str] = field(default_factory=dict)
    """Headers for both legs."""

    @property
    def wants_usage(self) -> bool:
        """Whether a streamed answer must end with a usage chunk."""
        options = self.body.get("stream_options")
        return isinstance(options, dict) and bool(options.get("include_usage"))


def turn_request(
    path: str,
    body: Mapping[str, Any],
    *,
    authorization: str | None = None,
    session_header: str | None = None,
    readback_header: str | None = None,
    trace_headers: Mapping[str, str] | None = None,
) -> TurnRequest:
    """Check a request. Header arguments are None when the client sent none.

    Raises `InvalidField` that names the first field found wrong.
    """
    model = check_body(path, body)
    tenant = tenant_of(authorization)
    key = conversation_of(tenant, session_header, body)
    readback = (readback_header or "on").strip().lower()
    if readback not in {"on", "off"}:
        message = f'{READBACK_HEADER} must be "on" or "off", got {readback_header!r}'
        raise InvalidField(READBACK_HEADER, message)
    cleaned = client_body(body)
    return TurnRequest(
        path=path,
        model=model,
        body=cleaned,
        tenant=tenant,
        key=key,
        readback=readback == "on",
        undivided=why_not_disaggregated(path, cleaned),
        engine_headers=trace_headers or {},
    )
