"""Domain errors: what domain code raises and callers catch. They know no status codes.

`rpc_errors` takes them over gRPC and back.
"""

from __future__ import annotations

__all__ = [
    "DeadlineExceeded",
    "FailedPrecondition",
    "Internal",
    "InvalidArgument",
    "KvtideError",
    "NotFound",
    "ResourceExhausted",
    "Unavailable",
]


class KvtideError(Exception):
    """Something that a caller may want to handle.

    `code` is a stable lower_snake_case word for programs, `message` a sentence for people: it
    names what was wrong, with which value, and what to do. `retry_after_s`, when set, is how
    long to wait before a retry has a chance.
    """

    def __init__(self, code: str, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s

    def __repr__(self) -> str:
        return f"{type(self).__name__}(code={self.code!r}, message={self.message!r})"


class InvalidArgument(KvtideError):
    """The request is wrong whatever the state of the system; don't retry it."""


class NotFound(KvtideError):
    """The thing that was asked for does not exist."""


class FailedPrecondition(KvtideError):
    """The system is not in the state that the request needs; fix that first."""


class ResourceExhausted(KvtideError):
    """A limit was reached."""


class Unavailable(KvtideError):
    """Not now; the same request may succeed later."""


class DeadlineExceeded(Unavailable):
    """No answer in time. Whether it took effect is unknown."""


class Internal(KvtideError):
    """A bug, or an error that this version does not know."""
