from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvtide.client import AsyncKvtideClient
from kvtide.router import router_service
from kvtide.runtime import start_grpc_server
from tests.router.harness import Harness

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    """A started router between scripted engines."""
    harness = Harness(claim_timeout_s=0.5)
    await harness.start()
    yield harness
    await harness.stop()


@pytest.fixture
async def address(harness: Harness) -> AsyncIterator[str]:
    """Where that router serves gRPC."""
    server = await start_grpc_server("127.0.0.1:0", [router_service(harness.router)])
    yield server.address
    await server.stop(grace_s=0.1)


@pytest.fixture
async def client(address: str) -> AsyncIterator[AsyncKvtideClient]:
    """A client of that router."""
    async with AsyncKvtideClient(address) as client:
        yield client
