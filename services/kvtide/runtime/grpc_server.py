"""A gRPC server as every kvtide service runs it: health, reflection, graceful stop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvtide.runtime.address import join_address, split_address
from kvtide.runtime.errors import FailedPrecondition
from kvtide.runtime.grpc_options import SERVER_OPTIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["GrpcServer", "GrpcService", "start_grpc_server"]


@dataclass(frozen=True, slots=True)
class GrpcService:
    """One service to be served."""

    name: str
    """Full name, such as "kvtide.v1.RouterService": what health and reflection call it."""
    add_to: Callable[[grpc.aio.Server], None]
    """Adds the servicer to a server."""


class GrpcServer:
    """A server that is bound to its address. `start` it, and `stop` it once."""

    def __init__(self, listen: str, services: Sequence[GrpcService]) -> None:
        """Bind to `listen` ("host:port", port 0 for any free one); inside an event loop.

        Standard health v1 (for the whole server and each service) and reflection are added.
        Raises FailedPrecondition when the address can't be bound.
        """
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        self._names = [service.name for service in services]
        for service in services:
            service.add_to(self._server)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            [*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server
        )
        try:
            self.port = self._server.add_insecure_port(listen)
        except RuntimeError as error:
            message = (
                f"can't listen on {listen}: is another server there, or is the host not this "
                "machine's? Choose another address with --grpc.listen"
            )
            raise FailedPrecondition("listen_failed", message) from error
        self.address = join_address(split_address(listen)[0], self.port)
        """"host:port" with the port that was really bound."""

    async def start(self) -> None:
        """Serve, and tell health checks so."""
        await self._server.start()
        for name in [health.OVERALL_HEALTH, *self._names]:
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def announce_stop(self) -> None:
        """Tell health checks NOT_SERVING, for good; calls are still served."""
        await self._health.enter_graceful_shutdown()

    async def stop(self, *, grace_s: float = 2.0) -> None:
        """Refuse new calls, let running ones finish for `grace_s` seconds, then cancel them.

        Services with endless streams end those first: a server waits for a stream as for any
        other call.
        """
        await self.announce_stop()
        await self._server.stop(grace_s)


async def start_grpc_server(listen: str, services: Sequence[GrpcService]) -> GrpcServer:
    """Bind to `listen` and serve. Raises FailedPrecondition as `GrpcServer` does."""
    server = GrpcServer(listen, services)
    await server.start()
    return server
