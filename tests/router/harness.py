"""A router over loopback, between scripted engines and the real registry and node health."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp

from kvtide.connector.fingerprint import fingerprint_of
from kvtide.connector.handle import KvHandle
from kvtide.health import LocalNodeHealth, NodeInfo, NodeLink, NodeLoad, NodeRole
from kvtide.registry import (
    ClaimResult,
    ConversationKey,
    EngineLink,
    EngineReport,
    Grant,
    LeasePage,
    LeaseQuery,
    LeaseView,
    LocalLeaseRegistry,
    Settlement,
)
from kvtide.router import Router, RouterHttp, start_http
from kvtide.runtime import ManualClock, RouterSettings, Settings
from tests.router.scripted import Recorded, ScriptedEngine, decodes, prefills

if TYPE_CHECKING:
    from collections.abc import Callable

MODEL = "m"
TTL_S = 480.0
THRESHOLD_TOKENS = 64
BLOCK_SIZE_TOKENS = 16
GRANTED_TOKENS = 900


async def until(condition: Callable[[], object], what: str = "the condition") -> None:
    """Wait for something that must happen; the limit is only there to end a broken test."""
    for _ in range(4000):
        if condition():
            return
        await asyncio.sleep(0.0025)
    raise AssertionError(f"{what} did not come true")


@dataclass
class WatchedRegistry:
    """The real registry, with everything that the router tells it on record, and faults."""

    inner: LocalLeaseRegistry
    claims: list[ClaimResult] = field(default_factory=list)
    claims_begun: int = 0
    settlements: list[Settlement] = field(default_factory=list)
    closed: list[ConversationKey] = field(default_factory=list)
    fail: Exception | None = None
    claim_gate: asyncio.Event | None = None
    """While set to an event, claims wait for it before they happen."""
    settle_gate: asyncio.Event | None = None

    async def claim(
        self, key: ConversationKey, *, grant_wait_s: float | None = None
    ) -> ClaimResult:
        self.claims_begun += 1
        if self.claim_gate is not None:
            await self.claim_gate.wait()
        if self.fail is not None:
            raise self.fail
        result = await self.inner.claim(key, grant_wait_s=grant_wait_s)
        self.claims.append(result)
        return result

    async def settle(self, settlement: Settlement) -> None:
        self.settlements.append(settlement)
        if self.settle_gate is not None:
            await self.settle_gate.wait()
        if self.fail is not None:
            raise self.fail
        await self.inner.settle(settlement)

    async def close_conversation(self, key: ConversationKey) -> None:
        if self.fail is not None:
            raise self.fail
        self.closed.append(key)
        await self.inner.close_conversation(key)

    async def get_lease(self, key: ConversationKey) -> LeaseView:
        return await self.inner.get_lease(key)

    async def list_leases(self, query: LeaseQuery) -> LeasePage:
        return await self.inner.list_leases(query)


@dataclass
class Answered:
    """An HTTP answer, read to its end."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def report(self) -> dict[str, Any]:
        parsed = json.loads(self.headers["X-Kvtide-Turn"])
        assert isinstance(parsed, dict)
        return parsed

    @property
    def error(self) -> dict[str, Any]:
        parsed = self.json["error"]
        assert isinstance(parsed, dict)
        return parsed


