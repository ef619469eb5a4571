"""Every parameter means in two legs what it means in one engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.suite.conversation import assert_same_answer, request, salted_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.suite.conversation import Conversation, Endpoint
    from tests.suite.fake_fleet import FakeFleet
    from tests.suite.fleets import Fleet

    Converse = Callable[..., Conversation]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("endpoint", "extra"),
    [
        pytest.param("completions", {"min_tokens": 8}, id="min-tokens"),
        pytest.param("chat", {"max_completion_tokens": 9}, id="max-completion-tokens"),
        pytest.param("chat", {"max_completion_tokens": 9, "min_tokens": 9}, id="both"),
        pytest.param("completions", {"stop": ["\n", "never"]}, id="stop-texts"),
        pytest.param("completions", {"stop_token_ids": [10]}, id="stop-tokens"),
        pytest.param("chat", {"seed": 7, "top_p": 0.9}, id="sampling"),
        pytest.param("chat", {"response_format": {"type": "text"}}, id="response-format"),
        pytest.param("chat", {"top_logprobs": 3}, id="top-logprobs"),
        pytest.param("chat", {"user": "somebody", "metadata": {"a": "b"}}, id="ignored-by-vllm"),
    ],
)
async def test_a_parameter_changes_the_answer_as_in_one_engine(
    converse: Converse, salt: str, endpoint: Endpoint, stream: bool, extra: dict[str, Any]
) -> None:
    """What shapes the answer reaches decode, and what would trip prefill's one token does not."""
    conversation = converse(endpoint, stream=stream)
    await conversation.turn(salted_text(200, salt), **extra)
    answer = await conversation.turn("go on", **extra)
    assert answer.report["reuse"] == "pulled"


async def test_a_prompt_of_token_ids_is_the_same_conversation(
    converse: Converse, fleet: Fleet, salt: str
) -> None:
    """A first turn as token ids and the next one as text: one history, and pulled."""
    conversation = converse()
    conversation.say(salted_text(300, salt))
    as_ids = conversation.body(16) | {"prompt": list(conversation.prompt.encode())}
    expected = await request(conversation.http, fleet.reference_url, "completions", as_ids)
    headers = {"X-Session-ID": conversation.session_id}
    answer = await request(conversation.http, fleet.base_url, "completions", as_ids, headers)
    assert_same_answer(answer, expected)
    conversation.say(answer.text, "assistant")
    assert (await conversation.turn("go on")).report["pulled_tokens"] == answer.kv_tokens


async def test_a_stream_without_usage_is_pulled_all_the_same(
    converse: Converse, fleet: Fleet, salt: str
) -> None:
    """Usage is the client's to ask for: without it no usage chunk comes, and that is all."""
    conversation = converse(stream=True)
    conversation.say(salted_text(300, salt))
    expected = await conversation.expected()
    answer = await conversation.send(stream_options={"include_usage": False})
    assert answer.text == expected.text
    assert not answer.usage
    assert all(chunk["choices"] for chunk in answer.chunks)
    assert (await conversation.turn("go on")).report["reuse"] == "pulled"


@pytest.mark.fake_only
async def test_the_prefill_leg_asks_for_one_token_and_nothing_that_shapes_the_answer(
    converse: Converse, fleet: FakeFleet, salt: str
) -> None:
    """Prefill sees a request for one token, unstreamed; decode sees the client's own."""
    conversation = converse("chat", stream=True)
    await conversation.turn(
        salted_text(200, salt), max_completion_tokens=12, min_tokens=5, stop=["never"]
    )
    prefill, decode = fleet.prefill.server.seen[-1], fleet.decode.server.seen[-1]
    assert (prefill.wanted_tokens(), prefill.min_tokens, prefill.stream) == (1, 0, False)
    assert not prefill.stop
    assert not prefill.stream_options
    assert prefill.wanted_logprobs() is None
    assert (decode.wanted_tokens(), decode.min_tokens, decode.stream) == (12, 5, True)
    assert decode.stop == ["never"]
