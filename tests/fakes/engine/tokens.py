"""The tokenizer and chat template of the tiny model, without the model.

One token for each byte and one for each template delimiter, so that a prompt
has the same length, and the same block boundaries, on the fake engine as on a
real one that serves the tiny model (``tests/engine_support/tiny_model.py``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

SPECIAL_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>")
BYTE_COUNT = 256
END_ID = BYTE_COUNT + SPECIAL_TOKENS.index("<|end|>")
VOCABULARY_SIZE = BYTE_COUNT + len(SPECIAL_TOKENS)

_SPLIT_SPECIAL = re.compile("(" + "|".join(map(re.escape, SPECIAL_TOKENS)) + ")")


def encode(text: str) -> list[int]:
    """Token ids of a text: its UTF-8 bytes, delimiters as single tokens."""
    tokens: list[int] = []
    for part in _SPLIT_SPECIAL.split(text):
        if part in SPECIAL_TOKENS:
            tokens.append(BYTE_COUNT + SPECIAL_TOKENS.index(part))
        else:
            tokens.extend(part.encode())
    return tokens


def decode(tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
    """Text of token ids; delimiters are left out unless asked for."""
    parts: list[bytes] = []
    for token in tokens:
        if token < BYTE_COUNT:
            parts.append(bytes([token]))
        elif not skip_special_tokens:
            parts.append(SPECIAL_TOKENS[token - BYTE_COUNT].encode())
    return b"".join(parts).decode(errors="replace")


def render_chat(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    add_generation_prompt: bool = True,
) -> str:
    """Render messages as the tiny model's chat template does."""
    parts: list[str] = []
    if tools:
        parts.append(f"<|system|>{json.dumps(list(tools), ensure_ascii=False)}<|end|>")
    parts += [f"<|{m['role']}|>{_content_text(m.get('content'))}<|end|>" for m in messages]
    if add_generation_prompt:
        parts.append("<|assistant|>")
    return "".join(parts)


def _content_text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.get("text", "") for part in content if isinstance(part, Mapping))
