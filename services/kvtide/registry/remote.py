"""The lease registry of another process, over gRPC."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import grpc.aio

from kvtide.registry import wire
from kvtide.runtime.errors import InvalidArgument
from kvtide.runtime.rpc_errors import error_from_rpc
from kvtide.v1 import lease_pb2 as pb
from kvtide.v1 import lease_pb2_grpc as pb_grpc

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kvtide.registry.ports import (
        ClaimResult,
        ConversationKey,
        LeasePage,
        LeaseQuery,
        LeaseView,
        Settlement,
    )

DEFAULT_TIMEOUT_S = 5.0
_MAX_GRANT_WAIT_MS = 2**32 - 1


class GrpcLeaseRegistry:
    """Implements ``LeaseRegistry`` over a channel, which the caller opens and closes.

    Open it with ``kvtide.runtime.open_channel``. Every call gives up after
    ``timeout_s`` seconds with ``DeadlineExceeded``, which is an ``Unavailable``.
    """

    def __init__(self, channel: grpc.aio.Channel, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self._stub = pb_grpc.LeaseRegistryServiceStub(channel)
        self._timeout_s = timeout_s

    async def claim(
        self, key: ConversationKey, *, grant_wait_s: float | None = None
    ) -> ClaimResult:
        """See ``LeaseRegistry``."""
        request = pb.ClaimRequest(
            conversation=wire.key_to_proto(key), grant_wait_ms=_grant_wait_ms(grant_wait_s)
        )
        return wire.claim_result_from_proto(await self._call(self._stub.Claim, request))

    async def settle(self, settlement: Settlement) -> None:
        """See ``LeaseRegistry``."""
        await self._call(self._stub.Settle, wire.settlement_to_proto(settlement))

    async def close_conversation(self, key: ConversationKey) -> None:
        """See ``LeaseRegistry``."""
        request = pb.CloseConversationRequest(conversation=wire.key_to_proto(key))
        await self._call(self._stub.CloseConversation, request)

    async def get_lease(self, key: ConversationKey) -> LeaseView:
        """See ``LeaseRegistry``."""
        request = pb.GetLeaseRequest(conversation=wire.key_to_proto(key))
        response = await self._call(self._stub.GetLease, request)
        return wire.lease_from_proto(response.lease)

    async def list_leases(self, query: LeaseQuery) -> LeasePage:
        """See ``LeaseRegistry``."""
        response = await self._call(self._stub.ListLeases, wire.query_to_proto(query))
        return wire.page_from_proto(response)

    async def _call(self, method: Callable[..., Awaitable[Any]], request: Any) -> Any:
        try:
            return await method(request, timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error


def _grant_wait_ms(grant_wait_s: float | None) -> int:
    """On the wire 0 means the registry's default, so that 0 s becomes the least wait."""
    if grant_wait_s is None:
        return 0
    if not grant_wait_s >= 0:
        raise InvalidArgument(
            "invalid_grant_wait", f"grant_wait_s must not be negative, got {grant_wait_s}"
        )
    return min(_MAX_GRANT_WAIT_MS, max(1, math.ceil(grant_wait_s * 1000)))
