"""A registry that is absent, or goes away: turns are served all the same, and reuse comes back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from kvtide.runtime import ManualClock, RouterSettings
from tests.fakes.waiting import eventually
from tests.suite.control_plane import CLAIM_LIMIT_S, SETTINGS, Registry
from tests.suite.conversation import salted_text
from tests.suite.fake_fleet import FakeFleet

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from tests.suite.conversation import Conversation

    Converse = Callable[..., Conversation]

pytestmark = pytest.mark.fake_only

_IMPATIENT = SETTINGS.model_copy(update={"router": RouterSettings(claim_timeout_s=3.5)})


@pytest.fixture
def clock() -> ManualClock:
    """One clock for the registry and the engines."""
    return ManualClock()


@pytest_asyncio.fixture(loop_scope="session")
async def registry(clock: ManualClock) -> AsyncIterator[Registry]:
    """A registry in a server of its own, not started yet, whose address is known."""
    registry = Registry(clock)
    yield registry
    await registry.stop()


@pytest_asyncio.fixture(loop_scope="session")
async def apart(clock: ManualClock, registry: Registry) -> AsyncIterator[FakeFleet]:
    """A fleet whose router and engines reach the registry over the network."""
    address = registry.address
    async with FakeFleet(clock, registry_address=address, settings=_IMPATIENT) as fleet:
        yield fleet


async def _pulled_again(conversation: Conversation) -> int:
    """Go on until a turn is pulled, and say how many tokens; each is right, pulled or not."""

    async def pulled() -> int:
        return int((await conversation.turn("go on")).report["pulled_tokens"])

    return int(await eventually(pulled, timeout_s=60.0))


async def test_a_registry_that_comes_late_is_found(
    converse: Converse, apart: FakeFleet, registry: Registry, salt: str
) -> None:
    """Without a registry at start, turns are plain; once it is there, they are pulled."""
    conversation = converse(fleet=apart, stream=True)
    for text in (salted_text(300, salt), "go on"):
        answer = await conversation.turn(text)
        assert answer.report["reuse"] == "registry_unavailable"
        assert answer.report["recomputed_tokens"] == answer.usage["prompt_tokens"]
    assert not apart.pins()
    await registry.start()
    await _pulled_again(conversation)


async def test_a_registry_that_goes_away_and_comes_back_empty_is_right_again(
    converse: Converse, apart: FakeFleet, registry: Registry, salt: str
) -> None:
    """Its absence costs reuse only; afterwards it knows what decode still holds."""
    await registry.start()
    conversation = converse(fleet=apart)
    await conversation.turn(salted_text(300, salt))
    await _pulled_again(conversation)
    held = apart.pins()
    await registry.stop()
    for _ in range(2):
        answer = await conversation.turn("still served")
        assert answer.report["reuse"] == "registry_unavailable"
    # Decode keeps what it promised, for as long as it promised.
    assert apart.pins() == held
    await registry.start()
    await eventually(lambda: registry.knows(conversation.session_id), timeout_s=60.0)
    apart.clock.advance(CLAIM_LIMIT_S + 1)
    # The router may take a moment to connect again, and serves on meanwhile.
    assert await _pulled_again(conversation) == held[0].handle.token_count


async def test_blocks_end_without_a_registry(
    converse: Converse, apart: FakeFleet, registry: Registry, salt: str
) -> None:
    """A dead control plane can pin nothing for longer than decode promised."""
    await registry.start()
    conversation = converse(fleet=apart)
    await conversation.turn(salted_text(300, salt))
    await eventually(apart.pins)
    await registry.stop()
    apart.clock.advance(480.0 + 5.0)
    await eventually(lambda: not apart.pins())
    assert apart.decode.pool_state().pinned_blocks == 0
    assert await apart.unsafe_reads() == 0
