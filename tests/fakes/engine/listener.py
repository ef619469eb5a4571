"""An HTTP server that can be stopped, killed or hung, and comes back on its port."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable

from aiohttp import web

from kvtide.local.ports import pick_free

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
_SHUTDOWN_TIMEOUT_S = 1.0


class Listener:
    """One application on one loopback port.

    ``kill`` resets every connection, as the kernel does for a killed process;
    ``hang`` accepts connections and answers nothing, as a stopped process does.
    """

    def __init__(self, app: web.Application, host: str) -> None:
        self._host = host
        self._awake = asyncio.Event()
        self._awake.set()
        app.middlewares.append(self._while_awake)
        # vLLM aborts a request when its client disconnects.
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=_SHUTDOWN_TIMEOUT_S
        )
        self.port = 0
        self._busy = 0

    async def start(self, port: int = 0) -> None:
        """Listen; port 0 takes any free one that outgoing connections leave alone."""
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, port or pick_free(1)[0])
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Stop listening, and close what is open."""
        self._awake.set()
        await self._runner.cleanup()

    async def kill(self) -> None:
        """Reset every connection and stop listening, at once."""
        for site in list(self._runner.sites):
            await site.stop()
        server = self._runner.server
        for connection in list(server.connections) if server is not None else []:
            transport = connection.transport
            if transport is not None:
                raw = transport.get_extra_info("socket")
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
                transport.abort()
        self._awake.set()
        await self._runner.cleanup()

    async def awake(self) -> None:
        """Return at once, or when the hanging ends."""
        await self._awake.wait()

    @property
    def busy(self) -> int:
        """Requests that have arrived and are not answered, those of a hanging listener included."""
        return self._busy

    def hang(self) -> None:
        """Accept connections and never answer, until ``resume``."""
        self._awake.clear()

    def resume(self) -> None:
        """Answer again."""
        self._awake.set()

    @web.middleware
    async def _while_awake(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self._busy += 1
        try:
            await self._awake.wait()
            response = await handler(request)
            await self._awake.wait()
        finally:
            self._busy -= 1
        return response
