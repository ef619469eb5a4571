"""Lengths on, before and after block boundaries: of prompts, of what decode keeps, of cuts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.suite.conversation import salted_text

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from tests.suite.conversation import Conversation
    from tests.suite.fleets import Fleet

    Converse = Callable[..., Conversation]

_ANSWER_TOKENS = 12


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Fewer lengths on real engines, where each costs a second."""
    if "length" in metafunc.fixturenames:
        real = metafunc.config.getoption("--engine") == "cpu"
        blocks = (2,) if real else (1, 2, 3)
        offsets = (-1, 0, 1) if real else (-2, -1, 0, 1, 2)
        # 128 is the CPU's block size, and the fake engines' default.
        metafunc.parametrize("length", [128 * b + offset for b in blocks for offset in offsets])


async def test_a_first_prompt_of_any_length(converse: Converse, salt: str, length: int) -> None:
    """The first prompt ends around a boundary; the second turn pulls all of it and the answer."""
    conversation = converse()
    first = await conversation.turn(salted_text(length, salt), _ANSWER_TOKENS)
    assert first.usage["prompt_tokens"] == length
    second = await conversation.turn(salted_text(30, salt + "2"), _ANSWER_TOKENS)
    assert second.report["pulled_tokens"] == first.kv_tokens


async def test_kv_of_any_length(converse: Converse, salt: str, length: int) -> None:
    """What decode keeps ends around a boundary: its partial last block is read, or is none."""
    conversation = converse()
    prompt = salted_text(length + 1 - _ANSWER_TOKENS, salt)
    first = await conversation.turn(prompt, _ANSWER_TOKENS)
    assert first.kv_tokens == length
    second = await conversation.turn(salted_text(30, salt + "2"), _ANSWER_TOKENS)
    assert second.report["pulled_tokens"] == length


async def test_a_second_prompt_of_any_length(converse: Converse, salt: str, length: int) -> None:
    """The prompt that reads back ends around a boundary, itself or by a single new token."""
    conversation = converse()
    first = await conversation.turn(salted_text(length - 40, salt), _ANSWER_TOKENS)
    fill = length - first.kv_tokens - 1
    second = await conversation.turn(salted_text(fill, salt + "2"), _ANSWER_TOKENS)
    assert second.usage["prompt_tokens"] == length
    assert second.report["pulled_tokens"] == first.kv_tokens


async def test_a_prompt_cut_at_any_length(
    converse: Converse, fleet: Fleet, salt: str, length: int
) -> None:
    """A prefix of what decode keeps reads its whole blocks, less its last token."""
    conversation = converse()
    await conversation.turn(salted_text(length + 100, salt), _ANSWER_TOKENS)
    conversation.history = [{"role": "user", "content": conversation.prompt[:length]}]
    second = await conversation.turn(max_tokens=_ANSWER_TOKENS)
    assert second.usage["prompt_tokens"] == length
    whole = length // fleet.block_size_tokens * fleet.block_size_tokens
    assert second.report["pulled_tokens"] == min(whole, length - 1)
