from __future__ import annotations

import base64

import pytest

from kvtide.connector.fingerprint import fingerprint_of
from kvtide.connector.handle import KvHandle
from kvtide.registry import ClaimedLease, ConversationKey
from kvtide.router.errors import InvalidField
from kvtide.router.shaping import (
    CHAT_PATH,
    COMPLETIONS_PATH,
    check_body,
    client_body,
    decode_body,
    decode_params,
    prefill_body,
    prefill_params,
    why_not_disaggregated,
)

MESSAGES = [{"role": "user", "content": "Hi"}]
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
PARAMS = {"do_remote_decode": True}

# Every parameter of OpenAI's chat and completions endpoints and of vLLM's extensions of them,
# with a value that is not its default, and what the prefill leg shall have of it: KEPT as it
# is, DROPPED, or another value.
KEPT, DROPPED = object(), object()
PARAMETERS = [
    ("add_generation_prompt", False, KEPT),
    ("add_special_tokens", True, KEPT),
    ("allowed_token_ids", [1], KEPT),
    ("audio", {"voice": "x"}, KEPT),
    ("bad_words", ["x"], KEPT),
    ("best_of", 1, DROPPED),
    ("cache_salt", "salt", KEPT),
    ("chat_template", "{{ x }}", KEPT),
    ("chat_template_kwargs", {"enable_thinking": False}, KEPT),
    ("continue_final_message", True, KEPT),
    ("documents", [{"title": "t", "text": "x"}], KEPT),
    ("echo", True, DROPPED),
    ("frequency_penalty", 1.0, KEPT),
    ("function_call", "auto", KEPT),
    ("functions", [FUNCTION], KEPT),
    ("guided_choice", ["a", "b"], DROPPED),
    ("guided_decoding_backend", "xgrammar", DROPPED),
    ("guided_grammar", "root ::= x", DROPPED),
    ("guided_json", {"type": "object"}, DROPPED),
    ("guided_regex", "a+", DROPPED),
    ("guided_whitespace_pattern", " ", DROPPED),
    ("ignore_eos", False, True),
    ("include_reasoning", False, KEPT),
    ("include_stop_str_in_output", True, KEPT),
    ("length_penalty", 0.5, KEPT),
    ("logit_bias", {"1": 2}, KEPT),
    ("logprob_token_ids", [1], DROPPED),
    ("logprobs", True, DROPPED),
    ("max_completion_tokens", 500, 1),
    ("max_tokens", 500, 1),
    ("media_io_kwargs", {"video": {}}, KEPT),
    ("messages", MESSAGES, KEPT),
    ("metadata", {"a": "b"}, KEPT),
    ("min_p", 0.1, KEPT),
    ("min_tokens", 5, DROPPED),
    ("mm_processor_kwargs", {"a": 1}, KEPT),
    ("modalities", ["text"], KEPT),
    ("model", "m", KEPT),
    ("n", 1, DROPPED),
    ("parallel_tool_calls", False, KEPT),
    ("prediction", {"type": "content"}, KEPT),
    ("presence_penalty", 1.0, KEPT),
    ("priority", 1, KEPT),
    ("prompt", "Once", KEPT),
    ("prompt_cache_key", "k", KEPT),
    ("prompt_logprobs", 0, DROPPED),
    ("reasoning_effort", "low", KEPT),
    ("repetition_detection", {"a": 1}, KEPT),
    ("repetition_penalty", 1.1, KEPT),
    ("request_id", "r", KEPT),
    ("response_format", {"type": "json_object"}, DROPPED),
    ("return_prompt_text", True, DROPPED),
    ("return_token_ids", True, DROPPED),
    ("return_tokens_as_token_ids", True, DROPPED),
    ("safety_identifier", "s", KEPT),
    ("seed", 7, KEPT),
    ("service_tier", "auto", KEPT),
    ("skip_special_tokens", False, KEPT),
    ("spaces_between_special_tokens", False, KEPT),
    ("stop", ["x"], DROPPED),
    ("stop_token_ids", [1], DROPPED),
    ("store", False, KEPT),
    ("stream", True, False),
    ("stream_interval", 4, DROPPED),
    ("stream_options", {"include_usage": True}, DROPPED),
    ("structured_outputs", {"json": {}}, DROPPED),
    ("suffix", "end", KEPT),
    ("temperature", 0.0, KEPT),
    ("thinking_token_budget", 9, KEPT),
    ("tool_choice", "auto", KEPT),
    ("tools", [{"type": "function", "function": FUNCTION}], KEPT),
    ("top_k", 5, KEPT),
    ("top_logprobs", 3, DROPPED),
    ("top_p", 0.9, KEPT),
    ("truncate_prompt_tokens", 100, KEPT),
    ("truncation_side", "left", KEPT),
    ("use_beam_search", False, DROPPED),
    ("user", "u", KEPT),
    ("verbosity", "low", KEPT),
    ("vllm_xargs", {"a": 1}, KEPT),
    ("watermarking", True, KEPT),
]


