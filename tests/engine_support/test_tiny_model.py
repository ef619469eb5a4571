"""The tiny model keeps its promises, so that the tests that stand on it mean something."""

from __future__ import annotations

import string
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.engine_support.tiny_model import (
    END_ID,
    chat_prompt_tokens,
    text,
    write_tiny_model,
)

if TYPE_CHECKING:
    from pathlib import Path

ANSWER_TOKENS = 24
# Two float32 engines differ by about 2e-6; what a wrong block does must stand out from that.
VISIBLE = 1e-3


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def model(model_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model_dir)


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Any:
    return AutoTokenizer.from_pretrained(model_dir)


def answer(model: Any, tokenizer: Any, prompt: str) -> tuple[str, torch.Tensor]:
    """The greedy answer, and the logprob of each of its tokens."""
    inputs = torch.tensor([tokenizer(prompt).input_ids])
    output = model.generate(
        inputs,
        do_sample=False,
        max_new_tokens=ANSWER_TOKENS,
        output_logits=True,
        return_dict_in_generate=True,
    )
    new_ids = output.sequences[0][inputs.shape[1] :]
    logprobs = torch.log_softmax(torch.cat(output.logits), dim=-1).max(dim=-1).values
    return tokenizer.decode(new_ids), logprobs


def test_every_ascii_character_is_one_token(tokenizer: Any) -> None:
    """Prompt lengths are set by the character, and text comes back as it was."""
    everything = "".join(chr(code) for code in range(128)) * 3
    ids = tokenizer(everything).input_ids
    assert ids == [ord(character) for character in everything]
    assert tokenizer.decode(ids) == everything


def test_other_text_round_trips_too(tokenizer: Any) -> None:
    """Beyond ASCII a character is as many tokens as it has bytes, and nothing is lost."""
    words = "Grüße, 世界 🌊"
    ids = tokenizer(words).input_ids
    assert ids == list(words.encode())
    assert tokenizer.decode(ids) == words


def test_chat_costs_its_characters_and_its_delimiters(tokenizer: Any) -> None:
    """The length of a chat prompt can be foretold, for every role."""
    messages = [
        {"role": role, "content": f"I am the {role}."}
        for role in ("system", "user", "assistant", "tool")
    ]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert len(ids) == chat_prompt_tokens(messages)
    assert ids.count(END_ID) == 4


def test_answer_in_the_history_extends_the_prompt(tokenizer: Any) -> None:
    """The next turn's prompt starts with this one's prompt and answer, token by token."""
    turn = [{"role": "user", "content": "first"}]
    prompt = tokenizer.apply_chat_template(turn, add_generation_prompt=True)["input_ids"]
    history = [*turn, {"role": "assistant", "content": "answer"}, {"role": "user", "content": "x"}]
    later = tokenizer.apply_chat_template(history, add_generation_prompt=True)["input_ids"]
    assert later[: len(prompt) + 6] == prompt + list(b"answer")


def test_tools_are_part_of_the_prompt(tokenizer: Any) -> None:
    """A request with tools has another prompt than one without."""
    messages = [{"role": "user", "content": "hello"}]
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]
    with_tools = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    assert with_tools.startswith("<|system|>")
    assert "look_up" in with_tools


def test_answers_are_printable_and_do_not_end(model: Any, tokenizer: Any) -> None:
    """Greedy answers are as long as asked for, in printable ASCII."""
    for salt in "abcd":
        told, _ = answer(model, tokenizer, text(300, salt))
        assert len(told) == ANSWER_TOKENS
        assert set(told) <= set(string.printable) - set("\t\n\r\x0b\x0c")


def test_end_can_be_asked_for(model: Any, tokenizer: Any) -> None:
    """A bias on the end token ends the answer, as for any model."""
    inputs = torch.tensor([tokenizer(text(100)).input_ids])
    output = model.generate(
        inputs, do_sample=False, max_new_tokens=8, sequence_bias=[[[END_ID], 100.0]]
    )
    assert output[0][inputs.shape[1] :].tolist() == [END_ID]


@pytest.mark.parametrize("place", [0, 400, 900])
def test_every_part_of_the_context_shows(model: Any, tokenizer: Any, place: int) -> None:
    """Other text anywhere in a long prompt, a block's worth or less, changes answer or logprobs."""
    for salt in "abc":
        prompt = text(1000, salt)
        changed = prompt[:place] + text(30, f"other {salt}") + prompt[place + 30 :]
        told, logprobs = answer(model, tokenizer, prompt)
        told_changed, logprobs_changed = answer(model, tokenizer, changed)
        assert told != told_changed or (logprobs - logprobs_changed).abs().max() > VISIBLE


def test_model_is_the_same_each_time(model_dir: Path, tmp_path: Path) -> None:
    """Two processes that write it have the same model, to the last bit."""
    again = write_tiny_model(tmp_path / "again")
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (again / name).read_bytes() == (model_dir / name).read_bytes()


def test_text_has_the_length_that_was_asked_for(tokenizer: Any) -> None:
    """Texts have exactly so many tokens, and differ by their salt."""
    assert len(tokenizer(text(777)).input_ids) == 777
    assert text(50, "a") == text(50, "a") != text(50, "b")
