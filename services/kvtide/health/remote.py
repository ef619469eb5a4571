"""Node health of another process, over gRPC."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import grpc.aio

from kvtide.health import wire
from kvtide.runtime.errors import Unavailable
from kvtide.runtime.log import get_logger
from kvtide.runtime.rpc_errors import error_from_rpc
from kvtide.v1 import node_pb2 as pb
from kvtide.v1 import node_pb2_grpc as pb_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from kvtide.health.ports import Node

DEFAULT_TIMEOUT_S = 5.0
FIRST_RETRY_S = 0.2
LONGEST_RETRY_S = 5.0

_log = get_logger(__name__)


class GrpcNodeHealth:
    """Implements ``NodeHealth`` over a channel, which the caller opens and closes.

    Open it with ``kvtide.runtime.open_channel``. While the service cannot be
    reached the last view of the fleet stands: engines do not die because
    somebody stopped watching them.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        first_retry_s: float = FIRST_RETRY_S,
    ) -> None:
        """``timeout_s`` limits one ``list_nodes``; ``first_retry_s`` starts the back-off."""
        self._stub = pb_grpc.NodeHealthServiceStub(channel)
        self._timeout_s = timeout_s
        self._first_retry_s = first_retry_s
        self._last_view: list[Node] | None = None

    async def list_nodes(self) -> list[Node]:
        """See ``NodeHealth``."""
        try:
            response = await self._stub.ListNodes(pb.ListNodesRequest(), timeout=self._timeout_s)
        except grpc.aio.AioRpcError as rpc_error:
            error = error_from_rpc(rpc_error)
            if isinstance(error, Unavailable) and self._last_view is not None:
                return self._last_view.copy()
            raise error from rpc_error
        self._last_view = wire.nodes_from_proto(response.nodes)
        return self._last_view.copy()

    async def watch(self) -> AsyncGenerator[list[Node], None]:
        """See ``NodeHealth``. Each watch is a stream of its own and reconnects by itself."""
        retry_s = self._first_retry_s
        while True:
            call = self._stub.WatchNodes(pb.WatchNodesRequest())
            reason = "the service ended the stream"
            try:
                async for response in call:
                    retry_s = self._first_retry_s
                    self._last_view = wire.nodes_from_proto(response.nodes)
                    yield self._last_view.copy()
            except grpc.aio.AioRpcError as error:
                reason = error_from_rpc(error).message
            finally:
                call.cancel()  # Of use only when the caller left; else it is over already.
            _log.warning("health.watch_broken", reason=reason, retry_s=round(retry_s, 2))
            # Jittered, so that routers do not come back all at once.
            await asyncio.sleep(retry_s * random.uniform(0.5, 1.0))  # noqa: S311
            retry_s = min(LONGEST_RETRY_S, retry_s * 2)
