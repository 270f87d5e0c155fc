"""Errors as HTTP answers in OpenAI's shape: {"error": {"message", "type", "param", "code"}}. Raises nothing itself."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from pagedserve.contract.errors import PagedServeError, RequestError, ServerUnavailableError

log = logging.getLogger("pagedserve.api")

_STATUS_OF_CODE = {"not_found": 404, "queue_full": 429, "unavailable": 503}  # all others are 400
_RETRY_AFTER_S = "1"
# Parts of a validation error's place that are pydantic's, not the request's: types of a union and the like.
_NESTED_FIELDS = frozenset(("role", "content", "text", "type", "include_usage"))


class HttpError(PagedServeError):
    """An answer other than 200 that belongs to HTTP rather than to a request's content."""

    def __init__(self, status: int, code: str, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


def as_http(error: PagedServeError) -> HttpError:
    """The HTTP form of any expected error."""
    if isinstance(error, HttpError):
        return error
    if isinstance(error, RequestError):
        return HttpError(_STATUS_OF_CODE.get(error.code, 400), error.code, str(error), param=error.param)
    if isinstance(error, ServerUnavailableError):
        return HttpError(503, "unavailable", str(error))
    return HttpError(500, "internal_error", str(error))


def error_body(error: PagedServeError) -> bytes:
    """The JSON of an error, for a body or an event."""
    http = as_http(error)
    kind = "server_error" if http.status >= 500 else "invalid_request_error"
    if http.status == 429:
        kind = "rate_limit_error"
    return msgspec.json.encode({"error": {"message": str(http), "type": kind, "param": http.param, "code": http.code}})


def error_response(error: PagedServeError, headers: Mapping[str, str] | None = None) -> Response:
    """The response of an error; 429 and 503 say when to come back."""
    status = as_http(error).status
    extra = {"Retry-After": _RETRY_AFTER_S} if status in (429, 503) else {}
    return Response(error_body(error), status, {**(headers or {}), **extra}, "application/json")


def install(app: FastAPI) -> None:
    """Have every error of the app answered in this shape."""

    @app.exception_handler(PagedServeError)
    async def expected(_: Request, error: PagedServeError) -> Response:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return error_response(_of_validation(error.errors(), request.headers.get("content-type", "")))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        if isinstance(error.__cause__, PagedServeError):  # raised while the body was read
            return error_response(error.__cause__)
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_value")
        message = f"{request.method} {request.url.path}: {error.detail}"
        return error_response(HttpError(error.status_code, code, message), error.headers)

    @app.exception_handler(Exception)
    async def unexpected(_: Request, __: Exception) -> Response:
        return error_response(HttpError(500, "internal_error", "an internal error; the server's log has more"))


def _of_validation(errors: Sequence[Mapping[str, object]], content_type: str) -> HttpError:
    """The first of pydantic's complaints."""
    first = errors[0]
    place, message = first["loc"], str(first["msg"]).removeprefix("Value error, ")
    assert isinstance(place, tuple)
    if first["type"] == "json_invalid":
        return HttpError(400, "invalid_json", f"the body is not valid JSON: {message} at character {place[-1]}")
    if len(place) < 2 and "json" not in content_type:
        return HttpError(400, "invalid_value", f"Content-Type: expected application/json, got {content_type!r}")
    param = _param(place[1:])
    return HttpError(400, "invalid_value", f"{param or 'the body'}: {message}", param=param)


def _param(place: tuple[int | str, ...]) -> str | None:
    """The field of a place: ("messages", 0, "content", "str") is messages[0].content."""
    if not place:
        return None
    param = str(place[0])
    for part in place[1:]:
        if isinstance(part, int):
            param += f"[{part}]"
        elif part in _NESTED_FIELDS:
            param += f".{part}"
    return param
