"""Owns the two listeners: their ports, how they start, and how they stop together; must not know what they serve."""

import asyncio
import math
import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager

import uvicorn

from export.contract import UserError
from service.grpc.server import build_server
from service.metrics import Metrics
from service.plane import Plane
from service.rest.app import build_app
from service.settings import Settings


async def start_edges(
    stack: AsyncExitStack, plane: Plane, metrics: Metrics, settings: Settings, listener: socket.socket
) -> int:
    """Start both edges; they stop together, each with the whole grace. Returns the gRPC port."""
    grpc_server = build_server(plane, metrics, settings)
    try:
        port = int(grpc_server.add_insecure_port(f"{settings.host}:{settings.grpc_port}"))
    except RuntimeError as exc:
        raise UserError(_busy("grpc", settings.host, settings.grpc_port)) from exc
    config = uvicorn.Config(
        build_app(plane, metrics, settings),
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=math.ceil(settings.drain_grace_s),
        server_header=False,
    )
    http_server = _Uvicorn(config)
    await grpc_server.start()
    serving = asyncio.create_task(http_server.serve(sockets=[listener]))

    async def stop() -> None:
        http_server.should_exit = True
        await asyncio.gather(serving, grpc_server.stop(settings.drain_grace_s))

    stack.push_async_callback(stop)
    while not http_server.started:
        if serving.done():
            serving.result()
        await asyncio.sleep(0.005)
    return port


class _Uvicorn(uvicorn.Server):
    """Uvicorn that leaves the signals to the composition root."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextmanager
def listen(kind: str, host: str, port: int) -> Iterator[socket.socket]:
    """A listening socket; ``kind`` is the command line option that changes its port.

    Raises:
        UserError: The port is taken, or the address is none of this machine's.
    """
    try:
        listener = socket.create_server((host, port), backlog=2048, reuse_port=False)
    except OSError as exc:
        raise UserError(_busy(kind, host, port)) from exc
    with listener:
        # Accepted connections inherit it. asyncio sets it only on sockets that were made with IPPROTO_TCP, and without it
        # a reply's second segment waits 40 ms for the client's delayed acknowledgement of the first.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield listener


def _busy(kind: str, host: str, port: int) -> str:
    return (
        f"cannot listen on {host}:{port}; choose another with --{kind}-port or KJTSERVE_{kind.upper()}_PORT (0 takes a free one), "
        f"or stop what uses it (`ss -ltnp 'sport = :{port}'` shows it)"
    )
