"""The one table that takes domain errors over gRPC and back.

A servicer's methods wear `@status_errors`, which turns what they raise into a
`google.rpc.Status` with an `ErrorInfo` (and a `RetryInfo` where a retry makes sense). A gRPC
client turns an `RpcError` back with `error_from_rpc`, so that a caller can't tell a local
implementation from a remote one.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from kvtide.runtime.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    KvtideError,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from kvtide.runtime.log import get_logger

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

__all__ = ["ERROR_DOMAIN", "error_from_rpc", "status_errors", "status_from_error"]

ERROR_DOMAIN = "kvtide"
"""`ErrorInfo.domain` of every error that comes from kvtide itself."""

_Handler = TypeVar("_Handler", bound="Callable[..., Any]")

_log = get_logger(__name__)


# The one table, read both ways. A class that is not in it stands for its nearest base that is.
_STATUS_BY_ERROR: dict[type[KvtideError], grpc.StatusCode] = {
    InvalidArgument: grpc.StatusCode.INVALID_ARGUMENT,
    NotFound: grpc.StatusCode.NOT_FOUND,
    FailedPrecondition: grpc.StatusCode.FAILED_PRECONDITION,
    ResourceExhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    Internal: grpc.StatusCode.INTERNAL,
}
_ERROR_BY_STATUS = {status: error for error, status in _STATUS_BY_ERROR.items()}


def status_from_error(error: KvtideError) -> status_pb2.Status:
    """The `google.rpc.Status` of a domain error.

    `ErrorInfo.reason` is the error's code in upper case, as AIP-193 wants it.
    """
    info = error_details_pb2.ErrorInfo(reason=error.code.upper(), domain=ERROR_DOMAIN)
    details = [_packed(info)]
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(round(error.retry_after_s * 1000))
        details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
    return status_pb2.Status(
        code=code_pb2.Code.Value(_status_code(error).name), message=error.message, details=details
    )


def error_from_rpc(error: grpc.RpcError) -> KvtideError:
    """The domain error behind a failed call.

    Status codes outside the table give `Internal`. Without an `ErrorInfo` (a proxy, or gRPC
    itself) the code is the status code's own name, such as "unavailable".
    """
    call = cast("grpc.Call", error)
    status_code = call.code()
    code = status_code.name.lower()
    message = call.details() or code
    retry_after_s = None
    for detail in _details_of(call):
        info = error_details_pb2.ErrorInfo()
        retry = error_details_pb2.RetryInfo()
        if detail.Unpack(info) and info.domain == ERROR_DOMAIN:
            code = info.reason.lower()
        elif detail.Unpack(retry):
            retry_after_s = retry.retry_delay.ToMilliseconds() / 1000
    error_type = _ERROR_BY_STATUS.get(status_code, Internal)
    return error_type(code, message, retry_after_s=retry_after_s)


def status_errors(handler: _Handler) -> _Handler:
    """Decorate an async servicer method so that what it raises becomes a gRPC status.

    Works for methods that return (`async def`) and for those that stream (`async def` with
    `yield`). A `KvtideError` becomes its status; anything else is logged with its traceback and
    becomes INTERNAL without details, which are nobody else's business.
    """
    if inspect.isasyncgenfunction(handler):

        @functools.wraps(handler)
        async def stream(
            self: object, request: object, context: grpc.aio.ServicerContext[Any, Any]
        ) -> AsyncIterator[Any]:
            responses = handler(self, request, context)
            try:
                async for response in responses:
                    yield response
            except Exception as error:  # noqa: BLE001 - every error needs a status
                await _abort(context, error)
            finally:
                # The generator's own clean-up must not wait for the garbage collector.
                await responses.aclose()

        return cast("_Handler", stream)

    @functools.wraps(handler)
    async def unary(
        self: object, request: object, context: grpc.aio.ServicerContext[Any, Any]
    ) -> object:
        try:
            return await handler(self, request, context)
        except Exception as error:  # noqa: BLE001 - every error needs a status
            await _abort(context, error)

    return cast("_Handler", unary)


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: Exception) -> NoReturn:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if not isinstance(error, KvtideError):
        _log.error("rpc_failed", exc_info=error)
        error = Internal("internal", "internal error; the server's log has the details")
    await context.abort_with_status(rpc_status.to_status(status_from_error(error)))
    raise AssertionError  # abort_with_status always raises; its type doesn't say so


def _status_code(error: KvtideError) -> grpc.StatusCode:
    for error_type in type(error).__mro__:
        if error_type in _STATUS_BY_ERROR:
            return _STATUS_BY_ERROR[error_type]
    return grpc.StatusCode.INTERNAL


def _packed(message: error_details_pb2.ErrorInfo | error_details_pb2.RetryInfo) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def _details_of(call: grpc.Call) -> list[any_pb2.Any]:
    try:
        status = rpc_status.from_call(call)
    except ValueError:
        # The details contradict the status: a broken or hostile peer. The status stands.
        return []
    return [] if status is None else list(status.details)
