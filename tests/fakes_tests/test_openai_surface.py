"""The fake engine's HTTP surface: vLLM's answers, errors and statuses."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.engine import EngineConfig, FakeEngine

if TYPE_CHECKING:
    import aiohttp

    from tests.fakes_tests.conftest import StartEngine

_CHAT = "/v1/chat/completions"
_TEXT = "/v1/completions"
_HELLO = [{"role": "user", "content": "hello"}]


async def _post(http: aiohttp.ClientSession, engine: FakeEngine, path: str, body: Any) -> Any:
    async with http.post(engine.url + path, json=body) as response:
        return response.status, await response.json()


async def _events(
    http: aiohttp.ClientSession, engine: FakeEngine, path: str, body: dict[str, Any]
) -> list[Any]:
    async with http.post(engine.url + path, json=body | {"stream": True}) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        text = (await response.read()).decode()
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


@pytest.mark.parametrize(
    ("path", "body", "status", "kind", "param"),
    [
        (_CHAT, {"messages": _HELLO, "model": "other"}, 404, "NotFoundError", "model"),
        (_CHAT, {"model": "tiny"}, 400, "Bad Request", "body.messages"),
        (_CHAT, {"messages": "hello"}, 400, "Bad Request", "body.messages"),
        (_CHAT, {"messages": _HELLO, "max_tokens": "many"}, 400, "Bad Request", "body.max_tokens"),
        (_CHAT, {"messages": _HELLO, "model": 7}, 400, "Bad Request", "body.model"),
        (_TEXT, {"prompt": 7}, 400, "Bad Request", "body.prompt"),
        (_TEXT, {"prompt": "x", "min_tokens": 9, "max_tokens": 1}, 400, "BadRequestError", None),
        (_TEXT, {"prompt": "x", "max_tokens": 0}, 400, "BadRequestError", "max_tokens"),
        (_TEXT, {"prompt": "x", "temperature": -1}, 400, "BadRequestError", "temperature"),
        (_TEXT, {"prompt": "x" * 2049}, 400, "BadRequestError", "input_tokens"),
        (_TEXT, {"prompt": [999]}, 400, "BadRequestError", None),
        (
            _TEXT,
            {"prompt": "x", "stream_options": {"include_usage": True}},
            400,
            "Bad Request",
            "stream_options",
        ),
    ],
)
async def test_a_bad_request_is_refused_as_vllm_refuses_it(
    monolith: FakeEngine,
    http: aiohttp.ClientSession,
    path: str,
    body: dict[str, Any],
    status: int,
    kind: str,
    param: str | None,
) -> None:
    """Each kind of bad request gets vLLM's status and error body, and leaves nothing behind."""
    got, answer = await _post(http, monolith, path, body)
    error = answer["error"]
    assert (got, error["code"], error["type"], error["param"]) == (status, status, kind, param)
    assert error["message"]
    assert not monolith.core.requests


async def test_broken_json_and_a_foreign_content_type_are_bad_requests(
    monolith: FakeEngine, http: aiohttp.ClientSession
) -> None:
    """What is not JSON at all gets 400 in the same form."""
    for kind, data in (("application/json", b"{"), ("text/plain", b"{}")):
        headers = {"Content-Type": kind}
        async with http.post(monolith.url + _CHAT, data=data, headers=headers) as response:
            assert response.status == 400
            assert (await response.json())["error"]["type"] == "Bad Request"


async def test_an_unknown_route_answers_in_the_same_form(
    monolith: FakeEngine, http: aiohttp.ClientSession
) -> None:
    """Even a missing route's 404 has an error body."""
    async with http.get(f"{monolith.url}/nowhere") as response:
        assert response.status == 404
        assert (await response.json())["error"]["message"] == "Not Found"


