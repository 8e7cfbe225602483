"""Owns finding free loopback ports for a Triton, and telling that one was lost to somebody else meanwhile."""

import asyncio
import contextlib
import socket
from dataclasses import dataclass

HOST = "127.0.0.1"
METRICS_TIMEOUT_S = 5.0
"""Time for the metrics page to come up once the gRPC service is, and for it to answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """Where one Triton listens, on loopback only."""

    grpc: int
    metrics: int


def free_ports() -> Ports:
    """Ports that nobody uses at this moment."""
    with socket.create_server((HOST, 0)) as grpc, socket.create_server((HOST, 0)) as metrics:
        return Ports(grpc=grpc.getsockname()[1], metrics=metrics.getsockname()[1])


async def serves_metrics(port: int) -> bool:
    """Whether Triton's metrics page is there: it comes after the gRPC service, and a taken port ends Triton then."""
    try:
        async with asyncio.timeout(METRICS_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(HOST, port)
            with contextlib.closing(writer):
                writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
                page = await reader.read()
    except (OSError, TimeoutError):
        return False
    return b" 200 " in page[:16] and b"\nnv_" in page
