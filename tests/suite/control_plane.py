"""kvtide's services in the test's own process, on loopback, with the registry's clock by hand."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from kvtide.health import LocalNodeHealth, health_service
from kvtide.local.ports import pick_free
from kvtide.registry import (
    ConversationKey,
    GrpcLeaseRegistry,
    LeaseRegistry,
    LocalLeaseRegistry,
    registry_service,
)
from kvtide.router import SERVICE_NAME, Router, add_router_service, start_http
from kvtide.runtime import (
    Clock,
    GrpcService,
    HealthSettings,
    NotFound,
    RegistrySettings,
    RouterSettings,
    Settings,
    open_channel,
    start_grpc_server,
)

if TYPE_CHECKING:
    from kvtide.runtime import GrpcServer

HOST = "127.0.0.1"

#: Short, since a restarted registry waits for it before it offers what it finds.
CLAIM_LIMIT_S = 15.0

#: Fast heartbeats, so that tests do not wait for them. Where the shipped values give up on
#: something that is late, these wait: a loaded test machine is late without being at fault.
SETTINGS = Settings(
    health=HealthSettings(report_interval_s=0.05, suspect_after_missed=400, down_after_s=60.0),
    registry=RegistrySettings(
        sweep_interval_s=0.05,
        grant_wait_s=3.0,
        grant_wait_limit_s=20.0,
        inventory_interval_s=1.0,
        claim_limit_s=CLAIM_LIMIT_S,
    ),
    router=RouterSettings(claim_timeout_s=20.0),
)


class Registry:
    """The block-lease registry behind its own gRPC server, which can go away and come back."""

    def __init__(self, clock: Clock, settings: Settings = SETTINGS) -> None:
        self._clock = clock
        self._settings = settings
        (self._port,) = pick_free(1)
        self._server: GrpcServer | None = None
        self.registry: LocalLeaseRegistry | None = None

    @property
    def address(self) -> str:
        """host:port."""
        return f"{HOST}:{self._port}"

    def knows(self, conversation_id: str) -> bool:
        """Whether a lease of that conversation is on record."""
        assert self.registry is not None
        key = ConversationKey("default", conversation_id)
        try:
            self.registry._table.get(key, self._clock.monotonic_s())
        except NotFound:
            return False
        return True

    async def start(self) -> None:
        """Start with nothing on record."""
        self.registry = LocalLeaseRegistry(self._settings.registry, clock=self._clock)
        await self.registry.start()
        services = [registry_service(self.registry)]
        self._server = await start_grpc_server(self.address, services)

    async def stop(self) -> None:
        """Go away. Does nothing when it is away."""
        if self._server is not None and self.registry is not None:
            await self.registry.stop()
            await self._server.stop(grace_s=0.1)
            self._server = self.registry = None


class ControlPlane:
    """Router, registry and node health: in one, as ``kvtide up``, or with a registry elsewhere."""

    def __init__(
        self, clock: Clock, *, registry_address: str = "", settings: Settings = SETTINGS
    ) -> None:
        self._clock = clock
        self._settings = settings
        self._remote_registry = registry_address
        self._http_port, self._grpc_port = pick_free(2)
        self._stack: AsyncExitStack | None = None
        self.router: Router | None = None
        self.registry: LocalLeaseRegistry | None = None

    @property
    def base_url(self) -> str:
        """The router's OpenAI endpoint."""
        return f"http://{HOST}:{self._http_port}"

    @property
    def grpc_address(self) -> str:
        """host:port of the gRPC server."""
        return f"{HOST}:{self._grpc_port}"

    @property
    def registry_address(self) -> str:
        """host:port where engines find the registry."""
        return self._remote_registry or self.grpc_address

    async def start(self) -> None:
        """Start everything."""
        async with AsyncExitStack() as stack:
            health = LocalNodeHealth(self._settings.health)
            registry: LeaseRegistry
            services = [health_service(health)]
            if self._remote_registry:
                channel = await stack.enter_async_context(open_channel(self._remote_registry))
                registry = GrpcLeaseRegistry(channel)
            else:
                registry = self.registry = LocalLeaseRegistry(
                    self._settings.registry, clock=self._clock
                )
                services.append(registry_service(self.registry))
            self.router = router = Router(self._settings, registry, health)
            services.append(
                GrpcService(SERVICE_NAME, lambda server: add_router_service(server, router))
            )
            server = await start_grpc_server(f"{HOST}:{self._grpc_port}", services)
            stack.push_async_callback(server.stop, grace_s=0.1)
            if self.registry is not None:
                stack.push_async_callback(self.registry.stop)
                await self.registry.start()
            stack.push_async_callback(health.stop)
            await health.start()
            stack.push_async_callback(router.stop, 1.0)
            await router.start()
            http = await start_http(router, HOST, self._http_port)
            stack.push_async_callback(http.stop)
            self._stack = stack.pop_all()

    async def stop(self) -> None:
        """Stop gracefully. Does nothing when stopped."""
        if self._stack is not None:
            stack, self._stack = self._stack, None
            await stack.aclose()
            self.registry = self.router = None
