"""Requests that the router itself turns away: an OpenAI error, and no engine is asked."""

from __future__ import annotations

import asyncio
import json

import pytest

from kvtide.health import NodeRole
from tests.router.harness import Harness, until

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]

BAD_BODIES = [
    (CHAT, b"", "body", "invalid_json"),
    (CHAT, b'{"model": "m", ', "body", "invalid_json"),
    (CHAT, b"\xff\xfe", "body", "invalid_json"),
    (CHAT, b'{"model": "m", "temperature": NaN}', "body", "invalid_json"),
    (CHAT, b'{"model": "\\ud800"}', "body", "invalid_json"),
    (CHAT, b"[" * 2000, "body", "invalid_json"),
    (CHAT, b"[]", "body", "invalid_value"),
    (CHAT, b'"hello"', "body", "invalid_value"),
    (CHAT, b"null", "body", "invalid_value"),
    (CHAT, {"messages": MESSAGES}, "model", "invalid_value"),
    (CHAT, {"model": None, "messages": MESSAGES}, "model", "invalid_value"),
    (CHAT, {"model": ["m"], "messages": MESSAGES}, "model", "invalid_value"),
    (CHAT, {"model": "m"}, "messages", "invalid_value"),
    (CHAT, {"model": "m", "messages": {"role": "user"}}, "messages", "invalid_value"),
    (CHAT, {"model": "m", "messages": []}, "messages", "invalid_value"),
    (COMPLETIONS, {"model": "m"}, "prompt", "invalid_value"),
    (COMPLETIONS, {"model": "m", "prompt": 7}, "prompt", "invalid_value"),
    (CHAT, {"model": "m", "messages": MESSAGES, "session_id": ""}, "session_id", "invalid_value"),
    (CHAT, {"model": "m", "messages": MESSAGES, "session_id": 5}, "session_id", "invalid_value"),
    (
        CHAT,
        {"model": "m", "messages": MESSAGES, "session_id": "x" * 257},
        "session_id",
        "invalid_value",
    ),
]


@pytest.mark.parametrize(("path", "body", "param", "code"), BAD_BODIES)
async def test_a_bad_body_is_a_400_that_names_the_field(harness: Harness, path, body, param, code):
    """Broken JSON and wrong types never reach an engine or the registry."""
    answered = await harness.post(path, body)
    assert answered.status == 400
    assert answered.headers["Content-Type"].startswith("application/json")
    error = answered.error
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)
    assert error["message"]
    assert harness.p1.requests == harness.d1.requests == []
    assert harness.registry.claims_begun == 0


@pytest.mark.parametrize("value", ["", "x" * 257])
async def test_a_bad_session_header_is_a_400(harness: Harness, value):
    """An empty or too long X-Session-ID is named."""
    answered = await harness.chat(value)
    assert answered.status == 400
    assert answered.error["param"] == "X-Session-ID"


async def test_a_session_header_that_is_no_utf8_is_a_400(harness: Harness):
    """Raw bytes in the header don't get as far as the registry."""
    reader, writer = await asyncio.open_connection("127.0.0.1", harness.http.port)
    raw = json.dumps({"model": "m", "messages": MESSAGES}).encode()
    writer.write(
        f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n".encode()
        + b"X-Session-ID: \xff\xfe\r\nConnection: close\r\n\r\n"
        + raw
    )
    answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"X-Session-ID" in answer
    writer.close()


@pytest.mark.parametrize("value", ["", "no", "0"])
async def test_a_bad_readback_header_is_a_400(harness: Harness, value):
    """A switch that is neither on nor off is an error, not a guess."""
    answered = await harness.chat(headers={"X-Kvtide-Readback": value})
    if value == "":
        # An empty header is the same as none.
        assert answered.status == 200
    else:
        assert answered.status == 400
        assert answered.error["param"] == "X-Kvtide-Readback"


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_that_is_too_large_is_a_413(declared):
    """Over the limit, with its length declared or chunked: 413, and the next request works."""
    harness = Harness(max_body_bytes=10_000)
    await harness.start()
    try:
        raw = json.dumps({"model": "m", "messages": MESSAGES, "user": "x" * 20_000}).encode()

        async def chunks():
            yield raw

        answered = await harness.request("POST", CHAT, data=raw if declared else chunks())
        assert answered.status == 413
        assert answered.error["code"] == "body_too_large"
        assert "10000" in answered.error["message"]
        assert harness.p1.requests == []
        assert (await harness.chat()).status == 200
    finally:
        await harness.stop()


async def test_an_unknown_model_is_a_404(harness: Harness):
    """No node serves it: 404 with OpenAI's own code."""
    answered = await harness.chat(model="gpt-9")
    assert answered.status == 404
    assert answered.error["code"] == "model_not_found"
    assert "gpt-9" in answered.error["message"]
    assert harness.p1.requests == []


async def test_a_model_without_a_ready_prefill_is_a_503(harness: Harness):
    """Nothing is quietly prefilled on decode: the client is told to come back."""
    harness.links["p1"].close()
    await until(lambda: not harness.router.ready, "the suspicion")
    answered = await harness.chat()
    assert answered.status == 503
    assert answered.error["code"] == "no_ready_engine"
    assert "prefill" in answered.error["message"]
    assert int(answered.headers["Retry-After"]) >= 1
    assert harness.d1.requests == []
    assert harness.registry.claims_begun == 0
    assert harness.last_record()["status"] == "rejected"


async def test_a_model_without_a_ready_decode_is_a_503(harness: Harness):
    """Prefill is not asked for what nobody could decode."""
    harness.links["d1"].close()
    await until(lambda: not harness.router.ready, "the suspicion")
    answered = await harness.chat()
    assert answered.status == 503
    assert "decode" in answered.error["message"]
    assert harness.p1.requests == []


async def test_an_empty_fleet_is_a_503_and_no_404():
    """Before the first engine shows up no model can be said not to exist."""
    harness = Harness()
    await harness.start()
    try:
        harness.router._fleet.nodes = ()
        assert (await harness.chat(model="gpt-9")).status == 503
    finally:
        await harness.stop()


async def test_models_are_not_mixed_up(harness: Harness):
    """Each model goes to the nodes that serve it."""
    await harness.add("p2", NodeRole.PREFILL, models=("other",))
    await harness.add("d2", NodeRole.DECODE, models=("other",))
    report = (await harness.chat(model="other")).report
    assert (report["prefill_node_id"], report["decode_node_id"]) == ("p2", "d2")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", CHAT, 405),
        ("DELETE", "/v1/conversations/", 404),
    ],
)
async def test_wrong_paths_and_methods_get_openai_errors(harness: Harness, method, path, status):
    """Also what has no handler is answered in OpenAI's form."""
    answered = await harness.request(method, path)
    assert answered.status == status
    assert answered.error["type"] == "invalid_request_error"
    if status == 405:
        assert answered.headers["Allow"] == "POST"


async def test_closing_a_conversation_with_a_bad_id_is_a_400(harness: Harness):
    """The same rules as for turns."""
    answered = await harness.request("DELETE", "/v1/conversations/" + "x" * 257)
    assert answered.status == 400
    assert answered.error["param"] == "session_id"
