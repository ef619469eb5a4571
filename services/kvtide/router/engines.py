"""The HTTP legs of a turn: one client session, typed outcomes, nothing decided here.

A leg ends in an answer, in `Refused` (the engine said no, and says why), or in `LegFailed` (no
usable answer). Cancelling a call closes its connection, which is how an engine learns that
nobody waits any more.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp
import orjson

from kvtide.connector.handle import KVTIDE_KEY
from kvtide.connector.readback import READ_DONE, READ_NOT
from kvtide.registry.ports import ReadOutcome
from kvtide.router.shaping import KV_PARAMS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtide.health.ports import Node

__all__ = [
    "DecodeStream",
    "EngineClient",
    "LegFailed",
    "PrefillAnswer",
    "Refused",
    "StreamBrokenError",
]

_CONNECT_TIMEOUT_S = 5.0
# vLLM closes idle connections after 5 s (uvicorn). Ours must go first: a request on a
# connection that the engine is just closing fails, and a POST is not sent twice.
_KEEPALIVE_S = 3.0
_READ_BUFFER_BYTES = 256 * 1024
_HTTP_OK = 200
_HTTP_BAD_REQUEST = 400
_EVENT_STREAM = "text/event-stream"


@dataclass(frozen=True, slots=True)
class PrefillAnswer:
    """What prefill said of the prompt. Counts are 0 where the engine did not say."""

    params: dict[str, Any]
    """vLLM's own `kv_transfer_params`, for the decode leg; empty when the engine sent none."""
    prompt_tokens: int
    pulled_tokens: int
    cached_tokens: int
    recomputed_tokens: int
    reuse: str
    """"pulled" or why not, as the engine says; "" when it says nothing."""
    read_outcome: ReadOutcome
    prompt_digest: str


@dataclass(frozen=True, slots=True)
class Refused:
    """The engine answered with an error status."""

    status: int
    body: bytes
    content_type: str
    retry_after: str = ""


@dataclass(frozen=True, slots=True)
class LegFailed:
    """The engine gave no usable answer."""

    kind: str
    """"connect", "timeout", "broken" (connection lost) or "protocol" (an unreadable answer)."""
    detail: str
    """For logs: it may name hosts and ports."""

    @property
    def summary(self) -> str:
        """For clients."""
        return _SUMMARIES[self.kind]

    @property
    def reached_engine(self) -> bool:
        """False when it is certain that the engine never saw the request."""
        return self.kind != "connect"


_SUMMARIES = {
    "connect": "no connection could be made",
    "timeout": "it did not answer in time",
    "broken": "the connection to it broke off",
    "protocol": "its answer could not be understood",
}


class StreamBrokenError(Exception):
    """A decode answer broke off."""

    def __init__(self, failure: LegFailed) -> None:
        super().__init__(failure.detail)
        self.failure = failure


