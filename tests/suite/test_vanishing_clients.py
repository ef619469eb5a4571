"""Clients that leave: nothing stays pinned beyond what the engines' own leases say."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.waiting import eventually
from tests.suite.conversation import PATHS, salted_text
from tests.suite.fleets import nothing_is_kept

if TYPE_CHECKING:
    from collections.abc import Callable

    import aiohttp

    from tests.suite.conversation import Conversation
    from tests.suite.fake_fleet import FakeFleet
    from tests.suite.fleets import Fleet

    Converse = Callable[..., Conversation]


async def _leave(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _leave_after_chunks(
    http: aiohttp.ClientSession, conversation: Conversation, chunks: int
) -> None:
    """Start a long streamed answer and hang up after some of it."""
    body = conversation.body(2_000, stream=True)
    headers = {"X-Session-ID": conversation.session_id}
    url = conversation.fleet.base_url + PATHS[conversation.endpoint]
    async with http.post(url, json=body, headers=headers) as response:
        assert response.status == 200
        for _ in range(chunks):
            await response.content.readuntil(b"\n\n")


async def test_a_client_that_leaves_mid_stream_leaves_nothing(
    converse: Converse, http: aiohttp.ClientSession, fleet: Fleet, salt: str
) -> None:
    """Decode stops and frees; the conversation goes on with the right answer."""
    conversation = converse()
    conversation.say(salted_text(300, salt))
    await _leave_after_chunks(http, conversation, 3)
    await nothing_is_kept(fleet)
    # Nothing was granted for the answer that was broken off.
    assert (await conversation.turn()).report["reuse"] == "no_lease"
    assert (await conversation.turn("go on")).report["reuse"] == "pulled"


async def test_a_client_that_leaves_before_the_first_chunk_leaves_nothing(
    converse: Converse, fleet: Fleet, salt: str
) -> None:
    """A long prompt whose client is gone at once: prefill's blocks go too, by abort or lease."""
    conversation = converse(stream=True)
    conversation.say(salted_text(6_000, salt))
    leaving = asyncio.create_task(conversation.send(max_tokens=500))
    await asyncio.sleep(0.05)
    await _leave(leaving)
    await nothing_is_kept(fleet)
    conversation.history = [{"role": "user", "content": salted_text(300, salt)}]
    await conversation.turn()


@pytest.mark.fake_only
async def test_a_client_that_leaves_during_prefill_keeps_its_lease(
    converse: Converse, fleet: FakeFleet, salt: str
) -> None:
    """The prefill leg is aborted, its blocks are free at once, and the turn can be sent again."""
    conversation = converse()
    first = await conversation.turn(salted_text(300, salt))
    conversation.say(salted_text(300, salt + "2"))
    fleet.prefill.faults.prefill_gate.clear()
    leaving = asyncio.create_task(conversation.send())
    await eventually(lambda: bool(fleet.prefill.core.running))
    await _leave(leaving)
    await eventually(lambda: not fleet.prefill.core.running)
    fleet.clear_faults()
    await nothing_is_kept(fleet, "prefill")
    # It was read when the client left, so it is not offered again.
    again = await conversation.turn()
    assert again.report["pulled_tokens"] in (0, first.kv_tokens)


@pytest.mark.fake_only
async def test_a_client_that_leaves_between_the_legs_costs_prefills_own_lease(
    converse: Converse, fleet: FakeFleet, salt: str
) -> None:
    """Decode never read: prefill keeps its blocks for 30 s, as its own lease says."""
    conversation = converse(stream=True)
    conversation.say(salted_text(300, salt))
    fleet.decode.server.listener.hang()
    leaving = asyncio.create_task(conversation.send())
    await eventually(lambda: bool(fleet.decode.server.listener.busy))
    await _leave(leaving)
    await eventually(lambda: not fleet.decode.server.listener.busy)
    fleet.decode.resume()
    assert (await fleet.pool("prefill")).free_blocks < await fleet.usable_blocks("prefill")
    await fleet.outlast_prefill()
    await nothing_is_kept(fleet, "prefill")


@pytest.mark.fake_only
async def test_a_client_that_leaves_during_the_transfer_leaves_nothing(
    converse: Converse, fleet: FakeFleet, salt: str
) -> None:
    """Decode is reading from prefill when the client goes: both free once the read is over."""
    conversation = converse(stream=True)
    conversation.say(salted_text(300, salt))
    fleet.prefill.faults.read_gate.clear()
    leaving = asyncio.create_task(conversation.send())
    await eventually(lambda: bool(fleet.decode.core.waiting))
    await _leave(leaving)
    await eventually(lambda: not fleet.decode.core.waiting)
    fleet.clear_faults()
    await nothing_is_kept(fleet)


@pytest.mark.fake_only
async def test_a_client_that_leaves_during_the_readback_does_not_free_it_twice(
    converse: Converse, fleet: FakeFleet, salt: str
) -> None:
    """Prefill is reading from decode when the client goes: the lease ends once, and safely."""
    conversation = converse()
    await conversation.turn(salted_text(300, salt))
    conversation.say(salted_text(40, salt + "2"))
    fleet.decode.faults.read_gate.clear()
    leaving = asyncio.create_task(conversation.send())
    await eventually(lambda: bool(fleet.prefill.core.waiting))
    await _leave(leaving)
    await eventually(lambda: not fleet.prefill.core.waiting)
    fleet.clear_faults()
    await nothing_is_kept(fleet, "prefill")
    await conversation.turn()
    assert fleet.decode.running


async def test_a_client_that_hangs_up_on_the_last_chunk_keeps_its_turn(
    converse: Converse, http: aiohttp.ClientSession, fleet: Fleet, salt: str
) -> None:
    """An answer that was finished is worth a lease, even if nobody stayed for [DONE]."""
    conversation = converse()
    conversation.say(salted_text(300, salt))
    body = conversation.body(8, stream=True)
    headers = {"X-Session-ID": conversation.session_id}
    url = fleet.base_url + PATHS["completions"]
    async with http.post(url, json=body, headers=headers) as response:
        while b'"finish_reason":"length"' not in await response.content.readuntil(b"\n\n"):
            pass
    expected = await conversation.expected(8)
    conversation.say(expected.text, "assistant")
    assert (await conversation.turn("go on")).report["reuse"] == "pulled"
