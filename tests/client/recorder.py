"""A router service that records what it is asked and answers what it is told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from kvtide.v1 import router_pb2, router_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Sequence

    import grpc


@dataclass
class RecordingService(router_pb2_grpc.RouterServiceServicer):
    requests: list[Any] = field(default_factory=list)
    metadata: list[dict[str, Any]] = field(default_factory=list)
    responses: Sequence[dict[str, Any]] = ()
    code: grpc.StatusCode | None = None
    details: Sequence[Any] = ()

    def record(self, request, context) -> None:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))

    async def fail(self, context) -> None:
        if self.code is None:
            return
        packed = []
        for detail in self.details:
            packed.append(any_pb2.Any())
            packed[-1].Pack(detail)
        status = status_pb2.Status(code=self.code.value[0], message="told to", details=packed)
        await context.abort_with_status(rpc_status.to_status(status))

    async def Chat(self, request, context):
        self.record(request, context)
        for response in self.responses:
            yield router_pb2.ChatResponse(**response)
        await self.fail(context)

    async def Complete(self, request, context):
        self.record(request, context)
        for response in self.responses:
            yield router_pb2.CompleteResponse(**response)
        await self.fail(context)

    async def CloseConversation(self, request, context):
        self.record(request, context)
        await self.fail(context)
        return router_pb2.RouterServiceCloseConversationResponse()


def error_details(reason: str, retry_after_ms: int) -> list[Any]:
    delay = duration_pb2.Duration()
    delay.FromMilliseconds(retry_after_ms)
    return [
        error_details_pb2.ErrorInfo(reason=reason, domain="kvtide"),
        error_details_pb2.RetryInfo(retry_delay=delay),
    ]
