"""Whole conversations: every answer is the monolith's, and every history comes from decode."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.suite.conversation import salted_text
from tests.suite.fleets import decode_pins, nothing_is_kept

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.suite.conversation import Conversation, Endpoint
    from tests.suite.fleets import Fleet

    Converse = Callable[..., Conversation]

every_form = pytest.mark.parametrize(
    ("endpoint", "stream"),
    [("chat", True), ("chat", False), ("completions", True), ("completions", False)],
)


@every_form
async def test_a_second_turn_pulls_the_whole_first_one(
    converse: Converse, fleet: Fleet, salt: str, endpoint: Endpoint, stream: bool
) -> None:
    """Turn two reads all KV of turn one back, and both answers are the monolith's."""
    conversation = converse(endpoint, stream=stream)
    first = await conversation.turn(salted_text(300, salt))
    assert first.report["reuse"] == "no_lease"
    assert first.report["recomputed_tokens"] == first.usage["prompt_tokens"]
    before = await fleet.pulled_bytes()
    second = await conversation.turn(salted_text(50, salt + "2"))
    assert second.report["reuse"] == "pulled"
    assert second.report["pulled_tokens"] == first.kv_tokens
    assert await fleet.pulled_bytes() > before


@every_form
async def test_five_turns_pull_each_others_kv(
    converse: Converse, salt: str, endpoint: Endpoint, stream: bool
) -> None:
    """Each of five turns, tool results and all, pulls everything that the turn before left."""
    conversation = converse(endpoint, stream=stream)
    conversation.say(salted_text(200, salt), "system")
    before = None
    for number in range(5):
        role = "tool" if number % 2 else "user"
        conversation.say(salted_text(40 + 60 * number, f"{salt}{number}"), role)
        answer = await conversation.turn(max_tokens=10 + 7 * number)
        if before is not None:
            assert answer.report["reuse"] == "pulled"
            assert answer.report["pulled_tokens"] == before.kv_tokens
        before = answer


async def test_every_report_shows_the_knobs_in_force(converse: Converse, salt: str) -> None:
    """TTL and threshold are on every turn's report, with the engines that served it."""
    answer = await converse().turn(salted_text(100, salt))
    assert answer.report["decoder_kv_blocks_ttl_ms"] == 480_000
    assert answer.report["kv_recompute_threshold_tokens"] == 64
    assert answer.report["prefill_node_id"] == "prefill-0"
    assert answer.report["decode_node_id"] == "decode-0"
    assert answer.report["turn_id"]


async def test_conversations_at_the_same_time_do_not_mix(converse: Converse, salt: str) -> None:
    """Eight conversations with interleaved turns each read their own history only."""
    conversations = [converse(stream=number % 2 == 0) for number in range(8)]
    for turn in range(3):
        for number, conversation in enumerate(conversations):
            conversation.say(salted_text(90 + 10 * number, f"{salt}{number}.{turn}"))
        answers = await asyncio.gather(*(c.turn(max_tokens=8) for c in conversations))
        reuse = {answer.report["reuse"] for answer in answers}
        assert reuse == ({"pulled"} if turn else {"no_lease"})


async def test_two_turns_of_one_session_at_once_are_both_right(
    converse: Converse, salt: str
) -> None:
    """A lease is for one reader: the other turn recomputes, and neither waits for nor harms it."""
    conversation = converse()
    await conversation.turn(salted_text(300, salt))
    other = converse(session_id=conversation.session_id, history=list(conversation.history))
    conversation.say(salted_text(40, salt + "one"))
    other.say(salted_text(40, salt + "other"))
    answers = await asyncio.gather(conversation.turn(), other.turn())
    assert any(answer.report["reuse"] == "pulled" for answer in answers)


async def test_the_next_turn_may_come_the_instant_the_answer_ends(
    converse: Converse, salt: str
) -> None:
    """A turn sent as soon as the last chunk is there finds its lease, every time."""
    conversation = converse(stream=True)
    await conversation.turn(salted_text(200, salt))
    for number in range(10):
        conversation.say(salted_text(20, f"{salt}{number}"))
        answer = await conversation.send(max_tokens=4)
        assert answer.report["reuse"] == "pulled", number
    # The answers are compared once, at the end: each builds on all before it.
    await conversation.turn(salted_text(20, salt))


async def test_the_first_turn_needs_no_registry_record_and_the_last_leaves_none(
    converse: Converse, fleet: Fleet, salt: str
) -> None:
    """A closed conversation's blocks are free again, and its next turn starts anew."""
    conversation = converse()
    await conversation.turn(salted_text(300, salt))
    await decode_pins(fleet, 3)
    await conversation.close()
    await nothing_is_kept(fleet, "decode")
    answer = await conversation.turn(salted_text(30, salt))
    assert answer.report["reuse"] == "no_lease"
