"""Scan a decode engine's event stream while it is relayed. Pure: bytes in, bytes out.

Events leave as the bytes that came, in whole events. Two kinds are looked into: the one with the
finish reason, because the turn is settled before it is relayed, and one with
`kv_transfer_params`, which is re-serialised without them. All others are told apart by a byte
search and never parsed: inside a JSON string every quote is escaped, so the patterns below match
keys only, never text that a model wrote.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

from kvtide.router.shaping import KV_PARAMS

__all__ = [
    "DONE_EVENT",
    "EventTooLargeError",
    "SseScanner",
    "event_data",
    "names_engine_internals",
    "split_events",
    "strip_answer",
]

DONE_EVENT = b"data: [DONE]\n\n"
MAX_EVENT_BYTES = 16 * 1024 * 1024

_KV_MARK = f'"{KV_PARAMS}"'.encode()
_KV_NULL = f',"{KV_PARAMS}":null'.encode()
_FINISH = re.compile(rb'"finish_reason"\s*:\s*"')
_USAGE = re.compile(rb'"usage"\s*:\s*\{')
_ERROR = re.compile(rb'(?:^|\n)data:\s*\{\s*"error"\s*:')
_DONE = re.compile(rb"(?:^|\n)data:\s*\[DONE\]")
# An empty line ends an event; lines end in LF or CRLF.
_EVENT_END = re.compile(rb"\n\r?\n")


class EventTooLargeError(Exception):
    """The engine sent `MAX_EVENT_BYTES` without ending an event."""


class SseScanner:
    """One stream's scanner. `feed` what arrives and relay what it returns.

    The end of an event that has not arrived yet is kept back: whether the event may be relayed
    is known only when all of it is here. Engines send whole events, so nothing waits in practice.
    """

    __slots__ = ("_tail", "done_seen", "error_seen", "finish_reason", "usage")

    def __init__(self) -> None:
        self._tail = bytearray()
        self.finish_reason = ""
        """Of the first choice that finished; "" until then."""
        self.usage: dict[str, Any] | None = None
        """The last `usage` that came with or after the finish reason."""
        self.error_seen = False
        """The engine reported an error in the stream."""
        self.done_seen = False
        """The engine sent [DONE]."""

    def feed(self, data: bytes) -> bytes:
        """Take bytes as they arrived; the bytes that may be relayed now (b"" for none yet).

        Raises `EventTooLargeError`.
        """
        if not self._tail and data.endswith(b"\n\n"):
            return self._scan(data)
        # An event's end may straddle the border, so the search starts a little before it.
        start = max(0, len(self._tail) - 2)
        self._tail += data
        end = _last_event_end(self._tail, start)
        if end == 0:
            if len(self._tail) > MAX_EVENT_BYTES:
                raise EventTooLargeError
            return b""
        whole = bytes(self._tail[:end])
        del self._tail[:end]
        return self._scan(whole)

    def close(self) -> bytes:
        """The stream has ended; what was kept back, for relaying."""
        rest = bytes(self._tail)
        self._tail.clear()
        return self._scan(rest) if rest else b""

    def _scan(self, events: bytes) -> bytes:
        # One event at a time only where something is to be found in one of them.
        if (
            _KV_MARK not in events
            and not _FINISH.search(events)
            and not (self.finish_reason and _USAGE.search(events))
        ):
            self._note(events)
            return events
        return b"".join(self._inspect(event) for event in split_events(events))

    def _note(self, events: bytes) -> None:
        # A plain search first: almost no event has either, and it is many times cheaper.
        if b'"error"' in events and _ERROR.search(events):
            self.error_seen = True
        if b"[DONE]" in events and _DONE.search(events):
            self.done_seen = True

    def _inspect(self, event: bytes) -> bytes:
        self._note(event)
        has_params = _KV_MARK in event
        finishes = _FINISH.search(event) is not None
        if not (has_params or finishes or (self.finish_reason and _USAGE.search(event))):
            return event
        try:
            chunk = orjson.loads(event_data(event))
        except orjson.JSONDecodeError:
            # Not JSON as engines write it. It cannot be cleaned, so it may only pass as it is
            # when there is nothing to clean.
            return b"" if has_params else event
        if not isinstance(chunk, dict):
            return event
        if finishes and not self.finish_reason:
            self.finish_reason = _finish_reason(chunk)
        usage = chunk.get("usage")
        if self.finish_reason and isinstance(usage, dict):
            self.usage = usage
        if has_params and _strip(chunk):
            return _with_data(event, orjson.dumps(chunk))
        return event


def split_events(events: bytes) -> list[bytes]:
    """Cut a stream into its events, terminators included; a last part without one stays."""
    parts: list[bytes] = []
    start = 0
    for match in _EVENT_END.finditer(events):
        parts.append(events[start : match.end()])
        start = match.end()
    if start < len(events):
        parts.append(events[start:])
    return parts


def event_data(event: bytes) -> bytes:
    """The data of one event: its `data:` lines, joined by newlines."""
    return b"\n".join(
        line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")
    )


def strip_answer(body: bytes) -> tuple[bytes, dict[str, Any]]:
    """A non-streamed answer without `kv_transfer_params`, and the answer as parsed.

    The bytes stay as they are where the answer has none. Returns an empty dictionary for a body
    that is no JSON object.
    """
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body, {}
    if not isinstance(answer, dict):
        return body, {}
    if _KV_MARK in body:
        # vLLM writes null where there are none; cutting that out keeps all other bytes.
        body = body.replace(_KV_NULL, b"")
        if _strip(answer) and _KV_MARK in body:
            body = orjson.dumps(answer)
    return body, answer


def names_engine_internals(body: bytes) -> bool:
    """Whether an error body of an engine quotes the request's `kv_transfer_params`."""
    return KV_PARAMS.encode() in body


def _strip(chunk: dict[str, Any]) -> bool:
    found = chunk.pop(KV_PARAMS, _ABSENT) is not _ABSENT
    choices = chunk.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict):
            found = choice.pop(KV_PARAMS, _ABSENT) is not _ABSENT or found
    return found


_ABSENT = object()


def _finish_reason(chunk: dict[str, Any]) -> str:
    choices = chunk.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        reason = choice.get("finish_reason") if isinstance(choice, dict) else None
        if isinstance(reason, str):
            return reason
    return ""


def _with_data(event: bytes, data: bytes) -> bytes:
    """The event with its data replaced; other lines and line ends as they were."""
    lines: list[bytes] = []
    replaced = False
    for line in event.splitlines(keepends=True):
        if not line.startswith(b"data:"):
            lines.append(line)
        elif not replaced:
            end = line[len(line.rstrip(b"\r\n")) :]
            lines.append(b"data: " + data + end)
            replaced = True
    return b"".join(lines)


def _last_event_end(buffer: bytearray, start: int) -> int:
    """Where the last whole event in the buffer ends; 0 when there is none after `start`."""
    return max(_after(buffer.rfind(b"\n\n", start), 2), _after(buffer.rfind(b"\n\r\n", start), 3))


def _after(position: int, length: int) -> int:
    return 0 if position < 0 else position + length
