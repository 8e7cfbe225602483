"""Owns the HTTP application: which path leads where, and how errors leave. Reading and writing bodies is elsewhere."""

from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from service.errors import ErrorCode, LookupFailed
from service.metrics import Metrics
from service.offload import Offload
from service.plane import Plane
from service.rest.body import BodyReader
from service.rest.converters import code_of_status, error_response, failure_response, field_path
from service.rest.docs import docs_routes
from service.rest.exchange import SCOPE_KEY, Exchange, ExchangeMiddleware
from service.rest.lookups import lookup_routes
from service.rest.management import management_routes
from service.settings import Settings

log = structlog.get_logger(__name__)

DESCRIPTION = """
Embeddings of TorchRec collections, by id.

* `POST /v1/collections/{name}:lookup` is for people: ids by feature name in, rows by feature name out.
* `/v2/...` is the KServe v2 Open Inference Protocol with its binary tensor extension, for `tritonclient`.

Every error is `{"error": "..."}` and names the field. Ids are exact signed 64-bit integers; NaN and infinity in a row
are `null` in JSON. Clients that need speed ask for binary tensors.
"""


class Application(FastAPI):
    """FastAPI whose schema says what really happens."""

    def openapi(self) -> dict[str, Any]:
        """The schema, without the 422 that FastAPI promises for every path parameter: ours is a 400."""
        schema = super().openapi()
        for operations in schema["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            schema.get("components", {}).get("schemas", {}).pop(name, None)
        return schema


def build_app(plane: Plane, metrics: Metrics, settings: Settings) -> FastAPI:
    """The HTTP application.

    Args:
        plane: Who answers.
        metrics: Where requests are counted, and what ``/metrics`` shows.
        settings: Size limits and times.
    """
    app = Application(
        title="kjtserve",
        summary="Embeddings of TorchRec collections, by id.",
        description=DESCRIPTION,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
    )
    offload, packing = Offload(), Offload(max_jobs=2)
    bodies = BodyReader(
        plane,
        packing,
        max_bytes=settings.max_request_bytes,
        max_json_bytes=settings.max_json_bytes,
        max_seconds=settings.max_timeout_s,
    )
    app.include_router(lookup_routes(plane, bodies, offload, packing, max_stall_s=settings.max_timeout_s))
    app.include_router(management_routes(plane, metrics, bodies))
    app.include_router(docs_routes(app.openapi))
    app.add_exception_handler(LookupFailed, _answer_failure)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_exception_handler(RequestValidationError, _answer_validation_error)
    app.add_middleware(ExchangeMiddleware, metrics=metrics)
    return app


async def _answer_failure(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, LookupFailed)
    if exc.code is ErrorCode.INTERNAL:
        log.error("request_failed_internally", exc_info=exc)
    _exchange(request).fail(exc.code, str(exc))
    return failure_response(exc)


async def _answer_http_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    text = {
        404: f"{request.url.path[:200]}: no such path",
        405: f"{request.method} is not what {request.url.path[:200]} takes",
    }.get(exc.status_code, exc.detail)
    _exchange(request).fail(code_of_status(exc.status_code), text)
    return error_response(text, status=exc.status_code, headers=exc.headers)


async def _answer_validation_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, RequestValidationError)
    first: Any = exc.errors()[0]
    text = f"{field_path(first['loc'])}: {first['msg']}"
    _exchange(request).fail(ErrorCode.INVALID_ARGUMENT, text)
    return error_response(text, status=400)


def _exchange(request: Request) -> Exchange:
    exchange: Exchange = request.scope[SCOPE_KEY]
    return exchange
