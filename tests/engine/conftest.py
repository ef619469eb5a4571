"""Tests of the connector in real engines; they use the suite's fleet and talk to its engines."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import grpc
import pytest
import pytest_asyncio

from kvtide.connector.handle import KvHandle, params_from_handle
from kvtide.connector.readback import fingerprint_to_params
from kvtide.connector.wire import fingerprint_from_proto, handle_from_proto
from kvtide.v1 import lease_pb2, lease_pb2_grpc
from tests.fakes.by_hand import ByHand
from tests.fakes.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from tests.suite.cpu_fleet import CpuFleet

_HERE = Path(__file__).parent
_TENANT = "engine-tests"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Real engines only, and in the event loop that the fleet lives in."""
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(pytest.mark.engine)
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


@dataclass(frozen=True, slots=True)
class Claimed:
    """A lease that the test holds the claim of."""

    handle: KvHandle
    fingerprint: dict[str, Any]

    def params(self, **changes: Any) -> dict[str, Any]:
        """What the router would send to prefill; ``changes`` are fields of the handle."""
        return {
            **params_from_handle(replace(self.handle, **changes)),
            "kvtide": {"fingerprint": self.fingerprint},
        }


class Engines(ByHand):
    """The fleet's prefill and decode engine without the router, and the registry by gRPC."""

    def __init__(self, http: aiohttp.ClientSession, fleet: CpuFleet) -> None:
        local = fleet.local
        super().__init__(
            http, local.engine("prefill-0").url, local.engine("decode-0").url, local.model_name
        )
        self.fleet = fleet
        self._claims: dict[str, lease_pb2.ClaimResponse] = {}
        self._channel = grpc.insecure_channel(local.grpc_address)
        self._registry = lease_pb2_grpc.LeaseRegistryServiceStub(self._channel)

    async def claim(self, conversation_id: str) -> lease_pb2.ClaimResponse:
        """Open a turn of the conversation, and name it in decode legs from now on."""
        key = lease_pb2.ConversationKey(tenant=_TENANT, conversation_id=conversation_id)
        request = lease_pb2.ClaimRequest(conversation=key)
        answer = await asyncio.to_thread(self._registry.Claim, request)
        self.turn_ids = {
            "tenant": _TENANT,
            "conversation_id": conversation_id,
            "generation": answer.generation,
        }
        if answer.HasField("claimed"):
            self._claims[conversation_id] = answer
        return answer

    async def close_conversation(self, conversation_id: str) -> None:
        """Give back the claim, if there is one, and let the conversation's blocks go."""
        key = lease_pb2.ConversationKey(tenant=_TENANT, conversation_id=conversation_id)
        claim = self._claims.pop(conversation_id, None)
        if claim is not None:
            settlement = lease_pb2.SettleRequest(
                conversation=key,
                generation=claim.generation,
                claim_id=claim.claimed.claim_id,
                read_outcome=lease_pb2.READ_OUTCOME_NOT_READ,
            )
            await asyncio.to_thread(self._registry.Settle, settlement)
        request = lease_pb2.CloseConversationRequest(conversation=key)
        await asyncio.to_thread(self._registry.CloseConversation, request)

    async def claimed_turn(self, conversation_id: str, prompt: str) -> tuple[str, Claimed]:
        """Serve a first turn, then claim its lease: the history, and the claim."""
        await self.claim(conversation_id)
        turn = await self.turn(prompt)
        history = prompt + turn.decode.text

        async def claim() -> lease_pb2.ClaimedLease | None:
            answer = await self.claim(conversation_id)
            return answer.claimed if answer.HasField("claimed") else None

        lease = await eventually(claim)
        return history, Claimed(
            handle_from_proto(lease.handle),
            fingerprint_to_params(fingerprint_from_proto(lease.fingerprint)),
        )

    async def pinned_blocks(self) -> int:
        """Blocks that decode keeps for leases."""
        return (await self.fleet.pool("decode")).pinned_blocks

    async def counter(self, role: str, name: str) -> float:
        """One counter of an engine; 0 before its first event."""
        metrics = await asyncio.to_thread(self.fleet.local.metrics, f"{role}-0")
        return metrics.get(name, 0.0)

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()


@pytest_asyncio.fixture(loop_scope="session")
async def engines(fleet: CpuFleet) -> AsyncIterator[Engines]:
    """The fleet's engines, and afterwards nobody has read what was let go."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as http:
        made = Engines(http, fleet)
        yield made
        made.close()
    assert await fleet.unsafe_reads() == 0

    async def nothing_pinned() -> bool:
        return (await fleet.pool("decode")).pinned_blocks == 0

    await eventually(nothing_pinned)


@pytest.fixture
def reference(fleet: CpuFleet, engines: Engines) -> Callable[..., Any]:
    """Asks the monolith for the right answer."""

    async def ask(prompt: str, **body: Any) -> Any:
        answer = await engines.complete(fleet.reference_url, prompt, **body)
        assert answer.status == 200, answer.body
        return answer

    return ask
