"""The answer of one turn on its way from the decode engine to the client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtide.router.engines import DecodeStream, LegFailed, StreamBrokenError
from kvtide.router.errors import EngineFailed
from kvtide.router.openai_errors import error_event
from kvtide.router.sse import DONE_EVENT, EventTooLargeError, SseScanner, strip_answer

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Answer"]


class Answer:
    """Reads a decode leg's answer, streamed or whole, and cleans it.

    `on_finish` is called once with the finish reason, before the bytes that carry it are handed
    out: the client's next turn may come in the same millisecond as those. `on_failure` is called
    when the engine breaks off.
    """

    def __init__(
        self,
        stream: DecodeStream,
        *,
        wants_usage: bool,
        on_failure: Callable[[LegFailed], None],
        on_finish: Callable[[str], None],
    ) -> None:
        self._stream = stream
        self._wants_usage = wants_usage
        self._on_failure = on_failure
        self._on_finish = on_finish
        self._scanner = SseScanner()
        self._whole: bytes | None = None
        self.is_event_stream = stream.is_event_stream
        self.content_type = stream.content_type
        self.exhausted = False
        """Everything was handed out."""
        self.failed = False
        """The engine broke off, or reported an error in the stream."""
        self.finish_reason = ""
        self.usage: dict[str, Any] = {}
        """As the engine counts; empty when it did not say."""

    @property
    def completion_tokens(self) -> int:
        """Tokens of the answer; 0 when the engine did not say."""
        count = self.usage.get("completion_tokens")
        return count if isinstance(count, int) else 0

    async def prepare(self) -> None:
        """Read a JSON answer to its end, so that it can still fail with a status of its own.

        Does nothing for a stream. Raises `EngineFailed`.
        """
        if self.is_event_stream:
            return
        try:
            body = await self._stream.read_all()
        except StreamBrokenError as broken:
            self.failed = True
            self._on_failure(broken.failure)
            raise EngineFailed("decode", broken.failure.summary) from broken
        self._whole, parsed = strip_answer(body)
        choices = parsed.get("choices")
        first = choices[0] if isinstance(choices, list) and choices else None
        reason = first.get("finish_reason") if isinstance(first, dict) else None
        self._take_usage(parsed.get("usage"))
        if isinstance(reason, str) and reason:
            self._finish(reason)

    async def read(self) -> bytes:
        """The next bytes, never empty before the end; b"" once `exhausted`.

        A stream that the engine breaks off ends with an error event instead of an exception:
        the client has the status line already.
        """
        while not self.exhausted:
            out = self._take_whole() if self._whole is not None else await self._relay()
            if out:
                return out
        return b""

    def close(self) -> None:
        """Let go of the engine; what it still computes for this answer is in vain."""
        self._stream.close()

    def _take_whole(self) -> bytes:
        self.exhausted = True
        return self._whole or b""

    async def _relay(self) -> bytes:
        scanner = self._scanner
        try:
            data = await self._stream.read()
            out = scanner.feed(data) if data else scanner.close()
        except StreamBrokenError as broken:
            return self._broken_off(broken.failure)
        except EventTooLargeError:
            return self._broken_off(LegFailed("protocol", "an event that does not end"))
        self._take_usage(scanner.usage)
        if scanner.finish_reason and not self.finish_reason:
            self._finish(scanner.finish_reason)
        if scanner.error_seen:
            self.failed = True
        if not data:
            self.exhausted = True
            if not (scanner.finish_reason or scanner.error_seen):
                out += self._broken_off(LegFailed("broken", "ended without finishing"))
        return out

    def _broken_off(self, failure: LegFailed) -> bytes:
        """What ends the client's stream after the engine's broke off."""
        self.exhausted = True
        self._on_failure(failure)
        if self.finish_reason and (self.usage or not self._wants_usage):
            # The client has the whole answer; only the end mark got lost.
            return b"" if self._scanner.done_seen else DONE_EVENT
        self.failed = True
        return error_event(EngineFailed("decode", failure.summary))

    def _finish(self, reason: str) -> None:
        self.finish_reason = reason
        self._on_finish(reason)

    def _take_usage(self, usage: object) -> None:
        if isinstance(usage, dict):
            self.usage = usage
