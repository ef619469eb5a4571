"""A typed client for the router's gRPC service, for asyncio and for threads.

    async with AsyncKvtideClient("127.0.0.1:7400") as client:
        messages = [{"role": "user", "content": "Hello"}]
        async with client.chat("my-model", messages, session_id="agent-7") as answer:
            async for text in answer:
                print(text, end="")
        print(answer.report, answer.finish)

`AsyncKvtideClient` has the table of exceptions.
"""

from kvtide.client._async import AsyncKvtideClient, AsyncTurnStream
from kvtide.client._errors import (
    DeadlineExceededError,
    InvalidRequestError,
    KvtideClientError,
    LimitReachedError,
    NotFoundError,
    TurnCancelledError,
    TurnFailedError,
    UnavailableError,
)
from kvtide.client._messages import Finish, TurnReport
from kvtide.client._sync import KvtideClient, TurnStream

__all__ = [
    "AsyncKvtideClient",
    "AsyncTurnStream",
    "DeadlineExceededError",
    "Finish",
    "InvalidRequestError",
    "KvtideClient",
    "KvtideClientError",
    "LimitReachedError",
    "NotFoundError",
    "TurnCancelledError",
    "TurnFailedError",
    "TurnReport",
    "TurnStream",
    "UnavailableError",
]
