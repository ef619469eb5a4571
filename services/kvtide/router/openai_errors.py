"""Errors as OpenAI clients expect them: a status, and {"error": {message, type, param, code}}."""

from __future__ import annotations

import math
from dataclasses import dataclass
from http import HTTPStatus

import orjson

from kvtide.router.errors import EngineFailed, InvalidField
from kvtide.router.sse import names_engine_internals
from kvtide.runtime.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    KvtideError,
    NotFound,
    ResourceExhausted,
    Unavailable,
)

__all__ = ["ErrorReply", "error_body", "error_event", "error_reply", "refusal_body"]

_INVALID_REQUEST = "invalid_request_error"
_SERVER_ERROR = "server_error"

_STATUS_BY_ERROR: dict[type[KvtideError], HTTPStatus] = {
    InvalidArgument: HTTPStatus.BAD_REQUEST,
    NotFound: HTTPStatus.NOT_FOUND,
    FailedPrecondition: HTTPStatus.CONFLICT,
    ResourceExhausted: HTTPStatus.TOO_MANY_REQUESTS,
    Unavailable: HTTPStatus.SERVICE_UNAVAILABLE,
    DeadlineExceeded: HTTPStatus.GATEWAY_TIMEOUT,
    EngineFailed: HTTPStatus.BAD_GATEWAY,
}


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """An HTTP error, ready to be sent."""

    status: int
    body: bytes
    headers: dict[str, str]


def error_body(status: int, message: str, *, code: str | None, param: str | None = None) -> bytes:
    """The JSON body of an error with this HTTP status."""
    kind = _SERVER_ERROR if status >= HTTPStatus.INTERNAL_SERVER_ERROR else _INVALID_REQUEST
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        kind = "rate_limit_error"
    error = {"message": message, "type": kind, "param": param, "code": code}
    return orjson.dumps({"error": error})


def error_reply(error: KvtideError) -> ErrorReply:
    """How a domain error is answered."""
    status = next(
        (
            _STATUS_BY_ERROR[error_type]
            for error_type in type(error).__mro__
            if error_type in _STATUS_BY_ERROR
        ),
        HTTPStatus.INTERNAL_SERVER_ERROR,
    )
    param = error.param if isinstance(error, InvalidField) else None
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(math.ceil(error.retry_after_s))
    body = error_body(status, error.message, code=error.code, param=param)
    return ErrorReply(status, body, headers)


def refusal_body(status: int, body: bytes) -> bytes:
    """The body of an engine's refusal as clients may see it: as it is, in nearly every case.

    Engines may quote the request in an error, and the request names hosts, ports and blocks of
    other engines by then. Such a message is withheld.
    """
    if not names_engine_internals(body):
        return body
    message = "the engine refused the request; its message is withheld because it names internals"
    return error_body(status, message, code="engine_refused")


def error_event(error: KvtideError) -> bytes:
    """An error in the middle of an event stream, after which the stream ends."""
    status = error_reply(error).status
    return b"data: " + error_body(status, error.message, code=error.code) + b"\n\n"
