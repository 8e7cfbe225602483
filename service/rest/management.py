"""Owns the HTTP routes that look nothing up: health, metadata, config, statistics, repository index, metrics."""

import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response

from service.description import model_config, model_metadata, model_statistics, repository_index, server_metadata
from service.errors import InvalidArgument, NotFound
from service.metrics import Metrics
from service.plane import Plane
from service.rest.body import BodyReader
from service.rest.converters import error_response, json_response
from service.rest.exchange import begin
from service.types import Readiness
from service.wire import read_version
from service.wire_tensors import shown

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def management_routes(plane: Plane, metrics: Metrics, bodies: BodyReader) -> APIRouter:
    """Routes over ``plane``; each answers in the protocol's own words."""
    router = APIRouter()
    _add_health(router, plane)
    _add_models(router, plane)
    _add_statistics(router, plane)

    @router.get("/v2", summary="Name, version and extensions of this server", tags=["protocol"])
    async def server(request: Request) -> Response:
        begin(request, "metadata")
        return json_response(server_metadata())

    @router.post("/v2/repository/index", summary="Collections and versions with their states", tags=["protocol"])
    async def index(request: Request) -> Response:
        exchange = begin(request, "repository_index")
        only_ready = _read_index_filter(bytes(await bodies.read(request, exchange)))
        models = [(info, plane.readiness(info.name)) for info in plane.collections()]
        return json_response(repository_index(models, only_ready=only_ready))

    @router.get("/metrics", summary="Prometheus metrics", tags=["operation"])
    async def render(request: Request) -> Response:
        begin(request, "metrics")
        return Response(metrics.render(), headers={"content-type": METRICS_TYPE})

    return router


def _add_health(router: APIRouter, plane: Plane) -> None:
    @router.get("/v2/health/live", summary="Whether this process answers", tags=["health"])
    async def live(request: Request) -> Response:
        begin(request, "health")
        return json_response({"live": True})

    @router.get("/v2/health/ready", summary="Whether every shard answers", tags=["health"])
    async def ready(request: Request) -> Response:
        begin(request, "health")
        return _readiness_response(plane.readiness())

    @router.get("/v2/models/{name}/ready", summary="Whether every shard of a collection answers", tags=["health"])
    @router.get("/v2/models/{name}/versions/{version}/ready", summary="As above, for one version", tags=["health"])
    async def model_ready(request: Request, name: str, version: str = "") -> Response:
        begin(request, "health")
        return _readiness_response(plane.readiness(name, read_version(version)))


def _add_models(router: APIRouter, plane: Plane) -> None:
    @router.get("/v2/models/{name}/config", summary="A collection as a Triton ModelConfig", tags=["protocol"])
    @router.get("/v2/models/{name}/versions/{version}/config", summary="As above, for one version", tags=["protocol"])
    async def config(request: Request, name: str, version: str = "") -> Response:
        begin(request, "config")
        return json_response(model_config(plane.collection(name, read_version(version))))


def _add_statistics(router: APIRouter, plane: Plane) -> None:
    @router.get("/v2/models/stats", summary="Counts of all collections since start", tags=["protocol"])
    async def all_statistics(request: Request) -> Response:
        begin(request, "statistics")
        stats = [model_statistics(info, plane.statistics(info.name)) for info in plane.collections()]
        return json_response({"model_stats": stats})

    @router.get("/v2/models/{name}/stats", summary="Counts of a collection since start", tags=["protocol"])
    @router.get("/v2/models/{name}/versions/{version}/stats", summary="As above, for one version", tags=["protocol"])
    async def statistics(request: Request, name: str, version: str = "") -> Response:
        begin(request, "statistics")
        info = plane.collection(name, read_version(version))
        return json_response({"model_stats": [model_statistics(info, plane.statistics(name))]})

    # After /v2/models/stats, whose path it would match too.
    @router.get("/v2/models/{name}", summary="Inputs and outputs of a collection", tags=["protocol"])
    @router.get("/v2/models/{name}/versions/{version}", summary="As above, for one version", tags=["protocol"])
    async def metadata(request: Request, name: str, version: str = "") -> Response:
        begin(request, "metadata")
        return json_response(model_metadata(plane.collection(name, read_version(version))))


def _readiness_response(readiness: Readiness) -> Response:
    if readiness.ready:
        return json_response({"ready": True})
    return error_response("not ready: " + "; ".join(readiness.reasons), status=503)


def _read_index_filter(body: bytes) -> bool:
    if not body:
        return False
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as exc:
        raise InvalidArgument(f"body: not JSON: {exc}") from None
    if not isinstance(document, dict):
        raise InvalidArgument(f"body: {shown(document)} is not a JSON object")
    for name, value in document.items():
        if name == "ready" and isinstance(value, bool):
            continue
        if name == "repository_name":
            raise NotFound(f"repository_name: {shown(value)}; there is one repository, without a name")
        raise InvalidArgument(f"{shown(name)}: {shown(value)}; the one field is ready, true or false")
    return document.get("ready") is True
