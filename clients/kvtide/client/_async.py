"""The client for asyncio."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Self, cast

import grpc

from kvtide.client._errors import TurnCancelledError, error_from_rpc
from kvtide.client._messages import (
    CHANNEL_OPTIONS,
    Finish,
    Progress,
    Response,
    TurnReport,
    call_metadata,
    chat_request,
    complete_request,
)
from kvtide.v1 import router_pb2, router_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from types import TracebackType


class AsyncTurnStream:
    """One turn's answer. Iterate for its text; leave the context, or `close`, to end it early.

    An early end stops the engines, too. Errors come out of the iteration.
    """

    def __init__(self, call: grpc.aio.UnaryStreamCall[Any, Response]) -> None:
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

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        while True:
            try:
                response = await self._call.read()
            except grpc.RpcError as error:
                raise error_from_rpc(error) from error
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if self._call.cancelled() and not (task and task.cancelling()):
                    # `close` was called; nobody cancelled the task that reads.
                    raise _closed() from None
                raise
            if response is grpc.aio.EOF:
                if self._progress.finish is None:
                    raise _closed()
                raise StopAsyncIteration
            text = self._progress.take(cast("Response", response))
            if text:
                return text

    async def text(self) -> str:
        """The whole answer from here to its end."""
        return "".join([text async for text in self])

    def close(self) -> None:
        """End the turn. Harmless after its end."""
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _closed() -> TurnCancelledError:
    return TurnCancelledError("the stream was closed before its end", code="cancelled")


class AsyncKvtideClient:
    """A connection to one router, for one event loop. Close it, or use it as a context.

    `address` is "host:port" of the router's gRPC server. `api_key` names the tenant: session ids
    of different keys never meet. `metadata` is sent with every call, such as traceparent.

    Failed calls raise what this table says (`kvtide.client` has the classes):

    ==================  ======================
    gRPC status         exception
    ==================  ======================
    INVALID_ARGUMENT    InvalidRequestError
    NOT_FOUND           NotFoundError
    RESOURCE_EXHAUSTED  LimitReachedError
    UNAVAILABLE         UnavailableError
    DEADLINE_EXCEEDED   DeadlineExceededError
    INTERNAL            TurnFailedError
    CANCELLED           TurnCancelledError
    any other           KvtideClientError
    ==================  ======================
    """

    def __init__(
        self,
        address: str,
        *,
        api_key: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
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
    ) -> AsyncTurnStream:
        """Start one turn of a chat; returns at once, and what goes wrong comes when iterating.

        `messages` have a role and a content each. `session_id` names the conversation, so that
        its KV is reused; without one nothing is. `max_tokens` 0 is the engine's default.
        `parameters` are OpenAI's other ones, by name. Raises ValueError for what can't be sent.
        """
        request = chat_request(
            model,
            messages,
            session_id=session_id,
            max_tokens=max_tokens,
            temperature=temperature,
            parameters=parameters,
        )
        call = self._stub.Chat(request, metadata=self._metadata, timeout=timeout_s)
        return AsyncTurnStream(call)

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
    ) -> AsyncTurnStream:
        """Start one turn of plain text completion; see `chat`."""
        request = complete_request(
            model,
            prompt,
            session_id=session_id,
            max_tokens=max_tokens,
            temperature=temperature,
            parameters=parameters,
        )
        call = self._stub.Complete(request, metadata=self._metadata, timeout=timeout_s)
        return AsyncTurnStream(call)

    async def close_conversation(self, session_id: str, *, timeout_s: float | None = None) -> None:
        """End a conversation, so that its blocks are freed now. Idempotent."""
        request = router_pb2.RouterServiceCloseConversationRequest(session_id=session_id)
        try:
            await self._stub.CloseConversation(request, metadata=self._metadata, timeout=timeout_s)
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error

    async def close(self) -> None:
        """Close the connection; turns that still run end."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()
