"""Whose conversation is this? Tenant and conversation id of a request. Pure.

Conversations are namespaced by tenant, so two tenants may use the same session id and never see
each other's KV. A request without a session id belongs to no conversation: it is served, and
nothing of it is kept.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from kvtide.registry.ports import MAX_ID_CHARS, ConversationKey
from kvtide.router.errors import InvalidField

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["DEFAULT_TENANT", "SESSION_HEADER", "conversation_of", "session_key", "tenant_of"]

SESSION_HEADER = "X-Session-ID"
DEFAULT_TENANT = "default"
_TENANT_DIGEST_CHARS = 16


def tenant_of(authorization: str | None) -> str:
    """The tenant behind an Authorization header.

    "default" without a bearer token, else "key-" and the start of the token's SHA-256: tenants
    differ when their tokens do, and no token is ever kept or logged.
    """
    scheme, _, token = (authorization or "").strip().partition(" ")
    token = token.strip()
    if scheme.lower() != "bearer" or not token:
        return DEFAULT_TENANT
    digest = hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()
    return f"key-{digest[:_TENANT_DIGEST_CHARS]}"


def conversation_of(
    tenant: str, session_header: str | None, body: Mapping[str, object]
) -> ConversationKey | None:
    """The conversation of a request: the X-Session-ID header, else `session_id` in the body.

    A null `session_id` counts as absent. Raises `InvalidField` for an id that is no string, is
    empty, has more than 256 characters, or is not valid Unicode.
    """
    in_body = body.get("session_id")
    from_body = None if in_body is None else session_key(tenant, in_body, "session_id")
    if session_header is None:
        return from_body
    return session_key(tenant, session_header, SESSION_HEADER)


def session_key(tenant: str, session_id: object, param: str) -> ConversationKey:
    """The key for one explicit session id; `param` is what an error calls it."""
    if not isinstance(session_id, str):
        kind = type(session_id).__name__
        raise InvalidField(param, f"{param} must be a string, got {kind}")
    if not 1 <= len(session_id) <= MAX_ID_CHARS:
        message = f"{param} must have 1 to {MAX_ID_CHARS} characters, got {len(session_id)}"
        raise InvalidField(param, message)
    try:
        session_id.encode()
    except UnicodeEncodeError:
        # Bytes of a header that are no UTF-8: they could not travel to the registry.
        raise InvalidField(param, f"{param} is not valid UTF-8") from None
    return ConversationKey(tenant, session_id)
