"""The client for threads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import grpc

from kvtide.client._errors import TurnCancelledError, error_from_rpc
from kvtide.client._messages import (
    CHANNEL_OPTIONS,
    Finish,
    Progress,
    TurnReport,
    call_metadata,
    chat_request,
    complete_request,
)
from kvtide.v1 import router_pb2, router_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from types import TracebackType


class TurnStream:
    """One turn's answer. Iterate for its text; leave the context, or `close`, to end it early.

    An early end stops the engines, too. Errors come out of the iteration.
    """

    def __init__(self, call: Any) -> None:
        self._call = call
        self._progress = Progress()

    @property
    def report(self) -> TurnReport | None:
        """What became of the prompt; there from the first text on."""
        return self._progress.report

    @property
    def finish(self) -> Finish | None:
        """How the answer ended; None until it has."""
        return self._progress.finish

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        while True:
            try:
                response = next(self._call)
            except StopIteration:
                if self._progress.finish is None:
                    raise TurnCancelledError(
                        "the stream was closed before its end", code="cancelled"
                    ) from None
                raise
            except grpc.RpcError as error:
                raise error_from_rpc(error) from error
            text = self._progress.take(response)
            if text:
                return text

    def text(self) -> str:
        """The whole answer from here to its end."""
        return "".join(self)

    def close(self) -> None:
        """End the turn. Harmless after its end."""
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class KvtideClient:
    """A connection to one router, usable from any thread. Close it, or use it as a context.

    Arguments, methods and exceptions are those of `AsyncKvtideClient`, without the waiting.
    """

    def __init__(
        self,
        address: str,
        *,
        api_key: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._stub = router_pb2_grpc.RouterServiceStub(self._channel)
        self._metadata = call_metadata(api_key, metadata)

    def chat(
        self,
        model: str,
        messages: Iterable[Mapping[str, str]],
        *,
        session_id: str = "",
        max_tokens: int = 0,
        temperature: float | None = None,
        timeout_s: float | None = None,
        **parameters: Any,
    ) -> TurnStream:
        """Start one turn of a chat; see `AsyncKvtideClient.chat`."""
        request = chat_request(
            model,
            messages,
            session_id=session_id,
            max_tokens=max_tokens,
            temperature=temperature,
            parameters=parameters,
        )
        return TurnStream(self._stub.Chat(request, metadata=self._metadata, timeout=timeout_s))

    def complete(
        self,
        model: str,
        prompt: str,
        *,
        session_id: str = "",
        max_tokens: int = 0,
        temperature: float | None = None,
        timeout_s: float | None = None,
        **parameters: Any,
    ) -> TurnStream:
        """Start one turn of plain text completion; see `AsyncKvtideClient.chat`."""
        request = complete_request(
            model,
            prompt,
            session_id=session_id,
            max_tokens=max_tokens,
            temperature=temperature,
            parameters=parameters,
        )
        return TurnStream(self._stub.Complete(request, metadata=self._metadata, timeout=timeout_s))

    def close_conversation(self, session_id: str, *, timeout_s: float | None = None) -> None:
        """End a conversation, so that its blocks are freed now. Idempotent."""
        request = router_pb2.RouterServiceCloseConversationRequest(session_id=session_id)
        try:
            self._stub.CloseConversation(request, metadata=self._metadata, timeout=timeout_s)
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error

    def close(self) -> None:
        """Close the connection; turns that still run end."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
