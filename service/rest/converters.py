"""Owns how failures look over HTTP: one table from error codes to statuses, one JSON shape for every error."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from starlette.responses import Response

from service.errors import ErrorCode, LookupFailed, Overloaded

STATUS: Mapping[ErrorCode, int] = {
    ErrorCode.INVALID_ARGUMENT: 400,
    ErrorCode.NOT_FOUND: 404,
    ErrorCode.TOO_LARGE: 413,
    ErrorCode.OVERLOADED: 429,
    ErrorCode.DEADLINE_EXCEEDED: 504,
    ErrorCode.UNAVAILABLE: 503,
    ErrorCode.INTERNAL: 500,
}

GENERIC_TEXT = "internal error; the server's log has the cause under this request's id"

MAX_MESSAGE_CHARS = 2000
"""A message may quote what the client sent, and that may be megabytes."""


def json_response(content: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON reply."""
    return Response(orjson.dumps(content), status_code=status, headers=headers, media_type="application/json")


def error_response(message: str, *, status: int, headers: Mapping[str, str] | None = None) -> Response:
    """The one shape of every error: ``{"error": "..."}``."""
    return json_response({"error": message[:MAX_MESSAGE_CHARS]}, status=status, headers=headers)


def failure_response(failure: LookupFailed) -> Response:
    """A domain error as HTTP; an internal one says nothing of its cause."""
    message = GENERIC_TEXT if failure.code is ErrorCode.INTERNAL else str(failure)
    headers = (
        {"Retry-After": str(max(1, math.ceil(failure.retry_after_s)))} if isinstance(failure, Overloaded) else None
    )
    return error_response(message, status=STATUS[failure.code], headers=headers)


def code_of_status(status: int) -> ErrorCode:
    """The code under which an error of the framework's own (unknown path, wrong method) is counted."""
    for code, known in STATUS.items():
        if known == status:
            return code
    return ErrorCode.INVALID_ARGUMENT if status < 500 else ErrorCode.INTERNAL


def field_path(location: Sequence[int | str]) -> str:
    """Pydantic's place of an error as people write it: ``features.user[0][1]``."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path or "body"
