"""SIGTERM while a turn runs: `kvtide up` as a process, between fake engines."""

import asyncio
import signal
from contextlib import asynccontextmanager

import aiohttp
import grpc
import pytest

from kvtide.runtime import open_channel
from kvtide.v1 import router_pb2 as pb
from kvtide.v1 import router_pb2_grpc as pb_grpc
from tests.cli.processes import Service, serving
from tests.fakes.engine import EngineConfig, FakeEngine
from tests.fakes.waiting import eventually

ANY_PORTS = ("--grpc.listen", "127.0.0.1:0", "--http.listen", "127.0.0.1:0")
MESSAGES = [{"role": "user", "content": "hello"}]


@asynccontextmanager
async def _fleet():
    """A `kvtide up` process with a ready prefill and decode engine, and the decode engine."""
    async with serving("up", *ANY_PORTS) as up:
        engines = [
            FakeEngine(
                EngineConfig(
                    node_id=role, role=role, registry_address=up.grpc, health_address=up.grpc
                )
            )
            for role in ("prefill", "decode")
        ]
        for engine in engines:
            await engine.start()
        try:
            await eventually(lambda: _is_ready(up))
            yield up, engines[1]
        finally:
            for engine in engines:
                engine.faults.clear()
                await engine.stop()


async def _is_ready(up: Service) -> bool:
    async with aiohttp.ClientSession() as session, session.get(f"http://{up.http}/ready") as found:
        return found.status == 200


@asynccontextmanager
async def _running_chat(up: Service, decode: FakeEngine):
    """A streamed chat that has its first bytes, and gets no more until the gate opens."""
    decode.faults.token_delay_s = 0.05
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 20, "stream": True}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"http://{up.http}/v1/chat/completions", json=body) as response,
    ):
        assert response.status == 200
        assert await response.content.readany()
        decode.faults.step_gate.clear()
        yield response


async def test_running_http_turn_finishes():
    """After SIGTERM a streamed answer goes on to its end, while new clients are refused."""
    async with _fleet() as (up, decode), _running_chat(up, decode) as response:
        up.process.send_signal(signal.SIGTERM)
        await up.next_event("stopping")
        await eventually(lambda: _is_refused(up))
        decode.faults.step_gate.set()
        assert (await response.content.read()).rstrip().endswith(b"data: [DONE]")
        await up.next_event("stopped")
        assert await up.wait() == 0


async def _is_refused(up: Service) -> bool:
    try:
        return not await _is_ready(up)
    except aiohttp.ClientConnectionError:
        return True


async def test_running_grpc_turn_finishes():
    """The same over gRPC: the stream ends with its finish, and new turns are refused."""
    async with _fleet() as (up, decode), open_channel(up.grpc) as channel:
        stub = pb_grpc.RouterServiceStub(channel)
        decode.faults.token_delay_s = 0.05
        request = pb.ChatRequest(
            model="tiny", messages=[pb.ChatMessage(role="user", content="hello")], max_tokens=20
        )
        events = aiter(stub.Chat(request))
        assert (await anext(events)).WhichOneof("event") == "report"
        decode.faults.step_gate.clear()
        up.process.send_signal(signal.SIGTERM)
        await up.next_event("stopping")
        await eventually(lambda: _is_refused(up))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Chat(request).read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        decode.faults.step_gate.set()
        kinds = [event.WhichOneof("event") async for event in events]
        assert kinds[-1] == "finish"
        await up.next_event("stopped")
        assert await up.wait() == 0


async def test_second_signal_does_not_wait():
    """Who asks twice gets an end at once, with the status of the signal."""
    async with _fleet() as (up, decode), _running_chat(up, decode):
        up.process.send_signal(signal.SIGTERM)
        await up.next_event("stopping")
        up.process.send_signal(signal.SIGTERM)
        await up.next_event("stopping_now")
        status = await asyncio.wait_for(up.process.wait(), timeout=60)
        assert status == 128 + signal.SIGTERM
