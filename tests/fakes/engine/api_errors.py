"""Errors in the form and with the status that vLLM's server gives them."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from aiohttp import web

if TYPE_CHECKING:
    from pydantic import ValidationError

_MAX_REPORTED_ERRORS = 10


class ApiError(Exception):
    """An answer that is an error: ``{"error": {message, type, param, code}}``."""

    def __init__(self, status: int, message: str, kind: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body: dict[str, Any] = {
            "error": {"message": message, "type": kind, "param": param, "code": status}
        }

    def response(self) -> web.Response:
        """The HTTP answer."""
        return web.json_response(self.body, status=self.status)

    def event(self) -> str:
        """The body as JSON text, for a stream that has already begun."""
        return json.dumps(self.body)


def bad_request(message: str, param: str | None = None) -> ApiError:
    """What the engine's own validation raises."""
    return ApiError(400, message, "BadRequestError", param)


def model_not_found(model: str) -> ApiError:
    """No such model here."""
    return ApiError(404, f"The model `{model}` does not exist.", "NotFoundError", "model")


def internal_error(message: str = "Internal server error") -> ApiError:
    """The request failed inside the engine, or the engine died."""
    return ApiError(500, message, "InternalServerError")


def http_error(status: int) -> ApiError:
    """What the framework raises: no such route, wrong method."""
    phrase = HTTPStatus(status).phrase
    return ApiError(status, phrase, phrase)


def validation_error(errors: list[dict[str, Any]], param: str | None = None) -> ApiError:
    """What the framework raises for a body that does not fit the request's model."""
    label = "error" if len(errors) == 1 else "errors"
    listed = "".join(f"  {error}\n" for error in errors[:_MAX_REPORTED_ERRORS])
    message = f"{len(errors)} validation {label}:\n{listed}".rstrip()
    if param is None and errors and errors[0].get("loc"):
        param = errors[0]["loc"]
    return ApiError(400, message, "Bad Request", param)


def from_pydantic(error: ValidationError) -> ApiError:
    """A body of the wrong types."""
    param = None
    errors = []
    for entry in error.errors(include_url=False):
        cause = (entry.get("ctx") or {}).get("error")
        if isinstance(cause, FieldError):
            param = cause.param
        names = [str(part) for part in entry["loc"] if not _is_branch(str(part))]
        errors.append(
            {
                "type": entry["type"],
                "loc": ".".join(["body", *names]),
                "msg": entry["msg"],
                "input": str(entry.get("input"))[:200],
            }
        )
    return validation_error(errors, param)


class FieldError(ValueError):
    """A check across fields failed; names the field at fault."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


def _is_branch(part: str) -> bool:
    """Whether pydantic made the name up, for one branch of a union."""
    return part in ("str", "int", "list", "dict") or "[" in part or "(" in part
