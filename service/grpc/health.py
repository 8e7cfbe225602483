"""Owns gRPC's standard health service over the dataplane's readiness: nothing is cached, so nothing can be stale."""

import asyncio
from collections.abc import AsyncIterator, Mapping

import grpc
from grpc_health.v1 import health_pb2

from service.errors import LookupFailed
from service.grpc.call import parse, unary
from service.grpc.converters import STATUS, failure_text
from service.metrics import Metrics
from service.plane import Plane

SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


class Health:
    """``grpc.health.v1.Health``: service ``""`` is the whole server, any other is a collection's name.

    Args:
        plane: Who knows.
        interval_s: Seconds between two looks for those who watch.
    """

    def __init__(self, plane: Plane, *, interval_s: float) -> None:
        self._plane = plane
        self._interval_s = interval_s

    def handlers(self, metrics: Metrics) -> Mapping[str, grpc.RpcMethodHandler]:
        """Both methods' handlers by name."""
        return {
            "Check": unary("health", health_pb2.HealthCheckRequest, self._check, metrics),
            "Watch": grpc.unary_stream_rpc_method_handler(self._watch),
        }

    async def _check(
        self,
        message: health_pb2.HealthCheckRequest,
        context: grpc.aio.ServicerContext,  # noqa: ARG002
    ) -> bytes:
        return self._response(message.service)

    async def _watch(self, data: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        try:
            service = parse(health_pb2.HealthCheckRequest, data).service
        except LookupFailed as exc:
            await context.abort(STATUS[exc.code], failure_text(exc))
        last = b""
        while True:
            try:
                now = self._response(service)
            except LookupFailed:
                # The protocol's rule for Watch: an unknown service may come to be, so the call goes on.
                now = _encode(health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
            if now != last:
                yield now
                last = now
            await asyncio.sleep(self._interval_s)

    def _response(self, service: str) -> bytes:
        ready = self._plane.readiness(service or None).ready
        return _encode(health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING)


def _encode(status: int) -> bytes:
    data: bytes = health_pb2.HealthCheckResponse(status=status).SerializeToString()
    return data
