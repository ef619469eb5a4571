from __future__ import annotations

import pytest

from kvtide.registry import ConversationKey
from kvtide.router.errors import InvalidField
from kvtide.router.identity import conversation_of, session_key, tenant_of


@pytest.mark.parametrize(
    "header", [None, "", "Basic dTpw", "Bearer", "Bearer   ", "bearer\t", "token"]
)
def test_without_a_bearer_token_the_tenant_is_default(header):
    """Only a bearer token makes a tenant of its own."""
    assert tenant_of(header) == "default"


def test_the_tenant_of_a_token_is_stable_and_does_not_show_it():
    """The same token is the same tenant, whatever the case of the scheme; the token is hidden."""
    tenant = tenant_of("Bearer sk-secret")
    assert tenant == tenant_of("bearer  sk-secret ")
    assert tenant.startswith("key-")
    assert len(tenant) == 4 + 16
    assert "secret" not in tenant


def test_different_tokens_are_different_tenants():
    """Two tenants with the same session id have different conversations."""
    keys = {conversation_of(tenant_of(f"Bearer {token}"), "same", {}) for token in ("a", "b", "a")}
    assert len(keys) == 2


def test_a_token_that_is_no_utf8_still_makes_a_tenant():
    """Bytes of a header that aiohttp could not decode do not break the turn."""
    assert tenant_of("Bearer \udcff").startswith("key-")


@pytest.mark.parametrize(
    ("header", "body", "expected"),
    [
        (None, {}, None),
        (None, {"session_id": None}, None),
        (None, {"session_id": "b"}, "b"),
        ("h", {}, "h"),
        ("h", {"session_id": "b"}, "h"),
        ("h" * 256, {}, "h" * 256),
        ("ключ", {}, "ключ"),
    ],
)
def test_the_header_comes_before_the_body(header, body, expected):
    """X-Session-ID wins over session_id, and without both there is no conversation."""
    key = conversation_of("t", header, body)
    assert key == (None if expected is None else ConversationKey("t", expected))


@pytest.mark.parametrize("bad", ["", "x" * 257, 7, 1.5, True, [], {}, ["s"]])
def test_a_bad_session_id_in_the_body_is_an_error_that_names_it(bad):
    """An id that is empty, too long or no string is refused, also when the header is fine."""
    for header in (None, "fine"):
        with pytest.raises(InvalidField) as caught:
            conversation_of("t", header, {"session_id": bad})
        assert caught.value.param == "session_id"


@pytest.mark.parametrize("bad", ["", "x" * 257, "\udcff"])
def test_a_bad_session_header_is_an_error_that_names_it(bad):
    """An empty, too long or undecodable header is refused."""
    with pytest.raises(InvalidField) as caught:
        conversation_of("t", bad, {})
    assert caught.value.param == "X-Session-ID"


def test_an_explicit_key_is_checked_alike():
    """Closing a conversation takes the same ids as a turn."""
    assert session_key("t", "s", "session_id") == ConversationKey("t", "s")
    with pytest.raises(InvalidField):
        session_key("t", "", "session_id")
