"""Errors of the client, and the one table that makes them from gRPC status codes."""

from __future__ import annotations

from typing import cast

import grpc

_DETAILS_KEY = "grpc-status-details-bin"


class KvtideClientError(Exception):
    """A call to the router failed. The base of every error here, and itself the catch-all.

    `code` is a stable lower_snake_case word for programs, such as "model_not_found"; without one
    from the router it is the status code's name. `message` is a sentence for people.
    `retry_after_s`, when set, is how long the router asks to wait before a retry.
    """

    def __init__(
        self, message: str, *, code: str = "unknown", retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.retry_after_s = retry_after_s


class InvalidRequestError(KvtideClientError):
    """The request is wrong, and stays wrong when it is repeated."""


class NotFoundError(KvtideClientError):
    """No engine serves a model of that name."""


class LimitReachedError(KvtideClientError):
    """Too much at once, or too large."""


class UnavailableError(KvtideClientError):
    """The router can't be reached, or has no ready engine; a retry may succeed."""


class DeadlineExceededError(UnavailableError):
    """No answer within `timeout_s`. Whether the turn took place is unknown."""


class TurnFailedError(KvtideClientError):
    """An engine failed, perhaps in the middle of the answer; what came before is incomplete."""


class TurnCancelledError(KvtideClientError):
    """The stream was closed before its end, here or by a router that stopped."""


ERROR_BY_STATUS: dict[grpc.StatusCode, type[KvtideClientError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: LimitReachedError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    grpc.StatusCode.INTERNAL: TurnFailedError,
    grpc.StatusCode.CANCELLED: TurnCancelledError,
}


def error_from_rpc(error: grpc.RpcError) -> KvtideClientError:
    """The client's error for a failed call; `KvtideClientError` for codes outside the table."""
    call = cast("grpc.Call", error)
    status = call.code()
    code, retry_after_s = _details(call)
    error_type = ERROR_BY_STATUS.get(status, KvtideClientError)
    name = status.name.lower()
    return error_type(call.details() or name, code=code or name, retry_after_s=retry_after_s)


def _details(call: grpc.Call) -> tuple[str, float | None]:
    """The `ErrorInfo` reason and the `RetryInfo` delay that came with an error."""
    try:
        # In googleapis-common-protos, which the client does not depend on.
        from google.rpc import error_details_pb2, status_pb2  # noqa: PLC0415 - see above
    except ImportError:
        return "", None
    code, retry_after_s = "", None
    for key, value in call.trailing_metadata() or ():
        if key != _DETAILS_KEY or not isinstance(value, bytes):
            continue
        for detail in status_pb2.Status.FromString(value).details:
            info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
            if detail.Unpack(info):
                code = info.reason.lower()
            elif detail.Unpack(retry):
                retry_after_s = retry.retry_delay.ToMilliseconds() / 1000
    return code, retry_after_s
