"""The fake's tokens are the tiny model's tokens."""

from __future__ import annotations

from typing import Any

from tests.engine_support.tiny_model import build_tokenizer
from tests.fakes.engine import tokens

_MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi <|user|> there"},
    {"role": "assistant", "content": "Hello."},
    {"role": "tool", "content": '{"ok": true}'},
]


def test_a_text_has_the_same_ids_as_in_the_tiny_models_tokenizer() -> None:
    """Block boundaries fall in the same places on the fake and on the real engine."""
    tokenizer = build_tokenizer()
    for text in ("plain text", "two  spaces\nand a line", "<|user|>x<|end|>", "süß €"):
        assert tokens.encode(text) == tokenizer.encode(text)
        assert tokens.decode(tokens.encode(text)) == tokenizer.decode(
            tokenizer.encode(text), skip_special_tokens=True
        )


def test_a_chat_has_the_same_ids_as_in_the_tiny_models_template() -> None:
    """The same holds for rendered conversations, with and without tools."""
    tokenizer = build_tokenizer()
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    variants: list[Any] = [None, tools]
    for listed in variants:
        expected = tokenizer.apply_chat_template(
            _MESSAGES, tools=listed, add_generation_prompt=True, tokenize=False
        )
        assert tokens.render_chat(_MESSAGES, listed) == expected
        assert tokens.encode(str(expected)) == tokenizer.encode(str(expected))