class Harness:
    """One prefill engine `p1` and one decode engine `d1` to begin with; more by `add`."""

    def __init__(self, **router_settings: Any) -> None:
        self.clock = ManualClock()
        self.registry = WatchedRegistry(LocalLeaseRegistry(clock=self.clock, generation_floor=1))
        self.health = LocalNodeHealth(clock=self.clock)
        self.settings = Settings(router=RouterSettings(**router_settings))
        self.router = Router(self.settings, self.registry, self.health)
        self.engines: dict[str, ScriptedEngine] = {}
        self.links: dict[str, NodeLink] = {}
        self.lease_links: dict[str, EngineLink] = {}
        self.granting = True
        """Whether decode engines grant a lease for each finished turn of a conversation."""
        self.granted: list[Grant] = []
        self._http: RouterHttp | None = None
        self._session: aiohttp.ClientSession | None = None

    @property
    def p1(self) -> ScriptedEngine:
        return self.engines["p1"]

    @property
    def d1(self) -> ScriptedEngine:
        return self.engines["d1"]

    @property
    def http(self) -> RouterHttp:
        assert self._http is not None
        return self._http

    @property
    def session(self) -> aiohttp.ClientSession:
        assert self._session is not None
        return self._session

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http.port}"

    async def start(self) -> None:
        await self.router.start()
        self._http = await start_http(self.router, "127.0.0.1", 0)
        self._session = aiohttp.ClientSession()
        await self.add("p1", NodeRole.PREFILL)
        await self.add("d1", NodeRole.DECODE)
        await until(lambda: self.router.ready, "the router's readiness")

    async def stop(self) -> None:
        await self.session.close()
        await self.http.stop()
        await self.router.stop()
        for engine in self.engines.values():
            await engine.stop()
        await self.health.stop()
        await self.registry.inner.stop()

    async def add(self, node_id: str, role: NodeRole, models: tuple[str, ...] = (MODEL,)) -> None:
        """Start an engine and make it known."""
        script = prefills()
        if role is NodeRole.DECODE:
            script = decodes(on_finish=lambda recorded: self.grant(node_id, recorded))
        engine = ScriptedEngine(script)
        await engine.start()
        self.engines[node_id] = engine
        info = NodeInfo(
            node_id=node_id,
            epoch=f"{node_id}-epoch",
            role=role,
            engine_url=engine.url,
            models=models,
            kv_recompute_threshold_tokens=THRESHOLD_TOKENS,
            decoder_kv_blocks_ttl_s=TTL_S,
        )
        self.links[node_id] = self.health.connect_node(info, NodeLoad(), http_serving=True)
        if role is NodeRole.DECODE:
            self.lease_links[node_id] = self.registry.inner.attach_engine(
                node_id, info.epoch, EngineReport(inventory=())
            )
        await until(lambda: any(n.info.node_id == node_id for n in self.router.nodes), node_id)

    def grant(self, node_id: str, recorded: Recorded) -> None:
        """What decode's connector does when a turn of a conversation has finished."""
        if self.granting and "generation" in recorded.own:
            self.grant_now(node_id, recorded)

    def grant_now(self, node_id: str, recorded: Recorded) -> None:
        own = recorded.own
        handle = KvHandle(
            engine_id=f"{node_id}-epoch",
            request_id=f"r-{own['generation']}",
            side_channel_host="127.0.0.1",
            side_channel_port=5601,
            block_groups=(tuple(range(-(-GRANTED_TOKENS // BLOCK_SIZE_TOKENS))),),
            token_count=GRANTED_TOKENS,
            block_size_tokens=BLOCK_SIZE_TOKENS,
            engine_clock_expiry_s=5000.0,
        )
        grant = Grant(
            key=ConversationKey(own["tenant"], own["conversation_id"]),
            generation=own["generation"],
            handle=handle,
            fingerprint=fingerprint_of(range(GRANTED_TOKENS), BLOCK_SIZE_TOKENS),
            time_left_s=TTL_S,
            ttl_s=TTL_S,
        )
        self.granted.append(grant)
        self.lease_links[node_id].report(EngineReport(grants=(grant,)))

    async def chat(self, session: str | None = "s", **fields: Any) -> Answered:
        """One turn of a chat; `headers` are HTTP headers, other fields go into the body."""
        headers = dict(fields.pop("headers", {}))
        if session is not None:
            headers["X-Session-ID"] = session
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "Hi"}],
            "stream": True,
            **fields,
        }
        return await self.post("/v1/chat/completions", body, headers)

    async def complete(self, session: str | None = "s", **fields: Any) -> Answered:
        """One turn of plain completion."""
        headers = {} if session is None else {"X-Session-ID": session}
        body = {"model": MODEL, "prompt": "Once", "stream": True, **fields}
        return await self.post("/v1/completions", body, headers)

    async def post(
        self, path: str, body: object, headers: dict[str, str] | None = None
    ) -> Answered:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.request("POST", path, data=data, headers=headers or {})

    async def request(self, method: str, path: str, **kwargs: Any) -> Answered:
        async with self.session.request(method, self.url + path, **kwargs) as response:
            body = await response.read()
            return Answered(response.status, dict(response.headers), body)

    async def chat_until(self, mark: bytes, event: asyncio.Event, **fields: Any) -> Answered:
        """A streamed turn that sets `event` when the answer has come as far as `mark`."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "stream": True}
        async with self.session.post(
            self.url + "/v1/chat/completions",
            json={**body, **fields},
            headers={"X-Session-ID": "s"},
        ) as response:
            received = b""
            while data := await response.content.readany():
                received += data
                if mark in received:
                    event.set()
            return Answered(response.status, dict(response.headers), received)

    async def settled(self, count: int = 1) -> list[Settlement]:
        """All settlements, once there are `count` and nothing runs any more."""
        await until(lambda: len(self.registry.settlements) >= count, f"{count} settlements")
        await self.quiet()
        return self.registry.settlements

    async def quiet(self) -> None:
        """Wait until no turn runs and nothing is in flight."""
        await until(lambda: b"kvtide_router_turns_running 0.0" in self.metrics(), "quiet")
        assert not self.router._fleet.in_flight

    def metrics(self) -> bytes:
        return self.router.metrics.exposition()

    def last_record(self) -> dict[str, Any]:
        return self.router.history.records()[-1].as_json()

    async def open_raw(self, body: dict[str, Any], session: str = "s") -> RawClient:
        """A client that can leave whenever it likes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.http.port)
        raw = json.dumps(body).encode()
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-Session-ID: "
            + session.encode()
            + f"\r\nContent-Length: {len(raw)}\r\n\r\n".encode()
            + raw
        )
        await writer.drain()
        return RawClient(reader, writer)

    async def open_chat(self, session: str = "s", **fields: Any) -> RawClient:
        messages = [{"role": "user", "content": "Hi"}]
        body = {"model": MODEL, "messages": messages, "stream": True, **fields}
        return await self.open_raw(body, session)


@dataclass
class RawClient:
    """A connection on which one request was sent."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def read_until(self, mark: bytes) -> bytes:
        return await self.reader.readuntil(mark)

    async def leave(self) -> None:
        self.writer.transport.abort()
        await asyncio.sleep(0)
