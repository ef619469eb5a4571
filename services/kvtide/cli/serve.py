"""`kvtide up`, `router`, `registry`, `health`: the services, together or one by one."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvtide.cli.parsing import add_command
from kvtide.runtime import (
    GrpcServer,
    GrpcService,
    Settings,
    SettingsError,
    configure_logging,
    get_logger,
    load_settings,
    open_channel,
)
from kvtide.runtime.address import split_address
from kvtide.runtime.load import add_settings_flags

if TYPE_CHECKING:
    import argparse

    from kvtide.cli.parsing import CommandParser
    from kvtide.health import LocalNodeHealth, NodeHealth
    from kvtide.registry import LeaseRegistry, LocalLeaseRegistry
    from kvtide.router import Router

__all__ = ["Parts", "add_commands", "serve"]

_log = get_logger(__name__)

_SETTINGS_HELP = """
Every setting is a flag, an environment variable KVTIDE_<SECTION>__<FIELD> and a key in a TOML
file, in this order of precedence: --registry.claim_limit_s 30 is the same as
KVTIDE_REGISTRY__CLAIM_LIMIT_S=30 or [registry] claim_limit_s = 30."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Which services one process runs."""

    name: str
    router: bool = False
    registry: bool = False
    health: bool = False


_UP = Parts("up", router=True, registry=True, health=True)
_ROUTER = Parts("router", router=True)
_REGISTRY = Parts("registry", registry=True)
_HEALTH = Parts("health", health=True)

_COMMANDS = (
    (_UP, "run router, registry and node health in one process"),
    (_ROUTER, "run the router, with registry and node health elsewhere"),
    (_REGISTRY, "run the block-lease registry"),
    (_HEALTH, "run node health"),
)
_EXAMPLES = {
    _UP: """\
  kvtide up
  kvtide up --http.listen 0.0.0.0:8000 --grpc.listen 0.0.0.0:7400
  kvtide up --config deploy/kvtide.toml""",
    _ROUTER: """\
  kvtide router --registry.address registry:7401 --health.address health:7402
  kvtide router --config deploy/router.toml""",
    _REGISTRY: """\
  kvtide registry --grpc.listen 0.0.0.0:7401
  kvtide registry --config deploy/registry.toml""",
    _HEALTH: """\
  kvtide health --grpc.listen 0.0.0.0:7402
  kvtide health --config deploy/health.toml""",
}


def add_commands(commands: argparse._SubParsersAction[CommandParser]) -> None:
    """Add the four serving commands."""
    for parts, summary in _COMMANDS:
        parser = add_command(commands, parts.name, _run, summary=summary, examples=_EXAMPLES[parts])
        parser.description = f"{parser.description}\n{_SETTINGS_HELP}"
        parser.add_argument(
            "--config", type=Path, metavar="FILE", help="TOML file (default: KVTIDE_CONFIG's)"
        )
        parser.set_defaults(parts=parts, flags=add_settings_flags(parser))


def _run(parsed: argparse.Namespace) -> int:
    import uvloop

    settings = load_settings(config_path=parsed.config, flags=parsed.flags, parsed=parsed)
    _check_addresses(parsed.parts, settings)
    configure_logging(settings.log, service=parsed.parts.name)
    uvloop.run(_serve_until_signal(settings, parsed.parts))
    return 0


def _check_addresses(parts: Parts, settings: Settings) -> None:
    """A router alone needs to know where the others are; `up` has them itself."""
    problems = []
    for name, address, runs_here in (
        ("registry.address", settings.registry.address, parts.registry),
        ("health.address", settings.health.address, parts.health),
    ):
        if parts.router and not address and not runs_here:
            problems.append(
                f"{name} is not set: `kvtide router` needs it as --{name} HOST:PORT "
                "(`kvtide up` runs everything in one process)"
            )
        elif parts.router and address and runs_here:
            problems.append(
                f"{name} = {address!r}: `kvtide up` runs its own; take the address away, or "
                "use `kvtide router`"
            )
    if problems:
        raise SettingsError(problems)


