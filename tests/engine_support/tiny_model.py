"""A tiny model for tests: real to vLLM, written in a second, and easy to reason about.

* **One ASCII character is one token.** The tokenizer knows the 256 bytes and a handful of special
  tokens, and merges nothing, so that a test sets prompt lengths by the character.
* **Greedy output is printable ASCII and never ends by itself.** Other tokens have a logit of
  exactly zero, which never wins; answers are as long as `max_tokens` says. Whoever wants one to end
  asks for it (a stop string, or `logit_bias` on `END_ID`).
* **Every token depends on all of the context**, through random weights that are large enough: a KV
  block that is not the right one shows in tokens or logprobs.
"""

from __future__ import annotations

import string
from typing import TYPE_CHECKING

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

if TYPE_CHECKING:
    from pathlib import Path

MAX_POSITIONS = 8192
SEED = 20_480

SPECIAL_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>")
END_TOKEN = "<|end|>"
BYTE_COUNT = 256
END_ID = BYTE_COUNT + SPECIAL_TOKENS.index(END_TOKEN)

CHAT_TEMPLATE = (
    "{%- if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif -%}"
    "{%- for message in messages -%}"
    "{{ '<|' + message['role'] + '|>' + (message['content'] or '') + '<|end|>' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt %}<|assistant|>{% endif -%}"
)
"""Each message costs its characters and two tokens; the prompt for the answer costs one more."""

_HIDDEN = 64
_HEADS = 4
_KV_HEADS = 2
_HEAD_DIM = 32  # the smallest that vLLM's CPU attention takes
_LAYERS = 2
# Sharp enough attention that single tokens far back still matter, and a spread of logits wide
# enough that float32 rounding does not decide which token wins.
_QUERY_KEY_SCALE = 2.2
_VALUE_SCALE = 2.5
_LOGIT_SCALE = 4.0


def write_tiny_model(target: Path) -> Path:
    """Writes model and tokenizer into `target` and returns it; the same bytes each time."""
    target.mkdir(parents=True, exist_ok=True)
    build_model().save_pretrained(target)
    build_tokenizer().save_pretrained(target)
    return target


def chat_prompt_tokens(messages: list[dict[str, str]]) -> int:
    """How many tokens a chat of ASCII messages makes, the start of the answer included."""
    return sum(len(message["content"]) + 2 for message in messages) + 1


def text(tokens: int, salt: str = "") -> str:
    """Printable text of exactly that many tokens, which does not repeat and differs by `salt`."""
    generator = torch.Generator().manual_seed(int.from_bytes(salt.encode()[:7], "big") + 1)
    letters = string.ascii_letters + string.digits + "    .,"
    picks = torch.randint(len(letters), (tokens,), generator=generator)
    return "".join(letters[index] for index in picks)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Token i below 256 is byte i; the special tokens follow in their order."""
    alphabet = bytes_to_unicode()
    tokenizer = Tokenizer(
        models.BPE(vocab={alphabet[byte]: byte for byte in range(BYTE_COUNT)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_TOKEN,
        pad_token=END_TOKEN,
        extra_special_tokens=list(SPECIAL_TOKENS),
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_model() -> LlamaForCausalLM:
    """A random float32 Llama, the same one each time."""
    config = LlamaConfig(
        vocab_size=BYTE_COUNT + len(SPECIAL_TOKENS),
        hidden_size=_HIDDEN,
        intermediate_size=2 * _HIDDEN,
        num_hidden_layers=_LAYERS,
        num_attention_heads=_HEADS,
        num_key_value_heads=_KV_HEADS,
        head_dim=_HEAD_DIM,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=END_ID,
        pad_token_id=END_ID,
        dtype="float32",
    )
    model = LlamaForCausalLM(config).to(torch.float32).eval()
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.fill_(1.0)
                continue
            if "embed_tokens" in name:
                scale = 1.0
            elif "lm_head" in name:
                scale = _LOGIT_SCALE / weight.shape[1] ** 0.5
            elif "q_proj" in name or "k_proj" in name:
                scale = _QUERY_KEY_SCALE / weight.shape[1] ** 0.5
            else:
                scale = _VALUE_SCALE / weight.shape[1] ** 0.5
            weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
        printable = [ord(character) for character in string.printable if character.isprintable()]
        silent = torch.ones(config.vocab_size, dtype=torch.bool)
        silent[printable] = False
        model.lm_head.weight[silent] = 0.0
    return model
