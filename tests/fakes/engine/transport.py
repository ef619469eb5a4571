"""NIXL's stand-in: a side channel between engines, in one process or in several.

A READ is one-sided: it copies what the named blocks hold at that moment and
asks nobody whether they still belong to the request. Only the notification
after it names the request.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import aiohttp
from aiohttp import web

from tests.fakes.engine.listener import Listener

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tests.fakes.engine.blocks import BlockPool
    from tests.fakes.engine.config import EngineClock, EngineConfig
    from tests.fakes.engine.faults import Faults


class TransferError(Exception):
    """A handshake, READ or notification did not get through."""


@dataclass(frozen=True, slots=True)
class Peer:
    """What a handshake taught about another engine.

    ``clock_offset_s`` is its clock minus ours, the round trip halved.
    """

    engine_id: str
    host: str
    port: int
    clock_offset_s: float
    block_size_tokens: int


class SideChannel:
    """An engine's end that others read from. ``notified`` gets every message, in order."""

    def __init__(
        self,
        config: EngineConfig,
        engine_id: str,
        pool: BlockPool,
        clock: EngineClock,
        faults: Faults,
        notified: Callable[[str], None],
    ) -> None:
        self._config = config
        self._engine_id = engine_id
        self._pool = pool
        self._clock = clock
        self._faults = faults
        self._notified = notified
        app = web.Application()
        app.router.add_post("/handshake", self._handshake)
        app.router.add_post("/read", self._read)
        app.router.add_post("/notify", self._notify)
        self.listener = Listener(app, config.host)

    async def _handshake(self, _request: web.Request) -> web.Response:
        if self._faults.refuse_handshakes:
            return web.Response(status=503)
        return web.json_response(
            {
                "engine_id": self._engine_id,
                "compatibility_hash": self._config.compatibility_hash,
                "block_size_tokens": self._config.block_size_tokens,
                "perf_counter_s": self._clock.now_s(),
            }
        )

    async def _read(self, request: web.Request) -> web.Response:
        asked = await request.json()
        await self._faults.read_gate.wait()
        refused = (
            self._faults.refuse_reads
            or asked["reader"] in self._faults.refuse_reads_from
            or self._faults.take("fail_next_reads")
        )
        if refused:
            return web.Response(status=503)
        # The reader's descriptors belong to one start of this engine.
        if asked["engine_id"] != self._engine_id:
            return web.Response(status=410)
        try:
            data = self._pool.read_raw(asked["block_ids"])
        except IndexError:
            return web.Response(status=400)
        return web.Response(body=data, content_type="application/octet-stream")

    async def _notify(self, request: web.Request) -> web.Response:
        sent = await request.json()
        if sent["engine_id"] != self._engine_id:
            return web.Response(status=410)
        if not self._faults.drop_notifications:
            self._notified(sent["message"])
        return web.Response()


class SideChannelClient:
    """An engine's end that reads from others. Raises TransferError for whatever fails."""

    def __init__(self, config: EngineConfig, clock: EngineClock) -> None:
        self._config = config
        self._clock = clock
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Drop all connections."""
        if self._session is not None:
            await self._session.close()

    async def handshake(self, host: str, port: int, expected_engine_id: str) -> Peer:
        """Learn who listens there, and how its clock differs from ours."""
        sent_s = self._clock.now_s()
        raw = await self._post(
            host, port, "handshake", {}, timeout_s=self._config.handshake_timeout_s
        )
        received_s = self._clock.now_s()
        answer = json.loads(raw)
        if answer["compatibility_hash"] != self._config.compatibility_hash:
            msg = "NIXL compatibility hash mismatch"
            raise TransferError(msg)
        if answer["engine_id"] != expected_engine_id:
            msg = (
                f"Remote NIXL agent engine ID mismatch. Expected {expected_engine_id}, "
                f"received {answer['engine_id']}."
            )
            raise TransferError(msg)
        return Peer(
            engine_id=expected_engine_id,
            host=host,
            port=port,
            clock_offset_s=answer["perf_counter_s"] - (sent_s + received_s) / 2,
            block_size_tokens=answer["block_size_tokens"],
        )

    async def read(self, peer: Peer, block_ids: list[int]) -> bytes:
        """Copy whole blocks of a peer, as they are when it looks."""
        body = {
            "engine_id": peer.engine_id,
            "reader": self._config.node_id,
            "block_ids": block_ids,
        }
        return await self._post(peer.host, peer.port, "read", body)

    async def notify(self, peer: Peer, message: str) -> None:
        """Send a completion ("request_id:readers") or heartbeat ("HB:request_id,…")."""
        body = {"engine_id": peer.engine_id, "message": message}
        await self._post(peer.host, peer.port, "notify", body)

    async def _post(
        self,
        host: str,
        port: int,
        verb: str,
        body: Mapping[str, object],
        timeout_s: float | None = None,
    ) -> bytes:
        if self._session is None:
            self._session = aiohttp.ClientSession()
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        url = f"http://{host}:{port}/{verb}"
        try:
            async with self._session.post(url, json=body, timeout=timeout) as answer:
                if answer.status != 200:
                    msg = f"{verb} refused by {host}:{port} ({answer.status})"
                    raise TransferError(msg)
                return await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            msg = f"{verb} to {host}:{port} failed: {error!r}"
            raise TransferError(msg) from error
