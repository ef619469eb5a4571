"""OpenAI response bodies and stream chunks, with vLLM's additions."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.fakes.engine import tokens
from tests.fakes.engine.api_requests import ChatRequest, CommonRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.fakes.engine.model import Sample
    from tests.fakes.engine.request import Output


@dataclass(slots=True)
class ChoiceState:
    """One choice as it grows."""

    index: int
    prompt_token_ids: list[int]
    samples: list[Sample] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cached_tokens: int = 0
    kv_transfer_params: dict[str, Any] | None = None
    logprob_offset: int = 0

    def add(self, output: Output) -> None:
        """Take in one step's news."""
        self.samples += output.samples
        self.text += output.text
        self.finish_reason = output.finish_reason or self.finish_reason
        self.stop_reason = output.stop_reason
        self.cached_tokens = output.cached_tokens or self.cached_tokens
        self.kv_transfer_params = output.kv_transfer_params or self.kv_transfer_params


class ResponseBuilder:
    """Builds everything that one HTTP request answers."""

    def __init__(
        self, parsed: CommonRequest, request_id: str, model: str, *, prompt_tokens_details: bool
    ) -> None:
        self._parsed = parsed
        self._id = request_id
        self._model = model
        self._created = int(time.time())
        self._details = prompt_tokens_details
        self._chat = isinstance(parsed, ChatRequest)

    def full(self, choices: Sequence[ChoiceState]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        body: dict[str, Any] = {
            "id": self._id,
            "object": "chat.completion" if self._chat else "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": [self._full_choice(choice) for choice in choices],
            "service_tier": None,
            "system_fingerprint": None,
            "usage": self.usage(choices),
            "kv_transfer_params": choices[0].kv_transfer_params,
        }
        if self._chat and self._parsed.return_token_ids:
            body["prompt_token_ids"] = choices[0].prompt_token_ids
        return body

    def first_chunks(self, choices: Sequence[ChoiceState]) -> list[str]:
        """What a chat stream says before any text: the role."""
        if not self._chat:
            return []
        delta = {"role": "assistant", "content": ""}
        return [
            self._event(
                [{"index": c.index, "delta": delta, "logprobs": None, "finish_reason": None}]
            )
            for c in choices
        ]

    def chunk(self, choice: ChoiceState, output: Output, *, with_params: bool) -> str:
        """One step's news of one choice, as a stream event."""
        entry: dict[str, Any] = {"index": choice.index}
        if self._chat:
            entry["delta"] = {"content": output.text}
        else:
            entry["text"] = output.text
        entry["logprobs"] = self._logprobs(choice, output.samples)
        entry["finish_reason"] = output.finish_reason
        entry["stop_reason"] = output.stop_reason
        if self._parsed.return_token_ids:
            entry["token_ids"] = [sample.token for sample in output.samples]
        extra = {}
        if with_params and output.kv_transfer_params is not None:
            extra["kv_transfer_params"] = output.kv_transfer_params
        return self._event([entry], **extra)

    def usage_chunk(self, choices: Sequence[ChoiceState]) -> str:
        """The event that ends a stream when usage was asked for."""
        return self._event([], usage=self.usage(choices))

    def usage(self, choices: Sequence[ChoiceState]) -> dict[str, Any]:
        """Token counts over all choices; cached tokens are the last choice's, as in vLLM."""
        prompts = {choice.index // (self._parsed.n or 1): choice for choice in choices}
        prompt = sum(len(choice.prompt_token_ids) for choice in prompts.values())
        completion = sum(len(choice.samples) for choice in choices)
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion,
            "completion_tokens": completion,
            "prompt_tokens_details": None,
        }
        if self._details:
            usage["prompt_tokens_details"] = {"cached_tokens": choices[-1].cached_tokens}
        return usage

    def _event(self, choices: list[dict[str, Any]], **extra: Any) -> str:
        body = {
            "id": self._id,
            "object": "chat.completion.chunk" if self._chat else "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": choices,
            **extra,
        }
        return json.dumps(body, separators=(",", ":"))

    def _full_choice(self, choice: ChoiceState) -> dict[str, Any]:
        text = choice.text
        if self._parsed.echo and not self._chat:
            text = tokens.decode(choice.prompt_token_ids) + text
        entry: dict[str, Any] = {
            "index": choice.index,
            "logprobs": self._logprobs(choice, choice.samples),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "token_ids": None,
        }
        if self._chat:
            entry["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            entry["text"] = text
            entry["prompt_logprobs"] = None
        if self._parsed.return_token_ids:
            entry["token_ids"] = [sample.token for sample in choice.samples]
            if not self._chat:
                entry["prompt_token_ids"] = choice.prompt_token_ids
        return entry

    def _logprobs(self, choice: ChoiceState, samples: Sequence[Sample]) -> dict[str, Any] | None:
        count = self._parsed.wanted_logprobs()
        if count is None:
            return None
        if self._chat:
            return {"content": [_chat_logprob(sample, count) for sample in samples]}
        texts = [_token_text(sample.token) for sample in samples]
        offsets = []
        for text in texts:
            offsets.append(choice.logprob_offset)
            choice.logprob_offset += len(text)
        return {
            "text_offset": offsets,
            "token_logprobs": [sample.logprob for sample in samples],
            "tokens": texts,
            "top_logprobs": [
                {_token_text(token): logprob for token, logprob in sample.top[: max(count, 1)]}
                for sample in samples
            ],
        }


def _chat_logprob(sample: Sample, count: int) -> dict[str, Any]:
    entry = _logprob_entry(sample.token, sample.logprob)
    entry["top_logprobs"] = [_logprob_entry(*pair) for pair in sample.top[:count]]
    return entry


def _logprob_entry(token: int, logprob: float) -> dict[str, Any]:
    text = _token_text(token)
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _token_text(token: int) -> str:
    return tokens.decode([token], skip_special_tokens=False)
