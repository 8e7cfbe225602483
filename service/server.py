"""The composition root: builds every part, passes it by constructor, owns signals and the order of stopping."""

import asyncio
import os
import signal
import socket
import warnings
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import uvicorn
from prometheus_client import CollectorRegistry
from pydantic import ValidationError

from export.contract import RepositoryError, UserError, collections, versions
from service.batcher import Batcher
from service.catalog import ServedVersion, load_version
from service.dataplane import DataPlane, Served
from service.fanout import Fanout, Shard
from service.grpc.server import build_server
from service.health import Repair, ShardHealth
from service.log import configure_logging
from service.metrics import Metrics
from service.rest.app import build_app
from service.settings import Settings
from service.shards import GrpcShardClient
from service.triton import TritonServer

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A front tier that is up."""

    plane: DataPlane
    http_url: str
    grpc_address: str
    triton: TritonServer | None
    """The Triton that was started for it; None when the shards are somebody else's."""


def read_settings(**overrides: Any) -> Settings:
    """Settings from the environment; an override that is None is left to the environment.

    Raises:
        UserError: A setting breaks its rule; the message names it.
    """
    try:
        return Settings(**{name: value for name, value in overrides.items() if value is not None})
    except ValidationError as exc:
        problems = "; ".join(
            f"KJTSERVE_{'_'.join(str(part) for part in error['loc']).upper()}={error['input']!r}: {error['msg']}"
            for error in exc.errors()
        )
        raise UserError(f"settings: {problems}") from exc


