"""What each engine is asked: the bodies of the prefill and the decode leg. Pure.

A turn is one client request and two engine requests. The prefill leg must see the very same
prompt and produce one token that nobody reads; everything that only shapes the answer would be
wasted there, or refused (`min_tokens` above 1, `stream_options` without `stream`). The decode
leg is the client's request. Neither ever carries what a client put into `kv_transfer_params`:
those keys make an engine dial out to hosts that the client names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtide.connector.handle import KVTIDE_KEY, params_from_handle
from kvtide.connector.readback import fingerprint_to_params
from kvtide.router.errors import InvalidField

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvtide.registry.ports import ClaimedLease, ConversationKey

__all__ = [
    "CHAT_PATH",
    "COMPLETIONS_PATH",
    "KV_PARAMS",
    "check_body",
    "client_body",
    "decode_body",
    "decode_params",
    "prefill_body",
    "prefill_params",
    "why_not_disaggregated",
]

CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"

KV_PARAMS = "kv_transfer_params"
_ENGINE_ONLY_KEYS = (KV_PARAMS, "ec_transfer_params")
_XARGS = "vllm_xargs"


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


def _are_counts(value: object) -> bool:
    return isinstance(value, list) and all(_is_count(item) for item in value)


def _are_texts(value: object) -> bool:
    items = value if isinstance(value, list) else [value]
    return all(isinstance(item, str) for item in items)


def _anything(_value: object) -> bool:
    return True


# What shapes the answer and not the prompt, with what a well-formed value looks like. `tools`,
# `tool_choice`, `chat_template*`, `reasoning_effort`, `truncate_prompt_tokens`, `cache_salt` and
# the like are not among them: they are part of the prompt, or of its identity.
_ANSWER_ONLY: dict[str, Callable[[object], bool]] = {
    "best_of": _anything,
    "echo": _anything,
    "logprob_token_ids": _are_counts,
    "logprobs": _anything,
    "min_tokens": _is_count,
    "n": _anything,
    "prompt_logprobs": _anything,
    "response_format": _is_object,
    "return_prompt_text": _is_flag,
    "return_token_ids": _is_flag,
    "return_tokens_as_token_ids": _is_flag,
    "stop": _are_texts,
    "stop_token_ids": _are_counts,
    "stream_interval": _is_count,
    "stream_options": _is_object,
    "structured_outputs": _is_object,
    "top_logprobs": _is_count,
    "use_beam_search": _anything,
}
_ANSWER_ONLY_PREFIX = "guided_"

# What the prefill leg has a value of its own for.
_REPLACED: dict[str, Callable[[object], bool]] = {
    "max_completion_tokens": _is_count,
    "max_tokens": _is_count,
    "stream": _is_flag,
}
_WELL_FORMED = {**_ANSWER_ONLY, **_REPLACED}


def check_body(path: str, body: Mapping[str, Any]) -> str:
    """Check the fields that the router itself relies on; the model's name.

    Everything else is the engine's to judge. Raises `InvalidField`.
    """
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise InvalidField("model", "model must be a non-empty string: the name of a model")
    if path == CHAT_PATH:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise InvalidField("messages", "messages must be a non-empty list of messages")
        if not all(isinstance(message, dict) for message in messages):
            raise InvalidField("messages", "every message must be an object")
    elif body.get("prompt_embeds") is None and not isinstance(body.get("prompt"), str | list):
        raise InvalidField("prompt", "prompt must be a string or a list")
    return model


def client_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """The client's request without what is not for engines, or not for clients to say."""
    cleaned = {
        key: value
        for key, value in body.items()
        if key != "session_id" and key not in _ENGINE_ONLY_KEYS
    }
    xargs = cleaned.get(_XARGS)
    if isinstance(xargs, dict) and not xargs.keys().isdisjoint(_ENGINE_ONLY_KEYS):
        # vLLM merges vllm_xargs into the very dictionary that kv_transfer_params ends up in.
        cleaned[_XARGS] = {
            key: value for key, value in xargs.items() if key not in _ENGINE_ONLY_KEYS
        }
    return cleaned


def why_not_disaggregated(path: str, body: Mapping[str, Any]) -> str:
    """Why a request must be served by one engine alone; "" when two legs can serve it.

    One handle is the KV of one prompt and the start of one answer; log-probabilities of the
    prompt exist only where the prompt is computed. And a value that looks wrong, where the
    prefill leg would not show it to its engine, is left to one engine as well: were it refused
    by decode only, prefill's blocks would stay pinned for nothing.
    """
    for key in ("n", "best_of"):
        # Engines take "2" and 2.0 for 2, so whatever is not plainly one is left to them.
        if body.get(key) not in (None, 1):
            return key
    for key in ("echo", "use_beam_search"):
        if body.get(key):
            return key
    if body.get("prompt_logprobs") is not None:
        return "prompt_logprobs"
    if path == COMPLETIONS_PATH and not _is_one_text_prompt(body):
        return "prompt"
    logprobs_fit = _is_flag if path == CHAT_PATH else _is_count
    checks = (*_WELL_FORMED.items(), ("logprobs", logprobs_fit))
    ill_formed = (key for key, fits in checks if body.get(key) is not None and not fits(body[key]))
    return next(ill_formed, "")


def _is_one_text_prompt(body: Mapping[str, Any]) -> bool:
    prompt = body.get("prompt")
    # A list of ints is one prompt; a list of strings or of lists is as many.
    several = isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
    return not several and body.get("prompt_embeds") is None


def prefill_body(body: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """The prefill leg: the same prompt, one token, not streamed. `body` is a `client_body`."""
    shaped = {
        key: value
        for key, value in body.items()
        if key not in _ANSWER_ONLY and not key.startswith(_ANSWER_ONLY_PREFIX)
    }
    shaped["stream"] = False
    shaped["max_tokens"] = 1
    if "max_completion_tokens" in shaped:
        shaped["max_completion_tokens"] = 1
    # The dummy token must end the request by length: a vLLM that pins only length-capped
    # requests would otherwise drop the KV whenever that token happens to be EOS.
    shaped["ignore_eos"] = True
    shaped[KV_PARAMS] = params
    return shaped


def decode_body(body: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """The decode leg: the client's request, with where to find the prompt's KV."""
    return {**body, KV_PARAMS: params} if params else dict(body)


def prefill_params(claimed: ClaimedLease | None) -> dict[str, Any]:
    """`kv_transfer_params` of the prefill leg; with a claim, what to read back and its proof."""
    if claimed is None:
        return {"do_remote_decode": True, "do_remote_prefill": False}
    return {
        **params_from_handle(claimed.handle),
        "do_remote_decode": True,
        "do_remote_prefill": False,
        KVTIDE_KEY: {"fingerprint": fingerprint_to_params(claimed.fingerprint)},
    }


def decode_params(
    prefilled: Mapping[str, Any],
    key: ConversationKey | None,
    generation: int | None,
    prompt_digest: str,
) -> dict[str, Any]:
    """`kv_transfer_params` of the decode leg.

    `prefilled` is what prefill answered. Only a turn with both a conversation and a generation
    is named to the engine: naming is what makes it pin the blocks and grant a lease.
    """
    own: dict[str, Any] = {}
    if key is not None and generation is not None:
        own = {
            "tenant": key.tenant,
            "conversation_id": key.conversation_id,
            "generation": generation,
        }
    if prompt_digest:
        own["prompt_digest"] = prompt_digest
    params = {name: value for name, value in prefilled.items() if name != KVTIDE_KEY}
    if own:
        params[KVTIDE_KEY] = own
    return params
