"""The two knobs: how long decode keeps blocks, and how much must be missing to pull."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.suite.conversation import salted_text
from tests.suite.fleets import decode_pins

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.suite.conversation import Conversation
    from tests.suite.fake_fleet import FakeFleet
    from tests.suite.fleets import Fleet

    Converse = Callable[..., Conversation]


@pytest.mark.parametrize(
    ("tokens", "pulled", "reuse"),
    [(63, 0, "below_threshold"), (64, 64, "pulled"), (65, 65, "pulled")],
)
async def test_fewer_than_64_tokens_are_recomputed_and_64_or_more_pulled(
    converse: Converse, fleet: Fleet, salt: str, tokens: int, pulled: int, reuse: str
) -> None:
    """Below the threshold prefill computes and decode frees all the same; from it on it pulls."""
    conversation = converse()
    first = await conversation.turn(salted_text(tokens + 1 - 16, salt), 16)
    assert first.kv_tokens == tokens
    second = await conversation.turn(salted_text(200, salt + "2"))
    assert second.report["pulled_tokens"] == pulled
    assert second.report["reuse"] == reuse
    # Only the second turn's blocks are kept now: the first one's went with the read.
    await decode_pins(fleet, -(-second.kv_tokens // fleet.block_size_tokens))


async def test_a_turn_after_the_ttl_recomputes(converse: Converse, fleet: Fleet, salt: str) -> None:
    """A lease that ran out is not read: the late turn is plain prefill, the next one pulls."""
    async with fleet.expiring() as leases:
        conversation = converse(fleet=leases.fleet)
        await conversation.turn(salted_text(300, salt))
        await leases.expire()
        late = await conversation.turn("after a long time")
        assert late.report["reuse"] == "no_lease"
        assert late.report["pulled_tokens"] == 0
        prompt = await conversation.turn("at once")
        assert prompt.report["pulled_tokens"] == late.kv_tokens
        assert await leases.fleet.unsafe_reads() == 0


@pytest.mark.fake_only
@pytest.mark.parametrize(
    ("left_s", "reuse"), [(10.5, "pulled"), (9.5, "too_little_time"), (-0.5, "no_lease")]
)
async def test_a_lease_is_offered_while_there_is_time_to_read_it(
    converse: Converse, fleet: FakeFleet, salt: str, left_s: float, reuse: str
) -> None:
    """With less than ten seconds left it is not claimed, and the answer is right either way."""
    conversation = converse()
    await conversation.turn(salted_text(300, salt))
    await fleet.sit_out(480.0 - left_s)
    answer = await conversation.turn("in time?")
    assert answer.report["reuse"] == reuse
    await fleet.sit_out(20.0)


@pytest.mark.fake_only
async def test_every_turn_starts_the_full_ttl_anew(
    converse: Converse, fleet: FakeFleet, salt: str
) -> None:
    """A conversation that goes on every few minutes is pulled for ever."""
    conversation = converse()
    await conversation.turn(salted_text(300, salt))
    for _ in range(4):
        await fleet.sit_out(400.0)
        assert (await conversation.turn("still here")).report["reuse"] == "pulled"


@pytest.mark.fake_only
async def test_leases_do_not_outlive_the_registry_that_forgot_them(
    converse: Converse, fleet: FakeFleet, salt: str
) -> None:
    """Decode frees on its own clock, although nobody asks it to."""
    for number in range(3):
        await converse(name=str(number)).turn(salted_text(200, f"{salt}{number}"))
    await decode_pins(fleet, 6)
    await fleet.expire()
    assert (await fleet.pool("decode")).pinned_blocks == 0
