"""Histories that are not what decode has: edited, shortened, branched. Never a wrong answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvtide.connector.handle import params_from_handle
from tests.fakes.by_hand import ByHand
from tests.suite.conversation import salted_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.suite.conversation import Conversation, Endpoint
    from tests.suite.fake_fleet import FakeFleet

    Converse = Callable[..., Conversation]

_HISTORY = 600

edits = pytest.mark.parametrize(
    ("edit", "whole_blocks"),
    [
        pytest.param(lambda h: h[:300] + "x" * 30 + h[330:] + "more", 2, id="middle-edited"),
        pytest.param(lambda h: h[:300] + h[330:] + "more", 2, id="middle-dropped"),
        pytest.param(lambda h: h[:300] + "x" * 30 + h[300:] + "more", 2, id="middle-inserted"),
        pytest.param(lambda h: "~" + h[1:] + "more", 0, id="first-token-edited"),
        pytest.param(lambda h: h[:400], 3, id="shorter-prompt"),
        pytest.param(lambda h: h[:500] + "then it went another way " * 9, 3, id="fork"),
    ],
)


@edits
async def test_another_history_gets_its_own_answer(
    converse: Converse, salt: str, edit: Callable[[str], str], whole_blocks: int
) -> None:
    """The common whole blocks are pulled, the rest is recomputed, and the answer is right."""
    conversation = converse()
    await conversation.turn(salted_text(_HISTORY, salt))
    conversation.history = [{"role": "user", "content": edit(conversation.prompt)}]
    answer = await conversation.turn()
    assert answer.report["pulled_tokens"] == whole_blocks * 128
    assert answer.report["reuse"] == ("pulled" if whole_blocks else "history_changed")
    # And the turn after it finds what this one left.
    after = await conversation.turn("go on")
    assert after.report["pulled_tokens"] == answer.kv_tokens


@edits
@pytest.mark.fake_only
async def test_upstream_answers_wrongly_where_kvtide_does_not(
    converse: Converse,
    fleet: FakeFleet,
    salt: str,
    edit: Callable[[str], str],
    whole_blocks: int,
) -> None:
    """The same history's handle, given to stock engines, yields HTTP 200 and another answer."""
    ours, theirs = converse(name="ours"), converse(name="theirs")
    for conversation in (ours, theirs):
        await conversation.turn(salted_text(_HISTORY, salt))
    prompt = edit(ours.prompt)
    handle = _handle_of(fleet, theirs)
    ours.history = [{"role": "user", "content": prompt}]
    right = await ours.turn()

    prefill, decode = await fleet.stock_pair()
    hand = ByHand(ours.http, prefill.url, decode.url, fleet.model)
    wrong = await hand.turn(prompt, handle, cache_salt=salt)
    assert wrong.decode.status == 200
    assert wrong.decode.text != right.text
    assert wrong.decode.logprobs != right.logprobs
    assert whole_blocks < len(handle["remote_block_ids"][0])


def _handle_of(fleet: FakeFleet, conversation: Conversation) -> dict[str, Any]:
    (pin,) = [pin for pin in fleet.pins() if pin.turn.conversation_id == conversation.session_id]
    return params_from_handle(pin.handle)


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
async def test_two_branches_of_one_session_are_both_right(
    converse: Converse, salt: str, endpoint: Endpoint
) -> None:
    """A client that goes back and takes another branch, under the same session id, is answered."""
    conversation = converse(endpoint)
    await conversation.turn(salted_text(300, salt))
    common = list(conversation.history)
    await conversation.turn(salted_text(100, salt + "one"))
    conversation.history = common
    branch = await conversation.turn(salted_text(100, salt + "other"))
    assert branch.report["pulled_tokens"] == 256
    assert (await conversation.turn("go on")).report["pulled_tokens"] == branch.kv_tokens


async def test_a_turn_repeated_word_for_word_is_right(converse: Converse, salt: str) -> None:
    """A client that sends the same prompt again gets the same answer."""
    conversation = converse()
    first = await conversation.turn(salted_text(300, salt))
    conversation.history.pop()
    again = await conversation.turn()
    assert again.text == first.text
    assert again.report["pulled_tokens"] == 256


async def test_a_system_prompt_that_changes_every_turn_is_never_pulled(
    converse: Converse, salt: str
) -> None:
    """The time of day at the start of the prompt costs all reuse, and nothing else."""
    conversation = converse("chat")
    conversation.say("It is 9:00.", "system")
    await conversation.turn(salted_text(300, salt))
    conversation.history[0] = {"role": "system", "content": "It is 9:01."}
    answer = await conversation.turn("go on")
    assert answer.report["reuse"] == "history_changed"
    assert answer.report["recomputed_tokens"] == answer.usage["prompt_tokens"]