async def run_server(
    repo: Path,
    settings: Settings,
    *,
    shards: Sequence[str] | None = None,
    on_ready: Callable[[Running], None] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then drain and return.

    Args:
        repo: Model repository.
        settings: The front tier's settings.
        shards: gRPC addresses of the shards' Tritons; None: start one here.
        on_ready: Called once, in a thread, when every shard has answered a probe.
    """
    configure_logging(json=settings.log_json, level=settings.log_level)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    # The signals work while a Triton is still coming up, too.
    async with AsyncExitStack() as stack:
        running = await _unless(stop, stack.enter_async_context(start(repo, settings, shards=shards)))
        if running is None:
            return
        ready = asyncio.create_task(_announce(running, on_ready))
        await stop.wait()
        ready.cancel()
        await _drain(running.plane, settings)
    log.info("stopped")


@asynccontextmanager
async def start(repo: Path, settings: Settings, *, shards: Sequence[str] | None = None) -> AsyncIterator[Running]:
    """A front tier on its ports; leaving the context stops accepting, then everything behind it.

    Raises:
        UserError: The repository, an address or a port is not usable.
    """
    # Replies of shards are views of received messages, which nothing here writes to.
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    served = load_served(repo)
    with _listen("http", settings.host, settings.http_port) as http:
        async with AsyncExitStack() as stack:
            metrics = Metrics(CollectorRegistry())
            plane = DataPlane(settings, metrics)
            triton = None if shards else await _start_triton(stack, repo, served)
            addresses = list(shards or [triton.grpc_address if triton else ""])
            repair = triton.repair if triton else None
            await _connect(stack, plane, served, addresses, settings=settings, metrics=metrics, repair=repair)
            grpc_port = await _start_grpc(stack, plane, metrics, settings)
            await _start_http(stack, build_app(plane, metrics, settings), http)
            running = Running(
                plane=plane,
                http_url=f"http://{settings.host}:{http.getsockname()[1]}",
                grpc_address=f"{settings.host}:{grpc_port}",
                triton=triton,
            )
            log.info(
                "serving",
                http=running.http_url,
                grpc=running.grpc_address,
                triton_metrics=triton.metrics_url if triton else None,
            )
            yield running


def load_served(repo: Path) -> list[ServedVersion]:
    """The newest version of every collection in a repository.

    Raises:
        RepositoryError: There is none, or one cannot be read.
    """
    names = list(collections(repo))
    if not names:
        raise RepositoryError(f"{repo}: holds no collection; `kjtserve export … --out {repo}` writes one")
    return [load_version(repo, name, versions(repo, name)[-1]) for name in names]


async def _start_triton(stack: AsyncExitStack, repo: Path, served: Sequence[ServedVersion]) -> TritonServer:
    models = [model for version in served for model in version.models_S]
    triton = TritonServer(repo, models)
    stack.push_async_callback(triton.stop)
    await triton.start()
    _spawn(stack, triton.watch())
    return triton


async def _connect(
    stack: AsyncExitStack,
    plane: DataPlane,
    served: Sequence[ServedVersion],
    addresses: Sequence[str],
    *,
    settings: Settings,
    metrics: Metrics,
    repair: Repair | None,
) -> None:
    """Give every served version its shards, its health probes and its batcher."""
    executor = ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0)), thread_name_prefix="tensor")
    stack.callback(executor.shutdown, wait=True, cancel_futures=True)
    clients = {address: GrpcShardClient(address) for address in addresses}
    for client in clients.values():
        stack.push_async_callback(client.close)
    for version in served:
        if len(addresses) not in {1, version.num_shards}:
            raise UserError(
                f"--shards: {len(addresses)} addresses, but {version.collection} version {version.version} has "
                f"{version.num_shards} shards; give one address for each shard in order, or one for all"
            )
        shards = []
        for index in range(version.num_shards):
            client = clients[addresses[index % len(addresses)]]
            health = ShardHealth(
                version,
                index,
                client,
                interval_s=settings.probe_interval_s,
                timeout_s=settings.probe_timeout_s,
                repair=repair,
            )
            shards.append(Shard(client=client, health=health))
        fanout = Fanout(version, shards, metrics=metrics, executor=executor, offload_ids=settings.offload_ids)
        batcher = Batcher(fanout.run, max_weight=settings.max_batch_ids, wait_s=settings.max_batch_wait_us / 1e6)
        stack.push_async_callback(batcher.close)
        await asyncio.gather(*(shard.health.probe() for shard in shards))
        for shard in shards:
            _spawn(stack, shard.health.run())
        plane.serve(Served(version=version, health=tuple(shard.health for shard in shards), batcher=batcher))


async def _start_grpc(stack: AsyncExitStack, plane: DataPlane, metrics: Metrics, settings: Settings) -> int:
    server = build_server(plane, metrics, settings)
    try:
        port = server.add_insecure_port(f"{settings.host}:{settings.grpc_port}")
    except RuntimeError as exc:
        raise UserError(_busy("grpc", settings.host, settings.grpc_port)) from exc
    await server.start()
    stack.push_async_callback(server.stop, settings.drain_grace_s)
    return int(port)


async def _start_http(stack: AsyncExitStack, app: Any, listener: socket.socket) -> None:
    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1, server_header=False
    )
    server = _Uvicorn(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))

    async def stop() -> None:
        server.should_exit = True
        await task

    stack.push_async_callback(stop)
    while not server.started:
        if task.done():
            task.result()
        await asyncio.sleep(0.005)


class _Uvicorn(uvicorn.Server):
    """Uvicorn that leaves the signals to the composition root."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _drain(plane: DataPlane, settings: Settings) -> None:
    """Readiness false, serve on for a while, then wait for what is in flight."""
    plane.drain()
    log.info("draining", inflight_requests=plane.inflight_requests)
    await asyncio.sleep(settings.drain_delay_s)
    deadline = asyncio.get_running_loop().time() + settings.drain_grace_s
    while plane.inflight_requests and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(0.02)


async def _announce(running: Running, on_ready: Callable[[Running], None] | None) -> None:
    while not running.plane.readiness().ready:
        await asyncio.sleep(0.05)
    log.info("ready", http=running.http_url, grpc=running.grpc_address)
    if on_ready is not None:
        await asyncio.to_thread(on_ready, running)


async def _unless(stop: asyncio.Event, work: Any) -> Any:
    """The result of ``work``; None, with the work cancelled, if ``stop`` comes first."""
    task, stopped = asyncio.ensure_future(work), asyncio.create_task(stop.wait())
    await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if task.done():
        return task.result()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return None


def _spawn(stack: AsyncExitStack, work: Any) -> None:
    """Run ``work`` beside the server until the stack unwinds."""
    task = asyncio.create_task(work)

    async def stop() -> None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    stack.push_async_callback(stop)


@contextmanager
def _listen(kind: str, host: str, port: int) -> Iterator[socket.socket]:
    try:
        listener = socket.create_server((host, port), backlog=2048, reuse_port=False)
    except OSError as exc:
        raise UserError(f"{_busy(kind, host, port)} ({exc.strerror})") from exc
    with listener:
        # Accepted connections inherit it. asyncio sets it only on sockets that were made with IPPROTO_TCP, and without it
        # a reply's second segment waits 40 ms for the client's delayed acknowledgement of the first.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield listener


def _busy(kind: str, host: str, port: int) -> str:
    return (
        f"cannot listen on {host}:{port}; choose another with --{kind}-port (0 takes a free one), "
        f"or stop what uses it (`ss -ltnp 'sport = :{port}'` shows it)"
    )
