"""Whose conversation it is, and who wants none: sessions, tenants, and the readback switch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.suite.conversation import request, salted_text
from tests.suite.fleets import decode_pins, nothing_is_kept

if TYPE_CHECKING:
    from collections.abc import Callable

    import aiohttp

    from tests.suite.conversation import Conversation, Endpoint
    from tests.suite.fleets import Fleet

    Converse = Callable[..., Conversation]


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
async def test_without_a_session_id_nothing_is_kept(
    converse: Converse, fleet: Fleet, salt: str, endpoint: Endpoint
) -> None:
    """The turn is served in two legs, right, and neither engine keeps anything of it."""
    conversation = converse(endpoint, session_id="", stream=True)
    for text in (salted_text(300, salt), "go on"):
        answer = await conversation.turn(text)
        assert answer.report["reuse"] == "no_session"
        assert answer.report["recomputed_tokens"] == answer.usage["prompt_tokens"]
    await nothing_is_kept(fleet)


async def test_two_tenants_may_use_the_same_session_id(converse: Converse, salt: str) -> None:
    """Bearer tokens tell tenants apart: the same id and history, and each has its own lease."""
    tenants = [
        converse(session_id="shared", headers={"Authorization": f"Bearer {name}"})
        for name in ("alice", "bob")
    ]
    for conversation in tenants:
        answer = await conversation.turn(salted_text(300, salt))
        assert answer.report["reuse"] == "no_lease"
    for conversation in tenants:
        assert (await conversation.turn("go on")).report["reuse"] == "pulled"


async def test_closing_anothers_conversation_does_not_close_mine(
    converse: Converse, salt: str
) -> None:
    """DELETE acts on the caller's own tenant only."""
    mine = converse(session_id="shared", headers={"Authorization": "Bearer alice"})
    theirs = converse(session_id="shared", headers={"Authorization": "Bearer mallory"})
    await mine.turn(salted_text(300, salt))
    await theirs.close()
    assert (await mine.turn("go on")).report["reuse"] == "pulled"


async def test_the_session_id_may_be_in_the_body(
    http: aiohttp.ClientSession, fleet: Fleet, converse: Converse, salt: str
) -> None:
    """``session_id`` in the body names the same conversation as the header does."""
    conversation = converse()
    conversation.say(salted_text(300, salt))
    body = conversation.body(16, session_id=conversation.session_id)
    first = await request(http, fleet.base_url, "completions", body)
    assert first.report["reuse"] == "no_lease"
    conversation.say(first.text, "assistant")
    assert (await conversation.turn("go on")).report["reuse"] == "pulled"


async def test_readback_can_be_switched_off_for_a_turn(
    converse: Converse, fleet: Fleet, salt: str
) -> None:
    """The switch makes a turn plain and leaves the conversation's lease for the one after it."""
    conversation = converse()
    first = await conversation.turn(salted_text(300, salt))
    await decode_pins(fleet, 3)
    conversation.headers = {"X-Kvtide-Readback": "off"}
    plain = await conversation.turn("plainly")
    assert plain.report["reuse"] == "readback_off"
    assert plain.report["pulled_tokens"] == 0
    await decode_pins(fleet, 3)
    conversation.headers = {}
    after = await conversation.turn("go on")
    assert after.report["pulled_tokens"] == first.kv_tokens


@pytest.mark.parametrize(
    # vLLM refuses several greedy answers; at this temperature they are greedy all the same.
    "extra",
    [{"n": 2, "temperature": 0.001}, {"echo": True}],
    ids=["two-choices", "echo"],
)
async def test_what_two_legs_cannot_serve_is_served_by_one_engine(
    converse: Converse, fleet: Fleet, salt: str, extra: dict[str, object]
) -> None:
    """Such a request gets decode's whole answer, and leaves no lease."""
    conversation = converse()
    conversation.say(salted_text(200, salt))
    expected = await conversation.expected(8, logprobs=None, **extra)
    answer = await conversation.send(8, logprobs=None, **extra)
    assert answer.status == 200
    assert answer.text == expected.text
    assert answer.report["reuse"] == "not_disaggregated"
    await nothing_is_kept(fleet, "decode")


async def test_an_answer_that_ends_by_a_stop_text_costs_the_next_turn_its_reuse(
    converse: Converse, salt: str
) -> None:
    """VLLM aborts such a request in its core and keeps nothing; the next turn is right anyway."""
    conversation = converse(stream=True)
    conversation.say(salted_text(300, salt))
    stop = (await conversation.expected()).text[5:8]
    answer = await conversation.turn(stop=[stop])
    assert answer.finish_reason == "stop"
    await conversation.turn("go on")


async def test_an_answer_that_ends_by_itself_is_pulled(converse: Converse, salt: str) -> None:
    """The end token ends a turn as the length does: its KV is there for the next one."""
    conversation = converse(stream=True)
    conversation.say(salted_text(300, salt))
    ending: dict[str, Any] = {"ignore_eos": False, "logit_bias": {"260": 100}, "min_tokens": 5}
    answer = await conversation.turn(**ending)
    assert answer.finish_reason == "stop"
    after = await conversation.turn("go on")
    assert after.report["reuse"] == "pulled"
    assert after.report["pulled_tokens"] >= 256
