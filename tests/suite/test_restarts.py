"""Engines and services that die and come back on the same port: served again, never stale."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.fakes.waiting import eventually
from tests.suite.control_plane import CLAIM_LIMIT_S
from tests.suite.conversation import salted_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.suite.conversation import Conversation
    from tests.suite.fake_fleet import FakeFleet
    from tests.suite.fleets import Fleet, Role

    Converse = Callable[..., Conversation]


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_killed_engine_that_comes_back_serves_the_next_turn(
    converse: Converse, fleet: Fleet, salt: str, role: Role
) -> None:
    """After kill -9 turns fail honestly; after the restart they are right, and soon pulled."""
    conversation = converse(stream=True)
    await conversation.turn(salted_text(300, salt))
    await conversation.turn(salted_text(40, salt + "2"))
    conversation.say(salted_text(40, salt + "3"))
    await fleet.kill_engine(role)

    while_down = await conversation.send()
    assert while_down.status in (502, 503)
    assert while_down.error["message"]

    await fleet.restart_engine(role)
    back = await conversation.turn()
    if role == "decode":
        # Its KV is gone, and a lease of the engine before it is worth nothing.
        assert back.report["pulled_tokens"] == 0
        assert back.report["reuse"] == "no_lease"
    after = await conversation.turn(salted_text(40, salt + "4"))
    assert after.report["pulled_tokens"] == back.kv_tokens
    # Prefill may have served its leg of the turn that failed.
    await fleet.outlast_prefill()


async def test_after_a_restart_of_the_services_the_conversation_goes_on(
    converse: Converse, fleet: Fleet, salt: str
) -> None:
    """Engines reconnect by themselves; turns are right at once, and pulled from the second on."""
    conversation = converse(stream=True)
    await conversation.turn(salted_text(300, salt))
    await fleet.restart_services()
    second = await conversation.turn("are you still there?")
    # A claim of the registry before may still be open, so what it left is not offered at once.
    assert second.report["reuse"] in ("in_use", "no_lease")
    third = await conversation.turn("good")
    assert third.report["pulled_tokens"] == second.kv_tokens
    # Nor is it let go before then.
    await fleet.sit_out(CLAIM_LIMIT_S + 1)


@pytest.mark.fake_only
async def test_a_registry_that_lost_everything_learns_what_decode_holds(
    converse: Converse, fleet: FakeFleet, salt: str
) -> None:
    """Once no claim of its predecessor can be open, a lease from before the restart is pulled."""
    conversation = converse()
    first = await conversation.turn(salted_text(300, salt))
    await fleet.restart_services()
    await fleet.sit_out(CLAIM_LIMIT_S + 1)
    second = await conversation.turn("are you still there?")
    assert second.report["pulled_tokens"] == first.kv_tokens


@pytest.mark.fake_only
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_engine_restarted_between_two_turns_goes_unnoticed(
    converse: Converse, fleet: Fleet, salt: str, role: Role
) -> None:
    """When nobody asks while it is away, prefill's restart costs nothing, decode's a recompute."""
    conversation = converse()
    first = await conversation.turn(salted_text(300, salt))
    await fleet.restart_engine(role)
    answer = await conversation.turn("go on")
    assert answer.report["pulled_tokens"] == (first.kv_tokens if role == "prefill" else 0)


@pytest.mark.fake_only
async def test_both_engines_may_restart_again_and_again(
    converse: Converse, fleet: Fleet, salt: str
) -> None:
    """Peer state of engines long gone does not get in the way."""
    conversation = converse()
    await conversation.turn(salted_text(200, salt))
    roles: tuple[Role, ...] = ("decode", "prefill", "decode", "decode", "prefill")
    for role in roles:
        await fleet.restart_engine(role)
        await conversation.turn("go on")

    async def pulled() -> bool:
        return bool((await conversation.turn("go on")).report["pulled_tokens"])

    await eventually(pulled)
