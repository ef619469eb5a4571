"""The OpenAI request bodies that vLLM takes, and what it refuses in them."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tests.fakes.engine import tokens
from tests.fakes.engine.api_errors import (
    ApiError,
    FieldError,
    bad_request,
    from_pydantic,
    model_not_found,
    validation_error,
)
from tests.fakes.engine.request import SamplingParams

if TYPE_CHECKING:
    from aiohttp import web

    from tests.fakes.engine.config import EngineConfig
    from tests.fakes.engine.faults import Faults

_DEFAULT_COMPLETION_TOKENS = 16


class StreamOptions(BaseModel):
    """``stream_options``."""

    include_usage: bool | None = True
    continuous_usage_stats: bool | None = False


class CommonRequest(BaseModel):
    """Fields of both endpoints; unknown ones are ignored, as vLLM does."""

    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    n: int | None = 1
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logit_bias: dict[str, float] | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    use_beam_search: bool = False
    return_token_ids: bool | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    kv_transfer_params: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_stream_options(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("stream_options") and not data.get("stream"):
            msg = "Stream options can only be defined when `stream=True`."
            raise FieldError(msg, "stream_options")
        return data

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def prompts(self) -> list[list[int]]:
        """Token ids of each prompt."""
        raise NotImplementedError

    def wanted_logprobs(self) -> int | None:
        """How many likeliest tokens to report at each position; None: no logprobs."""
        raise NotImplementedError

    def wanted_tokens(self) -> int | None:
        """The client's limit for the answer, in tokens."""
        return self.max_tokens


class ChatRequest(CommonRequest):
    """``POST /v1/chat/completions``."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = 0
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    add_generation_prompt: bool = True

    @model_validator(mode="before")
    @classmethod
    def _check_top_logprobs(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("top_logprobs") and not data.get("logprobs"):
            msg = "when using `top_logprobs`, `logprobs` must be set to true."
            raise FieldError(msg, "top_logprobs")
        return data

    def prompts(self) -> list[list[int]]:
        """The rendered conversation."""
        for message in self.messages:
            if "role" not in message:
                raise bad_request("Missing 'role' in message", "messages")
        text = tokens.render_chat(
            self.messages, self.tools, add_generation_prompt=self.add_generation_prompt
        )
        return [tokens.encode(text)]

    def wanted_logprobs(self) -> int | None:
        """``top_logprobs``, when ``logprobs`` is on."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def wanted_tokens(self) -> int | None:
        """``max_completion_tokens``, else ``max_tokens``."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(CommonRequest):
    """``POST /v1/completions``."""

    prompt: str | list[str] | list[int] | list[list[int]] = Field(union_mode="left_to_right")
    logprobs: int | None = None

    def prompts(self) -> list[list[int]]:
        """Each prompt, tokenised unless it came as token ids."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [tokens.encode(prompt)]
        if prompt and isinstance(prompt[0], int):
            return [[int(token) for token in prompt]]
        return [tokens.encode(p) if isinstance(p, str) else list(p) for p in prompt]  # type: ignore[arg-type]

    def wanted_logprobs(self) -> int | None:
        """``logprobs``."""
        return self.logprobs

    def wanted_tokens(self) -> int | None:
        """``max_tokens``, 16 when not given."""
        return _DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens


Request = TypeVar("Request", bound=CommonRequest)


async def parse(request: web.Request, model: type[Request], config: EngineConfig) -> Request:
    """Read a body, or raise the ApiError that vLLM answers."""
    if request.content_type != "application/json":
        message = "Unsupported Media Type: Only 'application/json' is allowed"
        raise validation_error([{"msg": message}])
    try:
        body = json.loads(await request.read())
    except ValueError as error:
        entry = {"type": "json_invalid", "loc": "body", "msg": "JSON decode error"}
        raise validation_error([entry | {"ctx": str(error)}]) from error
    try:
        parsed = model.model_validate(body)
    except ValidationError as error:
        raise from_pydantic(error) from error
    if parsed.model and parsed.model != config.model:
        raise model_not_found(parsed.model)
    return parsed


def admit(
    parsed: CommonRequest, config: EngineConfig, faults: Faults
) -> list[tuple[list[int], SamplingParams]]:
    """Tokenise the prompts and settle their sampling, or raise the ApiError that vLLM answers."""
    if faults.take("reject_next_requests"):
        raise bad_request("told to refuse this request")
    limit = config.max_model_len_tokens
    wanted = parsed.wanted_tokens()
    if wanted is not None and wanted > limit:
        raise bad_request(
            f"max_tokens={wanted} cannot be greater than max_model_len={limit}. "
            "Please request fewer output tokens.",
            "max_tokens",
        )
    admitted = []
    for prompt in parsed.prompts():
        if not prompt:
            raise bad_request("The decoder prompt cannot be empty")
        for token in (min(prompt), max(prompt)):
            if not 0 <= token < tokens.VOCABULARY_SIZE:
                raise bad_request(f"Token id {token} is out of vocabulary")
        if len(prompt) > limit:
            raise bad_request(
                f"This model's maximum context length is {limit} tokens. However, your prompt "
                f"contains {len(prompt)} input tokens, which exceeds this limit even without any "
                "output tokens. Please reduce the length of the input prompt.",
                "input_tokens",
            )
        # A longer wish than the context has room for is cut, not refused.
        room = limit - len(prompt)
        max_tokens = room if wanted is None else min(room, wanted)
        admitted.append((prompt, _sampling(parsed, max_tokens)))
    return admitted


def _sampling(parsed: CommonRequest, max_tokens: int) -> SamplingParams:
    _check(parsed, max_tokens)
    stop = [parsed.stop] if isinstance(parsed.stop, str) else parsed.stop or []
    if not all(stop):
        raise bad_request("stop cannot contain an empty string.")
    bias = (parsed.logit_bias or {}).get(str(tokens.END_ID), 0)
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=parsed.min_tokens,
        stop=tuple(stop),
        stop_token_ids=tuple(parsed.stop_token_ids or ()),
        ignore_eos=parsed.ignore_eos,
        include_stop_text=parsed.include_stop_str_in_output,
        end_at_once=bias > 0,
    )


def _check(parsed: CommonRequest, max_tokens: int) -> None:
    temperature = 1.0 if parsed.temperature is None else parsed.temperature
    top_p = 1.0 if parsed.top_p is None else parsed.top_p
    if not math.isfinite(temperature) or temperature < 0:
        raise bad_request(f"temperature must be non-negative, got {temperature}.", "temperature")
    if temperature > 2:
        raise bad_request(f"temperature must be in [0, 2], got {temperature}.", "temperature")
    if not 0 < top_p <= 1:
        raise bad_request(f"top_p must be in (0, 1], got {top_p}.", "top_p")
    if max_tokens < 1:
        raise bad_request(f"max_tokens must be at least 1, got {max_tokens}.", "max_tokens")
    if parsed.min_tokens < 0:
        raise bad_request(
            f"min_tokens must be greater than or equal to 0, got {parsed.min_tokens}."
        )
    if parsed.min_tokens > max_tokens:
        raise bad_request(
            f"min_tokens must be less than or equal to max_tokens={max_tokens}, "
            f"got {parsed.min_tokens}."
        )
    if parsed.n is not None and parsed.n < 1:
        raise bad_request(f"n must be at least 1, got {parsed.n}.")


__all__ = ["ApiError", "ChatRequest", "CommonRequest", "CompletionRequest", "admit", "parse"]
