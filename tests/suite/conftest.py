"""What every test of the suite gets: conversations of its own, and a look at unsafe reads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import pytest_asyncio

from tests.suite.conversation import Conversation, Endpoint
from tests.suite.fleets import nothing_is_kept

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from tests.suite.fleets import Fleet

_HERE = Path(__file__).parent
#: The fleet lives in the session's event loop, so its tests do, too.
_SESSION_LOOP = pytest.mark.asyncio(loop_scope="session")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the suite's tests in the loop that the fleet lives in."""
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(_SESSION_LOOP, append=False)


@pytest_asyncio.fixture(loop_scope="session")
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    """A client session for the test."""
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        yield session


@pytest_asyncio.fixture(autouse=True, loop_scope="session")
async def _clean(fleet: Fleet) -> AsyncIterator[None]:
    """Whatever a test does: no block was read after it was let go, and none stays behind."""
    yield
    assert await fleet.unsafe_reads() == 0
    await nothing_is_kept(fleet)


@pytest_asyncio.fixture(loop_scope="session")
async def converse(
    fleet: Fleet, http: aiohttp.ClientSession, request: pytest.FixtureRequest, _clean: None
) -> AsyncIterator[Callable[..., Conversation]]:
    """Starts conversations named after the test, and closes them after it."""
    started: list[Conversation] = []

    def start(endpoint: Endpoint = "completions", *, name: str = "", **fields: Any) -> Conversation:
        session_id = fields.pop("session_id", f"{request.node.name}-{name or len(started)}")
        over = fields.pop("fleet", fleet)
        conversation = Conversation(http, over, session_id, endpoint, **fields)
        started.append(conversation)
        return conversation

    yield start
    for conversation in started:
        if conversation.session_id and conversation.fleet is fleet:
            await conversation.close()


@pytest.fixture
def salt(request: pytest.FixtureRequest) -> str:
    """Makes a test's texts its own, so that no cache knows them."""
    return str(request.node.nodeid)
