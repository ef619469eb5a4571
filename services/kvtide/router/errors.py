"""What can go wrong with a turn before its answer begins.

Domain errors only: `openai_errors` spells them for HTTP clients, `servicer` for gRPC ones.
"""

from __future__ import annotations

from kvtide.runtime.errors import Internal, InvalidArgument, KvtideError, NotFound, Unavailable

__all__ = [
    "EngineFailed",
    "EngineRefused",
    "EngineUnavailable",
    "InvalidField",
    "ModelNotFound",
    "NoReadyEngine",
    "RouterDraining",
]

RETRY_AFTER_S = 2.0
"""What clients are told to wait: about the time in which node health notices a change."""


class InvalidField(InvalidArgument):
    """A field of the request is missing, or of the wrong type. `param` names it."""

    def __init__(self, param: str, message: str, *, code: str = "invalid_value") -> None:
        super().__init__(code, message)
        self.param = param


class ModelNotFound(NotFound):
    """No engine serves a model of that name, whatever state it is in."""

    def __init__(self, model: str) -> None:
        super().__init__("model_not_found", f"the model {model!r} does not exist")


class NoReadyEngine(Unavailable):
    """Engines of the role exist, or may exist, but none takes turns now."""

    def __init__(self, role: str, model: str) -> None:
        message = f"no {role} engine is ready to serve the model {model!r}; retry shortly"
        super().__init__("no_ready_engine", message, retry_after_s=RETRY_AFTER_S)


class EngineUnavailable(Unavailable):
    """The engine could not be reached, or said that it takes nothing now."""

    def __init__(self, leg: str, detail: str) -> None:
        message = f"the {leg} engine is not available: {detail}"
        super().__init__("engine_unavailable", message, retry_after_s=RETRY_AFTER_S)


class EngineFailed(Internal):
    """The engine took the request and gave no usable answer."""

    def __init__(self, leg: str, detail: str) -> None:
        super().__init__("engine_failed", f"the {leg} engine failed: {detail}")


class RouterDraining(Unavailable):
    """The router is stopping and takes no new turns."""

    def __init__(self) -> None:
        message = "this router is stopping; retry with another one"
        super().__init__("router_stopping", message, retry_after_s=RETRY_AFTER_S)


class EngineRefused(KvtideError):  # noqa: N818 - named like the other domain errors
    """The engine answered with an error of its own, which is passed on as it is.

    `status` is the engine's HTTP status, `retry_after` its Retry-After header ("" when it sent
    none). `body` is its body; clients get `openai_errors.refusal_body` of it.
    """

    def __init__(
        self, status: int, body: bytes, *, content_type: str, retry_after: str = ""
    ) -> None:
        super().__init__("engine_refused", f"the engine answered with HTTP status {status}")
        self.status = status
        self.body = body
        self.content_type = content_type
        self.retry_after = retry_after
