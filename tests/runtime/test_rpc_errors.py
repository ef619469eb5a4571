"""Errors over gRPC: what a servicer raises is what the caller catches."""

import asyncio

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from kvtide.runtime import (
    DeadlineExceeded,
    FailedPrecondition,
    GrpcService,
    Internal,
    InvalidArgument,
    KvtideError,
    NotFound,
    ResourceExhausted,
    Unavailable,
    error_from_rpc,
    open_channel,
    start_grpc_server,
    status_errors,
)
from kvtide.v1 import node_pb2 as pb
from kvtide.v1 import node_pb2_grpc as pb_grpc


class Servicer(pb_grpc.NodeHealthServiceServicer):
    """Raises what it is told to, before or in the middle of a stream."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.stream_closed = asyncio.Event()

    @status_errors
    async def ListNodes(self, request, context):
        if self.error is not None:
            raise self.error
        return pb.ListNodesResponse()

    @status_errors
    async def WatchNodes(self, request, context):
        try:
            yield pb.WatchNodesResponse()
            if self.error is not None:
                raise self.error
            await asyncio.Event().wait()
        finally:
            self.stream_closed.set()


@pytest.fixture
def servicer():
    return Servicer()


@pytest.fixture
async def stub(servicer):
    service = GrpcService(
        "kvtide.v1.NodeHealthService",
        lambda server: pb_grpc.add_NodeHealthServiceServicer_to_server(servicer, server),
    )
    server = await start_grpc_server("127.0.0.1:0", [service])
    async with open_channel(server.address) as channel:
        yield pb_grpc.NodeHealthServiceStub(channel)
    await server.stop(grace_s=0)


ERRORS = [
    InvalidArgument("bad_id", "tenant is empty; name one"),
    NotFound("no_lease", "no lease of conversation 'c'"),
    FailedPrecondition("newer_epoch", "a newer start of node 'd' is attached"),
    ResourceExhausted("too_large", "17 MiB are more than 16"),
    Unavailable("stopping", "the registry is stopping", retry_after_s=1.5),
    DeadlineExceeded("too_slow", "no answer in 1 s"),
    Internal("internal", "a bug"),
]


async def _failure(stub) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.ListNodes(pb.ListNodesRequest())
    return caught.value


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_error_survives_the_wire(servicer, stub, error):
    """Type, code, message and retry delay of an error arrive as they were raised."""
    servicer.error = error
    found = error_from_rpc(await _failure(stub))
    assert type(found) is type(error)
    assert (found.code, found.message) == (error.code, error.message)
    assert found.retry_after_s == error.retry_after_s


async def test_status_is_standard(servicer, stub):
    """A client without kvtide finds a google.rpc.Status with ErrorInfo and RetryInfo."""
    servicer.error = Unavailable("stopping", "come back", retry_after_s=2)
    failure = await _failure(stub)
    assert failure.code() is grpc.StatusCode.UNAVAILABLE
    status = rpc_status.from_call(failure)
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    assert status.details[0].Unpack(info)
    assert status.details[1].Unpack(retry)
    assert (info.reason, info.domain) == ("STOPPING", "kvtide")
    assert retry.retry_delay.seconds == 2


async def test_subclass_stands_for_its_nearest_base(servicer, stub):
    """An error type that the table does not name gets the status of the one it refines."""

    class TooManyPins(ResourceExhausted):
        pass

    servicer.error = TooManyPins("too_many_pins", "no room")
    found = error_from_rpc(await _failure(stub))
    assert type(found) is ResourceExhausted
    assert found.code == "too_many_pins"


async def test_plain_kvtide_error_is_internal(servicer, stub):
    """An error of no particular kind is INTERNAL, with its message."""
    servicer.error = KvtideError("odd", "something odd")
    assert repr(error_from_rpc(await _failure(stub))) == (
        "Internal(code='odd', message='something odd')"
    )


async def test_bug_tells_nothing_to_the_caller(servicer, stub):
    """An unexpected exception becomes INTERNAL without its text."""
    servicer.error = ZeroDivisionError("secret")
    failure = await _failure(stub)
    assert failure.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in failure.details()


async def test_handler_may_abort_by_itself(servicer, stub):
    """A status that a handler sets by hand goes through untouched."""

    class Aborting(Servicer):
        @status_errors
        async def ListNodes(self, request, context):
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, "by hand")

    service = GrpcService(
        "kvtide.v1.NodeHealthService",
        lambda server: pb_grpc.add_NodeHealthServiceServicer_to_server(Aborting(), server),
    )
    server = await start_grpc_server("127.0.0.1:0", [service])
    async with open_channel(server.address) as channel:
        failure = await _failure(pb_grpc.NodeHealthServiceStub(channel))
    await server.stop(grace_s=0)
    assert failure.code() is grpc.StatusCode.ALREADY_EXISTS
    # Outside of the table: the caller gets Internal, with the status's own name as its code.
    assert repr(error_from_rpc(failure)) == "Internal(code='already_exists', message='by hand')"


async def test_stream_error_comes_after_what_was_sent(servicer, stub):
    """A stream that fails half-way delivers what it had, then the error."""
    servicer.error = FailedPrecondition("newer_epoch", "replaced")
    call = stub.WatchNodes(pb.WatchNodesRequest())
    assert await call.read() is not grpc.aio.EOF
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert isinstance(error_from_rpc(caught.value), FailedPrecondition)


async def test_stream_cleans_up_when_the_caller_leaves(servicer, stub):
    """The handler's own clean-up runs as soon as its caller is gone."""
    call = stub.WatchNodes(pb.WatchNodesRequest())
    assert await call.read() is not grpc.aio.EOF
    call.cancel()
    await asyncio.wait_for(servicer.stream_closed.wait(), timeout=30)


async def test_unreachable_server_is_unavailable():
    """A failure of gRPC itself is a domain error too, with the status's name as its code."""
    async with open_channel("127.0.0.1:1") as channel:
        found = error_from_rpc(await _failure(pb_grpc.NodeHealthServiceStub(channel)))
    assert type(found) is Unavailable
    assert found.code == "unavailable"


async def test_timeout_is_a_kind_of_unavailable(servicer, stub):
    """A caller that handles an absent server handles a slow one with the same line."""
    call = stub.WatchNodes(pb.WatchNodesRequest(), timeout=0.2)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    assert isinstance(error_from_rpc(caught.value), DeadlineExceeded)
    assert issubclass(DeadlineExceeded, Unavailable)