async def test_a_prompt_may_come_as_token_ids(
    monolith: FakeEngine, http: aiohttp.ClientSession
) -> None:
    """Token ids and the text they spell are the same prompt."""
    body = {"max_tokens": 8}
    as_text = await _post(http, monolith, _TEXT, body | {"prompt": "hello"})
    as_ids = await _post(http, monolith, _TEXT, body | {"prompt": list(b"hello")})
    assert as_text[1]["choices"][0]["text"] == as_ids[1]["choices"][0]["text"]
    assert as_text[1]["usage"]["prompt_tokens"] == 5
    assert as_text[1]["usage"]["completion_tokens"] == 8
    assert as_text[1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("path", [_CHAT, _TEXT])
async def test_a_stream_says_what_the_whole_answer_says(
    monolith: FakeEngine, http: aiohttp.ClientSession, path: str
) -> None:
    """The deltas add up to the answer that is not streamed; usage comes last, when asked for."""
    asked: dict[str, Any] = {"max_tokens": 12}
    asked |= {"messages": _HELLO} if path == _CHAT else {"prompt": "hello"}
    _status, whole = await _post(http, monolith, path, asked)
    options = {"stream_options": {"include_usage": True}}
    events = await _events(http, monolith, path, asked | options)
    *chunks, usage = events
    if path == _CHAT:
        assert chunks.pop(0)["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)
        assert text == whole["choices"][0]["message"]["content"]
    else:
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        assert text == whole["choices"][0]["text"]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * 11 + ["length"]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 12


async def test_logprobs_have_the_form_of_each_endpoint(
    monolith: FakeEngine, http: aiohttp.ClientSession
) -> None:
    """Chat reports content entries, completions parallel lists; both the same numbers."""
    text = "<|user|>hello<|end|><|assistant|>"
    wanted = {"max_tokens": 4, "logprobs": 2, "prompt": text}
    _s, plain = await _post(http, monolith, _TEXT, wanted)
    wanted = {"max_tokens": 4, "logprobs": True, "top_logprobs": 2, "messages": _HELLO}
    _s, chat = await _post(http, monolith, _CHAT, wanted)
    lists = plain["choices"][0]["logprobs"]
    entries = chat["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in entries] == lists["token_logprobs"]
    assert [entry["token"] for entry in entries] == lists["tokens"]
    assert [len(entry["top_logprobs"]) for entry in entries] == [2] * 4
    assert lists["text_offset"] == [0, 1, 2, 3]


async def test_a_stop_text_ends_the_answer_before_it(
    monolith: FakeEngine, http: aiohttp.ClientSession
) -> None:
    """The text is cut at the stop text, and a stream never shows a part of it."""
    _s, whole = await _post(http, monolith, _TEXT, {"prompt": "hello", "max_tokens": 12})
    text = whole["choices"][0]["text"]
    asked = {"prompt": "hello", "max_tokens": 12, "stop": text[5:8]}
    _s, cut = await _post(http, monolith, _TEXT, asked)
    choice = cut["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (text[:5], "stop")
    assert choice["stop_reason"] == text[5:8]
    events = await _events(http, monolith, _TEXT, asked)
    assert "".join(event["choices"][0]["text"] for event in events) == text[:5]


async def test_the_end_token_ends_the_answer_when_its_bias_says_so(
    monolith: FakeEngine, http: aiohttp.ClientSession
) -> None:
    """logit_bias on the end token stops at once, but not before min_tokens."""
    asked = {"prompt": "hello", "max_tokens": 12, "logit_bias": {"260": 100}, "min_tokens": 3}
    _s, answer = await _post(http, monolith, _TEXT, asked)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 4


async def test_several_choices_and_prompts_come_in_order(
    monolith: FakeEngine, http: aiohttp.ClientSession
) -> None:
    """The n choices of each prompt, numbered on, greedy and therefore equal within a prompt."""
    asked = {"prompt": ["one", "two"], "n": 2, "max_tokens": 4}
    _s, answer = await _post(http, monolith, _TEXT, asked)
    choices = answer["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert choices[0]["text"] == choices[1]["text"] != choices[2]["text"]
    assert answer["usage"]["prompt_tokens"] == 6
    events = await _events(http, monolith, _TEXT, asked)
    streamed = dict.fromkeys(range(4), "")
    for event in events:
        streamed[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert list(streamed.values()) == [choice["text"] for choice in choices]


async def test_models_health_and_metrics_answer(
    monolith: FakeEngine, http: aiohttp.ClientSession
) -> None:
    """The routes that fleets look at."""
    async with http.get(f"{monolith.url}/v1/models") as response:
        (card,) = (await response.json())["data"]
        assert (card["id"], card["max_model_len"]) == ("tiny", 2048)
    async with http.get(f"{monolith.url}/health") as response:
        assert response.status == 200
    async with http.get(f"{monolith.url}/metrics") as response:
        text = await response.text()
    for name in (
        "vllm:kv_cache_usage_perc",
        "vllm:num_requests_running",
        "vllm:nixl_num_notifications_after_expiry_total",
        "vllm:nixl_bytes_transferred_sum",
    ):
        assert f'{name}{{engine="0",model_name="tiny"}}' in text


async def test_the_prefix_cache_shows_in_usage(
    monolith: FakeEngine, http: aiohttp.ClientSession
) -> None:
    """A repeated prompt is cached in whole blocks, less at least its last token."""
    for cached in (0, 16):
        _s, answer = await _post(http, monolith, _TEXT, {"prompt": "x" * 32, "max_tokens": 2})
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": cached}


async def test_a_context_that_fills_up_ends_the_answer(
    start_engine: StartEngine, http: aiohttp.ClientSession
) -> None:
    """A longer wish than there is room for is cut; a prompt that leaves no room is refused."""
    engine = await start_engine("monolith", "none", max_model_len_tokens=32)
    _s, answer = await _post(http, engine, _TEXT, {"prompt": "x" * 30, "max_tokens": 9})
    assert answer["usage"]["completion_tokens"] == 2
    assert answer["choices"][0]["finish_reason"] == "length"
    status, _answer = await _post(http, engine, _TEXT, {"prompt": "x" * 32, "max_tokens": 9})
    assert status == 400


async def test_requests_that_do_not_fit_wait_and_are_preempted_yet_all_answered(
    start_engine: StartEngine, http: aiohttp.ClientSession
) -> None:
    """A pool too small for all requests at once serves them all, with the right answers."""
    big = await start_engine("monolith", "none")
    small = await start_engine("monolith", "none", block_count=8, prefix_caching=False)
    asked = [{"prompt": letter * 40, "max_tokens": 40} for letter in "abc"]
    expected = [(await _post(http, big, _TEXT, body))[1]["choices"][0]["text"] for body in asked]
    prompts = [body["prompt"] for body in asked]
    _s, answer = await _post(http, small, _TEXT, {"prompt": prompts, "max_tokens": 40})
    assert [choice["text"] for choice in answer["choices"]] == expected
    assert small.metrics.value("vllm:num_preemptions_total") > 0
    assert small.pool_state().free_blocks == small.pool_state().total_blocks


async def test_faults_of_the_server_strike_as_often_as_told(
    monolith: FakeEngine, http: aiohttp.ClientSession
) -> None:
    """One 500, then one 400, then service as usual."""
    monolith.faults.fail_next_requests = 1
    monolith.faults.reject_next_requests = 1
    body = {"prompt": "x", "max_tokens": 1}
    statuses = [(await _post(http, monolith, _TEXT, body))[0] for _ in range(3)]
    assert statuses == [500, 400, 200]


def test_the_compatibility_hash_is_of_what_must_agree() -> None:
    """Engines of one model and version are compatible whatever their role; others are not."""
    one = EngineConfig(node_id="a", role="prefill")
    assert one.compatibility_hash == EngineConfig(node_id="b", role="decode").compatibility_hash
    newer = EngineConfig(node_id="a", role="prefill", vllm_version="0.33.0")
    assert one.compatibility_hash != newer.compatibility_hash