def _claimed() -> ClaimedLease:
    handle = KvHandle(
        engine_id="d-epoch",
        request_id="r-1",
        side_channel_host="10.0.0.2",
        side_channel_port=5601,
        block_groups=((4, 5, 9),),
        token_count=40,
        block_size_tokens=16,
        engine_clock_expiry_s=123.5,
        extension_json={"transfer_mode": '"pull"', "do_remote_prefill": "true"},
    )
    return ClaimedLease(
        claim_id="c",
        node_id="d1",
        handle=handle,
        fingerprint=fingerprint_of(range(40), 16),
        generation=3,
        claim_time_left_s=60.0,
        ttl_s=480.0,
    )


@pytest.mark.parametrize(("name", "value", "expected"), PARAMETERS, ids=[p[0] for p in PARAMETERS])
def test_the_prefill_leg_keeps_what_shapes_the_prompt_and_drops_the_rest(name, value, expected):
    """Each parameter is kept, dropped or replaced on the prefill leg as the table says."""
    shaped = prefill_body(client_body({name: value}), PARAMS)
    if expected is DROPPED:
        assert name not in shaped
    else:
        assert shaped[name] == (value if expected is KEPT else expected)


@pytest.mark.parametrize(("name", "value", "expected"), PARAMETERS, ids=[p[0] for p in PARAMETERS])
def test_the_decode_leg_keeps_every_parameter(name, value, expected):
    """What the client asked for reaches the decode engine as it is."""
    assert decode_body(client_body({name: value}), {})[name] == value


def test_the_prefill_leg_of_a_bare_request_produces_one_token():
    """Whatever the client leaves out, the prefill leg is one unstreamed token, ended by length."""
    assert prefill_body({"model": "m"}, PARAMS) == {
        "model": "m",
        "stream": False,
        "max_tokens": 1,
        "ignore_eos": True,
        "kv_transfer_params": PARAMS,
    }


def test_shaping_leaves_the_clients_body_alone():
    """Both legs are made from the same body, so neither may change it."""
    body = {"model": "m", "stream": True, "stop": ["x"], "max_tokens": 9}
    before = dict(body)
    prefill_body(body, PARAMS)
    decode_body(body, PARAMS)
    assert body == before


def test_clients_cannot_say_where_engines_connect_to():
    """Transfer parameters of a client are dropped, by whatever door they come in."""
    evil = {"remote_host": "169.254.169.254", "remote_port": 80}
    cleaned = client_body(
        {
            "model": "m",
            "session_id": "s",
            "kv_transfer_params": evil,
            "ec_transfer_params": evil,
            "vllm_xargs": {"kv_transfer_params": "x", "ec_transfer_params": 1, "mine": 2},
        }
    )
    assert cleaned == {"model": "m", "vllm_xargs": {"mine": 2}}


@pytest.mark.parametrize(
    ("path", "body", "why"),
    [
        (CHAT_PATH, {}, ""),
        (CHAT_PATH, {"n": 1}, ""),
        (CHAT_PATH, {"n": None}, ""),
        (CHAT_PATH, {"n": 2}, "n"),
        (CHAT_PATH, {"n": "2"}, "n"),
        (CHAT_PATH, {"echo": False}, ""),
        (CHAT_PATH, {"echo": True}, "echo"),
        (CHAT_PATH, {"prompt_logprobs": 0}, "prompt_logprobs"),
        (CHAT_PATH, {"use_beam_search": True}, "use_beam_search"),
        (COMPLETIONS_PATH, {"prompt": "x"}, ""),
        (COMPLETIONS_PATH, {"prompt": ["x"]}, ""),
        (COMPLETIONS_PATH, {"prompt": []}, ""),
        (COMPLETIONS_PATH, {"prompt": [1, 2, 3]}, ""),
        (COMPLETIONS_PATH, {"prompt": [[1, 2, 3]]}, ""),
        (COMPLETIONS_PATH, {"prompt": ["x", "y"]}, "prompt"),
        (COMPLETIONS_PATH, {"prompt": [[1], [2]]}, "prompt"),
        (COMPLETIONS_PATH, {"prompt": "x", "best_of": 1}, ""),
        (COMPLETIONS_PATH, {"prompt": "x", "best_of": 3}, "best_of"),
        (COMPLETIONS_PATH, {"prompt_embeds": "AAAA"}, "prompt"),
    ],
)
def test_what_two_legs_cannot_serve_is_recognised(path, body, why):
    """Several answers, several prompts and log-probabilities of the prompt need one engine."""
    assert why_not_disaggregated(path, body) == why