class DecodeStream:
    """A decode leg's answer, of which the status line and the headers have arrived."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.content_type = response.headers.get("Content-Type", "application/json")

    @property
    def is_event_stream(self) -> bool:
        """Whether the answer comes as server-sent events."""
        return self.content_type.lower().startswith(_EVENT_STREAM)

    async def read(self) -> bytes:
        """Whatever has arrived, as it arrived; b"" at the end. Raises `StreamBrokenError`."""
        try:
            return await self._response.content.readany()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise StreamBrokenError(_failed(error)) from error

    async def read_all(self) -> bytes:
        """The whole answer. Raises `StreamBrokenError`."""
        try:
            return await self._response.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise StreamBrokenError(_failed(error)) from error

    def close(self) -> None:
        """Let go. Unless the answer was read to its end, the connection is closed with it."""
        self._response.close()


class EngineClient:
    """The one HTTP client of a router. Make it inside a running loop; `close` it once."""

    def __init__(self, *, prefill_timeout_s: float, decode_idle_timeout_s: float) -> None:
        self._prefill_timeout = aiohttp.ClientTimeout(
            total=prefill_timeout_s, sock_connect=_CONNECT_TIMEOUT_S
        )
        self._decode_timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=_CONNECT_TIMEOUT_S, sock_read=decode_idle_timeout_s
        )
        self._session = aiohttp.ClientSession(
            # Queueing is the engines' business: a limit here would hide it.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
            # A cookie of one tenant's answer must not travel with another's request.
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Accept-Encoding": "identity", "Content-Type": "application/json"},
            read_bufsize=_READ_BUFFER_BYTES,
            trust_env=False,
        )

    async def close(self) -> None:
        """Close every connection."""
        await self._session.close()

    async def prefill(
        self, node: Node, path: str, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> PrefillAnswer | Refused | LegFailed:
        """Run a prefill leg to its end."""
        try:
            async with self._session.post(
                node.info.engine_url + path,
                data=orjson.dumps(body),
                headers=headers,
                timeout=self._prefill_timeout,
                allow_redirects=False,
            ) as response:
                answer = await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return _failed(error)
        if response.status >= _HTTP_BAD_REQUEST:
            return _refused(response, answer)
        if response.status != _HTTP_OK:
            return LegFailed("protocol", f"unexpected HTTP status {response.status}")
        return _prefill_answer(answer)

    async def decode(
        self, node: Node, path: str, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> DecodeStream | Refused | LegFailed:
        """Start a decode leg; returns when the engine's headers are here."""
        try:
            response = await self._session.post(
                node.info.engine_url + path,
                data=orjson.dumps(body),
                headers=headers,
                timeout=self._decode_timeout,
                allow_redirects=False,
            )
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return _failed(error)
        if response.status == _HTTP_OK:
            return DecodeStream(response)
        try:
            if response.status < _HTTP_BAD_REQUEST:
                return LegFailed("protocol", f"unexpected HTTP status {response.status}")
            return _refused(response, await response.read())
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return _failed(error)
        finally:
            response.close()


def _refused(response: aiohttp.ClientResponse, body: bytes) -> Refused:
    content_type = response.headers.get("Content-Type", "application/json")
    return Refused(response.status, body, content_type, response.headers.get("Retry-After", ""))


def _failed(error: BaseException) -> LegFailed:
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
        return LegFailed("connect", str(error))
    if isinstance(error, asyncio.TimeoutError):
        return LegFailed("timeout", "no answer in time")
    return LegFailed("broken", str(error) or type(error).__name__)


def _prefill_answer(body: bytes) -> PrefillAnswer | LegFailed:
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        return LegFailed("protocol", f"the answer is no JSON: {error}")
    if not isinstance(answer, dict):
        return LegFailed("protocol", "the answer is no JSON object")
    params = answer.get(KV_PARAMS)
    params = params if isinstance(params, dict) else {}
    own = params.get(KVTIDE_KEY)
    own = own if isinstance(own, dict) else {}
    usage = answer.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    return PrefillAnswer(
        params=params,
        prompt_tokens=_count(own, "prompt_tokens") or _count(usage, "prompt_tokens"),
        pulled_tokens=_count(own, "pulled_tokens"),
        cached_tokens=_count(own, "cached_tokens"),
        recomputed_tokens=_count(own, "recomputed_tokens"),
        reuse=_text(own, "reuse"),
        read_outcome=_READ_OUTCOMES.get(_text(own, "read"), ReadOutcome.UNKNOWN),
        prompt_digest=_text(own, "prompt_digest"),
    )


_READ_OUTCOMES = {READ_DONE: ReadOutcome.READ, READ_NOT: ReadOutcome.NOT_READ}


def _count(values: Mapping[str, Any], name: str) -> int:
    value = values.get(name)
    return value if isinstance(value, int) and value > 0 else 0


def _text(values: Mapping[str, Any], name: str) -> str:
    value = values.get(name)
    return value if isinstance(value, str) else ""
