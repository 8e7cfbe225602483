"""Owns what every gRPC call needs whatever its method: parsing, an id, a permit, one metric, one log line, a status.

Methods get their message unparsed and parse it here, since grpcio answers a message that does not parse with INTERNAL,
as if it were our fault.
"""

import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import structlog
from google.protobuf.message import DecodeError

from service.errors import ErrorCode, InvalidArgument, LookupFailed
from service.grpc.converters import GENERIC_TEXT, MAX_MESSAGE_CHARS, STATUS, failure_metadata, failure_text
from service.log import access_level, clean_request_id, request_context
from service.metrics import Metrics

log = structlog.get_logger(__name__)

OK = "ok"
CANCELLED = "cancelled"

Answer = Callable[[Any, grpc.aio.ServicerContext], Awaitable[bytes]]
"""A method: message (or its bytes) and context in, serialised reply out; raises ``LookupFailed``."""


def unary(route: str, message_type: Any, answer: Answer, metrics: Metrics) -> grpc.RpcMethodHandler:
    """Make a method handler of ``answer``.

    Args:
        route: Label of its metrics and log lines; from a closed set.
        message_type: Protobuf class of its request; None: ``answer`` gets the bytes.
        answer: What it does.
        metrics: Where calls are counted.
    """

    async def handle(data: bytes, context: grpc.aio.ServicerContext) -> bytes:
        started_s = time.perf_counter()
        refusal: tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]
        with request_context(_request_id(context)):
            code: str = CANCELLED
            error = ""
            try:
                reply = await answer(data if message_type is None else parse(message_type, data), context)
            except LookupFailed as exc:
                code, error = exc.code, str(exc)
                if exc.code is ErrorCode.INTERNAL:
                    log.exception("request_failed_internally")
                refusal = (STATUS[exc.code], failure_text(exc), failure_metadata(exc))
            except Exception as exc:
                # The edge is where an unforeseen exception ends: a generic status, the cause for the log.
                log.exception("request_crashed", route=route)
                code, error = ErrorCode.INTERNAL, type(exc).__name__
                refusal = (grpc.StatusCode.INTERNAL, GENERIC_TEXT, ())
            else:
                code = OK
                return reply
            finally:
                # Before the reply leaves, so that whoever has it finds it counted.
                _account(metrics, route, code, time.perf_counter() - started_s, error)
            await context.abort(*refusal)
            raise AssertionError("abort does not return")

    return grpc.unary_unary_rpc_method_handler(handle)


def parse(message_type: Any, data: bytes) -> Any:
    """Parse a message.

    Raises:
        InvalidArgument: The bytes are no such message.
    """
    try:
        return message_type.FromString(data)
    except DecodeError as exc:
        raise InvalidArgument(f"message: not a {message_type.DESCRIPTOR.full_name}: {exc}") from None


def _request_id(context: grpc.aio.ServicerContext) -> str:
    for key, value in context.invocation_metadata() or ():
        if key == "x-request-id":
            return clean_request_id(str(value))
    return clean_request_id(None)


def _account(metrics: Metrics, route: str, code: str, seconds: float, error: str) -> None:
    metrics.requests.labels(route, code).inc()
    metrics.request_seconds.labels(route).observe(seconds)
    log.log(
        access_level(code),
        "request",
        route=route,
        code=code,
        seconds=round(seconds, 6),
        error=error[:MAX_MESSAGE_CHARS],
    )
