"""Owns the gRPC server: its services and its limits. Binding a port, starting and stopping are its owner's."""

import grpc
from grpc_reflection.v1alpha import reflection
from tritonclient.grpc import service_pb2

from service.grpc.health import SERVICE as HEALTH_SERVICE
from service.grpc.health import Health
from service.grpc.methods import Methods
from service.metrics import Metrics
from service.offload import Offload
from service.plane import Plane
from service.settings import Settings

INFERENCE_SERVICE = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name

FRAME_BYTES = 64 * 1024
"""Room beside the tensors for names, shapes and parameters."""


def build_server(plane: Plane, metrics: Metrics, settings: Settings) -> grpc.aio.Server:
    """The gRPC server, not bound yet: call ``add_insecure_port``, then ``start``.

    Args:
        plane: Who answers.
        metrics: Where calls are counted.
        settings: Size limits.
    """
    server = grpc.aio.server(
        options=(
            ("grpc.max_receive_message_length", settings.max_request_bytes),
            ("grpc.max_send_message_length", min(settings.max_reply_bytes + FRAME_BYTES, (1 << 31) - 1)),
            # Two servers on one port would share its calls in silence; a busy port must be an error.
            ("grpc.so_reuseport", 0),
        )
    )
    methods = Methods(plane, Offload()).handlers(metrics)
    health = Health(plane, interval_s=settings.probe_interval_s).handlers(metrics)
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler(INFERENCE_SERVICE, methods),
            grpc.method_handlers_generic_handler(HEALTH_SERVICE, health),
        )
    )
    reflection.enable_server_reflection((INFERENCE_SERVICE, HEALTH_SERVICE, reflection.SERVICE_NAME), server)
    return server
