"""Owns what every HTTP exchange needs whatever its route: an id, a permit, one metric, one log line, no escaping error.

Plain ASGI rather than Starlette's ``BaseHTTPMiddleware``, which would hide the client's disconnect from the routes.
"""

import time
from collections.abc import MutableMapping
from typing import Any

import structlog
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.admission import Permit
from service.errors import ErrorCode
from service.log import access_level, clean_request_id, request_context
from service.metrics import Metrics
from service.plane import Plane
from service.rest.converters import GENERIC_TEXT, code_of_status, error_response

log = structlog.get_logger(__name__)

SCOPE_KEY = "kjtserve.exchange"
OTHER_ROUTE = "other"
CANCELLED = "cancelled"
"""Code of a request whose client went away; it gets no reply."""


class ClientGone(Exception):
    """The client closed its connection before the reply was there."""


class Exchange:
    """One request and its reply, from the first byte read to the last byte sent."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.route = OTHER_ROUTE
        """Label of the route, from the closed set of names in ``service.rest.app``."""
        self.code = "ok"
        self.status = 0
        self.error = ""
        self.permit: Permit | None = None
        self.started_s = time.perf_counter()
        self.seconds: float | None = None

    def admit(self, plane: Plane, nbytes: int) -> Permit:
        """Take a permit that is held until the last byte of the reply has left, or the client has."""
        assert self.permit is None, "one permit for each exchange"
        self.permit = plane.admit(nbytes)
        return self.permit

    def body_read(self) -> None:
        """Start the clock again: a slow upload is not our time."""
        self.started_s = time.perf_counter()

    def fail(self, code: str, error: str) -> None:
        """Note what the reply says went wrong."""
        self.code, self.error = code, error

    def reply_started(self, status: int) -> None:
        """Stop the clock: a slow download is not our time either."""
        self.status = status
        self.seconds = time.perf_counter() - self.started_s
        if status >= 400 and self.code == "ok":
            self.code = code_of_status(status).value


def begin(request: Request, route: str) -> Exchange:
    """The exchange of a request, under its route's label."""
    exchange: Exchange = request.scope[SCOPE_KEY]
    exchange.route = route
    return exchange


class ExchangeMiddleware:
    """Wraps the whole application.

    Args:
        app: What answers.
        metrics: Where requests are counted.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one exchange from end to end."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = Exchange(clean_request_id(_header(scope, b"x-request-id")))
        scope[SCOPE_KEY] = exchange

        async def send_noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.reply_started(message["status"])
                self._account(exchange, scope)  # before the reply leaves, so that whoever has it finds it counted
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", exchange.request_id.encode())]
            await send(message)

        with request_context(exchange.request_id):
            try:
                await self._run(exchange, scope, receive, send_noted)
            finally:
                if exchange.permit is not None:
                    exchange.permit.release()
                if exchange.seconds is None:
                    exchange.code, exchange.seconds = CANCELLED, time.perf_counter() - exchange.started_s
                    self._account(exchange, scope)

    async def _run(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except ClientGone:
            return
        except Exception as exc:
            # The edge is where an unforeseen exception ends: a generic answer for the client, the cause for the log.
            log.exception("request_crashed", route=exchange.route)
            exchange.fail(ErrorCode.INTERNAL, type(exc).__name__)
            if exchange.seconds is not None:
                raise  # half a reply is out: the server has to break the connection off
            await error_response(GENERIC_TEXT, status=500)(scope, receive, send)

    def _account(self, exchange: Exchange, scope: MutableMapping[str, Any]) -> None:
        seconds = exchange.seconds or 0.0
        self._metrics.requests.labels(exchange.route, exchange.code).inc()
        self._metrics.request_seconds.labels(exchange.route).observe(seconds)
        log.log(
            access_level(exchange.code),
            "request",
            route=exchange.route,
            method=scope["method"],
            path=scope["path"][:200],
            status=exchange.status,
            code=exchange.code,
            seconds=round(seconds, 6),
            error=exchange.error[:500],
        )


def _header(scope: Scope, name: bytes) -> str | None:
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value).decode("latin-1")
    return None
