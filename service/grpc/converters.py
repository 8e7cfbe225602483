"""Owns how failures look over gRPC: one table from error codes to statuses, and the metadata that goes with them."""

import math
from collections.abc import Mapping

import grpc

from service.errors import ErrorCode, LookupFailed, Overloaded

STATUS: Mapping[ErrorCode, grpc.StatusCode] = {
    ErrorCode.INVALID_ARGUMENT: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorCode.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    ErrorCode.TOO_LARGE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorCode.OVERLOADED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorCode.DEADLINE_EXCEEDED: grpc.StatusCode.DEADLINE_EXCEEDED,
    ErrorCode.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    ErrorCode.INTERNAL: grpc.StatusCode.INTERNAL,
}

GENERIC_TEXT = "internal error; the server's log has the cause under this request's id"

MAX_MESSAGE_CHARS = 500
"""Status messages travel as a header, and headers over 8 KiB lose the call its status."""


def failure_text(failure: LookupFailed) -> str:
    """What the client is told; of an internal error, nothing."""
    return GENERIC_TEXT if failure.code is ErrorCode.INTERNAL else str(failure)[:MAX_MESSAGE_CHARS]


def failure_metadata(failure: LookupFailed) -> tuple[tuple[str, str], ...]:
    """Trailing metadata: when to retry a refused call, for people (seconds) and for gRPC's own retries (ms)."""
    if not isinstance(failure, Overloaded):
        return ()
    return (
        ("retry-after", str(max(1, math.ceil(failure.retry_after_s)))),
        ("grpc-retry-pushback-ms", str(math.ceil(failure.retry_after_s * 1000))),
    )
