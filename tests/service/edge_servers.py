"""Starts both edges over a fake plane on free ports, in the test's own event loop."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import structlog
import uvicorn
from prometheus_client import CollectorRegistry

from service.grpc.server import build_server
from service.metrics import Metrics
from service.rest.app import build_app
from service.settings import Settings
from tests.service.fakes import FakePlane

# The default would format every local variable of a traceback, for seconds.
structlog.configure(
    processors=[
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.format_exc_info,
        structlog.processors.KeyValueRenderer(),
    ]
)


@dataclass(kw_only=True)
class Edges:
    plane: FakePlane
    metrics: Metrics
    registry: CollectorRegistry
    http_port: int
    grpc_port: int
    counted: dict[tuple[str, str], float] = field(default_factory=dict)

    @property
    def http(self) -> str:
        return f"127.0.0.1:{self.http_port}"

    @property
    def grpc(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    def count(self, route: str, code: str) -> float:
        """Requests counted since ``mark``."""
        return self.counts().get((route, code), 0.0) - self.counted.get((route, code), 0.0)

    def counts(self) -> dict[tuple[str, str], float]:
        return {
            (sample.labels["route"], sample.labels["code"]): sample.value
            for sample in next(iter(self.metrics.requests.collect())).samples
            if sample.name == "kjtserve_requests_total"
        }

    def mark(self) -> None:
        self.counted = self.counts()


@asynccontextmanager
async def serve_edges(plane: FakePlane, settings: Settings) -> AsyncIterator[Edges]:
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    app = build_app(plane, metrics, settings)
    http = uvicorn.Server(
        uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, access_log=False, timeout_graceful_shutdown=1)
    )
    task = asyncio.create_task(http.serve())
    await until(lambda: http.started or task.done())
    rpc = build_server(plane, metrics, settings)
    grpc_port = rpc.add_insecure_port("127.0.0.1:0")
    await rpc.start()
    try:
        yield Edges(
            plane=plane,
            metrics=metrics,
            registry=registry,
            http_port=http.servers[0].sockets[0].getsockname()[1],
            grpc_port=grpc_port,
        )
    finally:
        await rpc.stop(0)
        http.should_exit = True
        await task


async def until(condition: Callable[[], bool], *, within_s: float = 5.0) -> None:
    """Wait until ``condition`` holds; fail when it does not in time."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.005)
