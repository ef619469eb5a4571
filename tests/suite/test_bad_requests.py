"""Bad input: the right status, an OpenAI error body, and nothing pinned afterwards."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.suite.conversation import PATHS, Endpoint, salted_text
from tests.suite.fleets import nothing_is_kept

if TYPE_CHECKING:
    from collections.abc import Callable

    import aiohttp

    from tests.suite.conversation import Conversation
    from tests.suite.fake_fleet import FakeFleet
    from tests.suite.fleets import Fleet

    Converse = Callable[..., Conversation]

_HELLO = [{"role": "user", "content": "hello"}]
_SESSION = {"X-Session-ID": "bad-requests"}


def _json(**body: Any) -> bytes:
    return json.dumps(body).encode()


@pytest.mark.parametrize(
    ("endpoint", "body", "status", "code"),
    [
        pytest.param("chat", b'{"model": ', 400, "invalid_json", id="broken-json"),
        pytest.param("chat", b"[1, 2]", 400, None, id="not-an-object"),
        pytest.param("chat", b"", 400, "invalid_json", id="empty-body"),
        pytest.param(
            "chat", _json(model="nobody", messages=_HELLO), 404, "model_not_found", id="model"
        ),
        pytest.param("chat", _json(messages=_HELLO), 400, None, id="no-model"),
        pytest.param("chat", _json(model=7, messages=_HELLO), 400, None, id="model-is-a-number"),
        pytest.param("chat", _json(model="MODEL"), 400, None, id="no-messages"),
        pytest.param("chat", _json(model="MODEL", messages="hi"), 400, None, id="messages-string"),
        pytest.param("chat", _json(model="MODEL", messages=[7]), 400, None, id="message-number"),
        pytest.param("completions", _json(model="MODEL"), 400, None, id="no-prompt"),
        pytest.param("completions", _json(model="MODEL", prompt={}), 400, None, id="prompt-object"),
        pytest.param(
            "completions", _json(model="MODEL", prompt="x", max_tokens="lots"), 400, None, id="type"
        ),
        pytest.param(
            "completions", _json(model="MODEL", prompt="x", max_tokens=0), 400, None, id="no-tokens"
        ),
        pytest.param(
            "completions", _json(model="MODEL", prompt="x", temperature=-1), 400, None, id="range"
        ),
        pytest.param(
            "completions", _json(model="MODEL", prompt="x" * 9_000), 400, None, id="too-long"
        ),
        pytest.param(
            "completions",
            _json(model="MODEL", prompt="x" * 200, max_tokens=4, min_tokens=9),
            400,
            None,
            id="refused-by-decode-only",
        ),
        pytest.param("chat", b" " * (17 * 1024 * 1024), 413, None, id="oversized"),
    ],
)
async def test_a_bad_request_is_refused_and_leaves_nothing(
    http: aiohttp.ClientSession,
    fleet: Fleet,
    endpoint: Endpoint,
    body: bytes,
    status: int,
    code: str | None,
) -> None:
    """Each gets its status in OpenAI's form, and both engines' pools are as they were."""
    body = body.replace(b'"MODEL"', json.dumps(fleet.model).encode())
    headers = {"Content-Type": "application/json", **_SESSION}
    url = fleet.base_url + PATHS[endpoint]
    async with http.post(url, data=body, headers=headers) as response:
        assert response.status == status
        assert response.content_type == "application/json"
        error = (await response.json())["error"]
    assert error["message"]
    assert {"type", "param", "code"} <= error.keys()
    if code is not None:
        assert error["code"] == code
    await nothing_is_kept(fleet)


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        pytest.param({"X-Session-ID": "s" * 257}, {}, id="header-too-long"),
        pytest.param({}, {"session_id": ""}, id="empty"),
        pytest.param({}, {"session_id": 7}, id="a-number"),
        pytest.param({"X-Kvtide-Readback": "maybe"}, {}, id="readback-maybe"),
    ],
)
async def test_a_bad_session_id_or_switch_is_named(
    http: aiohttp.ClientSession, fleet: Fleet, headers: dict[str, str], body: dict[str, Any]
) -> None:
    """Kvtide's own fields are checked like OpenAI's, and the error says which it was."""
    sent = {"model": fleet.model, "prompt": "hello", "max_tokens": 2} | body
    url = fleet.base_url + PATHS["completions"]
    async with http.post(url, json=sent, headers=headers) as response:
        assert response.status == 400
        error = (await response.json())["error"]
    named = next(iter(headers or body))
    assert error["param"] == named


async def test_an_unknown_route_and_a_wrong_method_are_openai_errors(
    http: aiohttp.ClientSession, fleet: Fleet
) -> None:
    """404 and 405 come in the same form as everything else."""
    for method, path, status in (("GET", "/v1/nowhere", 404), ("GET", PATHS["chat"], 405)):
        async with http.request(method, fleet.base_url + path) as response:
            assert response.status == status
            assert (await response.json())["error"]["message"]


async def test_a_clients_own_transfer_parameters_go_nowhere(
    converse: Converse, fleet: Fleet, salt: str
) -> None:
    """Handles that a client makes up are dropped on the way in: the answer is the usual one."""
    forged = {
        "do_remote_decode": True,
        "do_remote_prefill": True,
        "remote_engine_id": "someone",
        "remote_request_id": "else",
        "remote_host": "192.0.2.1",
        "remote_port": 1,
        "remote_block_ids": [[1, 2, 3]],
        "remote_num_tokens": 384,
    }
    conversation = converse()
    conversation.say(salted_text(400, salt))
    expected = await conversation.expected()
    answer = await conversation.send(kv_transfer_params=forged)
    assert answer.text == expected.text
    assert answer.report["reuse"] == "no_lease"


@pytest.mark.fake_only
async def test_no_engine_ever_sees_what_the_client_made_up(
    converse: Converse, fleet: FakeFleet, salt: str
) -> None:
    """Neither leg's request contains the host that a client asked the engines to dial."""
    conversation = converse(stream=True)
    conversation.say(salted_text(100, salt))
    await conversation.send(kv_transfer_params={"remote_host": "192.0.2.1"})
    for engine in (fleet.prefill, fleet.decode):
        assert "192.0.2.1" not in str(engine.server.seen[-1].kv_transfer_params)


@pytest.mark.parametrize("stream", [True, False])
async def test_no_transfer_parameters_come_out(converse: Converse, salt: str, stream: bool) -> None:
    """What engines say of hosts, ports and blocks is for kvtide only."""
    conversation = converse(stream=stream)
    answer = await conversation.turn(salted_text(200, salt))
    text = json.dumps([answer.body, *answer.chunks])
    assert "remote_host" not in text
    assert "remote_block_ids" not in text