async def _serve_until_signal(settings: Settings, parts: Parts) -> None:
    stop = asyncio.Event()

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set():
            # Whoever asks twice does not want to wait for running turns. What they held is freed
            # by the engines' own deadlines.
            _log.warning("stopping_now", signal=number.name)
            os._exit(128 + number)
        _log.info("stopping", signal=number.name)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    await serve(settings, parts, stop)


async def serve(settings: Settings, parts: Parts, stop: asyncio.Event) -> None:
    """Run `parts` until `stop` is set, then end gracefully.

    Raises FailedPrecondition when an address can't be listened on.
    """
    async with AsyncExitStack() as stack:
        registry, local_registry = await _registry(settings, parts, stack)
        health, local_health = await _health(settings, parts, stack)
        router = _router(settings, registry, health) if parts.router else None
        grpc_server = GrpcServer(
            settings.grpc.listen, _grpc_services(local_registry, local_health, router)
        )
        # The callbacks below run from the last to the first. That is the order of a graceful
        # stop: say so; finish the turns; end the engines' streams; close the gRPC server, which
        # would wait for those streams.
        stack.push_async_callback(grpc_server.stop)
        if local_registry is not None:
            stack.push_async_callback(local_registry.stop)
            await local_registry.start()
        if local_health is not None:
            stack.push_async_callback(local_health.stop)
            await local_health.start()
        if router is not None:
            stack.push_async_callback(router.stop)
            await router.start()
        await grpc_server.start()
        addresses = {"grpc": grpc_server.address}
        if router is not None:
            from kvtide.router import start_http

            http = await start_http(router, *split_address(settings.http.listen))
            stack.push_async_callback(http.stop)
            addresses["http"] = http.address
        stack.push_async_callback(grpc_server.announce_stop)
        _log.info("serving", **addresses)
        await stop.wait()
    _log.info("stopped")


async def _registry(
    settings: Settings, parts: Parts, stack: AsyncExitStack
) -> tuple[LeaseRegistry | None, LocalLeaseRegistry | None]:
    """The registry that a router uses, and the one that this process runs."""
    from kvtide.registry import GrpcLeaseRegistry, LocalLeaseRegistry

    if parts.registry:
        local = LocalLeaseRegistry(settings.registry)
        return local, local
    if not parts.router:
        return None, None
    channel = await stack.enter_async_context(open_channel(settings.registry.address))
    return GrpcLeaseRegistry(channel), None


async def _health(
    settings: Settings, parts: Parts, stack: AsyncExitStack
) -> tuple[NodeHealth | None, LocalNodeHealth | None]:
    """The node health that a router uses, and the one that this process runs."""
    from kvtide.health import GrpcNodeHealth, LocalNodeHealth

    if parts.health:
        local = LocalNodeHealth(settings.health)
        return local, local
    if not parts.router:
        return None, None
    channel = await stack.enter_async_context(open_channel(settings.health.address))
    return GrpcNodeHealth(channel), None


def _router(
    settings: Settings, registry: LeaseRegistry | None, health: NodeHealth | None
) -> Router:
    from kvtide.router import Router

    if registry is None or health is None:
        message = "a router needs a registry and node health"
        raise RuntimeError(message)
    return Router(settings, registry, health)


def _grpc_services(
    registry: LocalLeaseRegistry | None, health: LocalNodeHealth | None, router: Router | None
) -> list[GrpcService]:
    services = []
    if registry is not None:
        from kvtide.registry import registry_service

        services.append(registry_service(registry))
    if health is not None:
        from kvtide.health import health_service

        services.append(health_service(health))
    if router is not None:
        from kvtide.router import SERVICE_NAME, add_router_service

        services.append(
            GrpcService(SERVICE_NAME, lambda server: add_router_service(server, router))
        )
    return services