@pytest.mark.parametrize("path", [CHAT_PATH, COMPLETIONS_PATH])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", "lots"),
        ("max_tokens", 5.0),
        ("max_completion_tokens", [5]),
        ("min_tokens", True),
        ("stream", "yes"),
        ("stream_options", "usage"),
        ("stop", 5),
        ("stop", ["x", 5]),
        ("stop_token_ids", ["x"]),
        ("response_format", "json"),
        ("logprobs", "yes"),
        ("top_logprobs", "3"),
    ],
)
def test_what_prefill_would_not_see_must_look_right_for_two_legs(path, name, value):
    """A value that only decode would refuse must not cost prefill a prompt and its blocks."""
    assert why_not_disaggregated(path, {"prompt": "x", name: value}) == name
    assert why_not_disaggregated(path, {"prompt": "x", name: None}) == ""


def test_every_well_formed_parameter_goes_over_two_legs():
    """Nothing of the table above is taken for wrong, but what one engine alone must serve."""
    alone = {"echo", "prompt_logprobs"}
    for name, value, _ in PARAMETERS:
        assert why_not_disaggregated(CHAT_PATH, {name: value}) == (name if name in alone else "")
    assert why_not_disaggregated(COMPLETIONS_PATH, {"prompt": "x", "logprobs": 3}) == ""
    assert why_not_disaggregated(COMPLETIONS_PATH, {"prompt": "x", "logprobs": True}) == "logprobs"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT_PATH, {"messages": MESSAGES}, "model"),
        (CHAT_PATH, {"model": 3, "messages": MESSAGES}, "model"),
        (CHAT_PATH, {"model": "", "messages": MESSAGES}, "model"),
        (CHAT_PATH, {"model": "m"}, "messages"),
        (CHAT_PATH, {"model": "m", "messages": "Hi"}, "messages"),
        (CHAT_PATH, {"model": "m", "messages": []}, "messages"),
        (CHAT_PATH, {"model": "m", "messages": ["Hi"]}, "messages"),
        (COMPLETIONS_PATH, {"model": "m"}, "prompt"),
        (COMPLETIONS_PATH, {"model": "m", "prompt": None}, "prompt"),
        (COMPLETIONS_PATH, {"model": "m", "prompt": 5}, "prompt"),
        (COMPLETIONS_PATH, {"model": "m", "prompt": {"a": 1}}, "prompt"),
    ],
)
def test_a_field_that_is_missing_or_wrong_is_named(path, body, param):
    """The first wrong field is named in the error."""
    with pytest.raises(InvalidField) as caught:
        check_body(path, body)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT_PATH, {"model": "m", "messages": [{}]}),
        (COMPLETIONS_PATH, {"model": "m", "prompt": ""}),
        (COMPLETIONS_PATH, {"model": "m", "prompt": [1, 2]}),
        (COMPLETIONS_PATH, {"model": "m", "prompt_embeds": "AAAA"}),
    ],
)
def test_what_engines_can_judge_is_left_to_them(path, body):
    """The router checks only what it needs itself."""
    assert check_body(path, body) == "m"


def test_prefill_gets_the_handle_with_its_fingerprint():
    """A claimed lease travels as vLLM's keys plus the proof of whose tokens they are."""
    params = prefill_params(_claimed())
    assert params["do_remote_decode"] is True
    assert params["do_remote_prefill"] is False
    assert params["remote_block_ids"] == [[4, 5, 9]]
    assert params["remote_num_tokens"] == 40
    assert params["remote_blocks_expiry_time"] == 123.5
    assert params["transfer_mode"] == "pull"
    fingerprint = params["kvtide"]["fingerprint"]
    assert fingerprint["algorithm"] == "blake2b-16"
    assert fingerprint["block_size_tokens"] == 16
    assert fingerprint["token_count"] == 40
    assert base64.b64decode(fingerprint["digests"]) == fingerprint_of(range(40), 16).digests


def test_prefill_without_a_lease_gets_only_the_direction():
    """Nothing to read back: nothing but the request to keep the KV for decode."""
    assert prefill_params(None) == {"do_remote_decode": True, "do_remote_prefill": False}


def test_decode_gets_prefills_parameters_and_the_turns_name():
    """Prefill's keys pass through, its report does not, and the turn is named."""
    prefilled = {"remote_host": "h", "new_key": [1], "kvtide": {"reuse": "pulled"}}
    params = decode_params(prefilled, ConversationKey("t", "c"), 7, "d1")
    assert params == {
        "remote_host": "h",
        "new_key": [1],
        "kvtide": {
            "tenant": "t",
            "conversation_id": "c",
            "generation": 7,
            "prompt_digest": "d1",
        },
    }


@pytest.mark.parametrize(
    ("key", "generation"), [(None, None), (ConversationKey("t", "c"), None), (None, 3)]
)
def test_decode_is_not_told_to_pin_a_turn_without_a_generation(key, generation):
    """A turn that the registry does not know is not named, so decode pins nothing for it."""
    assert decode_params({}, key, generation, "d1") == {"kvtide": {"prompt_digest": "d1"}}
    assert decode_params({}, key, generation, "") == {}


def test_plain_serving_adds_nothing_to_the_request():
    """Without parameters the decode leg is the client's request, key for key."""
    assert decode_body({"model": "m", "n": 2}, {}) == {"model": "m", "n": 2}
