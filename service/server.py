"""The composition root: builds every part, passes it by constructor, owns signals and the order of stopping."""

import asyncio
import functools
import signal
import warnings
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
from prometheus_client import CollectorRegistry
from pydantic import ValidationError

from export.contract import (
    RepositoryError,
    Runtime,
    UserError,
    check_size,
    collections,
    read_manifest,
    read_pin,
    version_dir,
    versions,
)
from service.catalog import ServedVersion, load_version
from service.dataplane import DataPlane
from service.grace import Grace
from service.listeners import listen, start_edges
from service.log import configure_logging
from service.metrics import Metrics
from service.settings import Settings
from service.triton import TritonServer
from service.versions.bases import OwnBases
from service.versions.connector import Connector
from service.versions.switcher import Switcher
from service.versions.watcher import Watcher

log = structlog.get_logger(__name__)

START_S = 120.0
START_S_PER_MODEL = 20.0
"""Time that a Triton has to come up: a model takes about 3 s of a core, on a machine that may be busy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A front tier that is up."""

    plane: DataPlane
    http_url: str
    grpc_address: str
    triton: TritonServer | None
    """The Triton that was started for it; None when the shards are somebody else's."""
    broken: asyncio.Event
    """Set when a part that has to run for as long as the server ended in error."""


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
        await _unless(stop, running.broken.wait())
        ready.cancel()
        running.plane.drain()
        log.info("draining", inflight_requests=running.plane.inflight_requests)
        await asyncio.sleep(settings.drain_delay_s)
    log.info("stopped")
    if running.broken.is_set():
        raise UserError("a part of the server ended in error, see the log; it was stopped")


@asynccontextmanager
async def start(repo: Path, settings: Settings, *, shards: Sequence[str] | None = None) -> AsyncIterator[Running]:
    """A front tier on its ports; leaving the context stops accepting, then everything behind it.

    Raises:
        UserError: The repository, an address or a port is not usable.
    """
    # Replies of shards are views of received messages, which nothing here writes to.
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    served = load_served(repo, whole=shards is None)
    broken = asyncio.Event()
    with listen("http", settings.host, settings.http_port) as http:
        async with AsyncExitStack() as stack:
            metrics = Metrics(CollectorRegistry())
            plane = DataPlane(settings, metrics)
            grace = Grace(settings.drain_grace_s)
            triton = None if shards else await _start_triton(stack, repo, served, broken)
            # What versions use ends after the edges, and clients after the versions that use them.
            connector = Connector(
                await stack.enter_async_context(AsyncExitStack()),
                shards or [triton.grpc_address if triton else ""],
                settings=settings,
                metrics=metrics,
                spawn=functools.partial(_spawn, broken),
                repair=triton.repair if triton else None,
                grace=grace,
                num_clients=sum(version.num_shards for version in served),
            )
            watcher = Watcher(
                repo,
                functools.partial(
                    Switcher,
                    repo,
                    plane=plane,
                    connector=connector,
                    bases=None if triton is None else OwnBases(repo, triton, _bases(served)),
                    metrics=metrics,
                    settings=settings,
                ),
                stack=await stack.enter_async_context(AsyncExitStack()),
                spawn=functools.partial(_spawn, broken),
                interval_s=settings.watch_interval_s,
            )
            await watcher.start(served)
            grpc_port = await start_edges(stack, plane, metrics, settings, http)
            stack.callback(grace.left_s)  # the first to be called: what the edges take is not there for the shards
            running = Running(
                plane=plane,
                http_url=f"http://{settings.host}:{http.getsockname()[1]}",
                grpc_address=f"{settings.host}:{grpc_port}",
                triton=triton,
                broken=broken,
            )
            log.info(
                "serving",
                http=running.http_url,
                grpc=running.grpc_address,
                triton_metrics=triton.metrics_url if triton else None,
            )
            yield running


def load_served(repo: Path, *, whole: bool = True) -> list[ServedVersion]:
    """The version of every collection to begin with: the one that is pinned, else the newest that can be read.

    Args:
        repo: The model repository.
        whole: Whether it has to have the shards' files as well, for a Triton of our own.

    Raises:
        RepositoryError: There is none, or a collection has none that can be read.
    """
    names = list(collections(repo))
    if not names:
        raise RepositoryError(f"{repo}: holds no collection; `kjtserve export … --out {repo}` writes one")
    return [_choose_version(repo, name, whole=whole) for name in names]


def _choose_version(repo: Path, name: str, *, whole: bool) -> ServedVersion:
    pin = read_pin(repo, name)
    if pin is not None:
        return load_version(repo, name, pin)
    failure: RepositoryError | None = None
    for version in reversed(versions(repo, name)):
        try:
            for held in {read_manifest(repo, name, version).base, version} if whole else ():
                listed = read_manifest(repo, name, held)
                for file in listed.files:
                    check_size(version_dir(repo, name, held), listed, file.path)
            return load_version(repo, name, version)
        except RepositoryError as exc:
            failure = failure or exc
            log.error("version_skipped", collection=name, version=version, reason=str(exc))  # noqa: TRY400 - it says it all
    assert failure is not None
    raise failure


def _bases(served: Sequence[ServedVersion]) -> dict[str, frozenset[int]]:
    return {model: frozenset({version.base}) for version in served for model in version.models_S}


def _check_runtimes(served: Sequence[ServedVersion]) -> None:
    """Refuse what a Triton of our own has no backend for; its log would only name a missing library."""
    names = [version.collection for version in served if version.runtime is Runtime.PYTORCH]
    if names:
        raise UserError(
            f"collection {', '.join(names)}: exported with --runtime pytorch, but the Triton that is started here has no "
            "LibTorch backend; name servers that have it with --shards HOST:PORT,…, or export with --runtime python under "
            "another --name or --out"
        )


async def _start_triton(
    stack: AsyncExitStack, repo: Path, served: Sequence[ServedVersion], broken: asyncio.Event
) -> TritonServer:
    _check_runtimes(served)
    # Pinned, so that a version that is published meanwhile is nobody's business yet.
    models = {model: sorted(bases) for model, bases in _bases(served).items()}
    triton = TritonServer(repo, models, start_timeout_s=START_S + START_S_PER_MODEL * len(models))
    stack.push_async_callback(triton.stop)
    log.info("triton_starting", models=len(models), versions={each.collection: each.version for each in served})
    await triton.start()
    log.info("triton_ready", grpc=triton.grpc_address, metrics=triton.metrics_url, log=str(triton.log_path))
    _spawn(broken, stack, triton.watch())
    return triton


async def _announce(running: Running, on_ready: Callable[[Running], None] | None) -> None:
    while not running.plane.readiness().ready:
        await asyncio.sleep(0.05)
    log.info("ready", http=running.http_url, grpc=running.grpc_address)
    if on_ready is not None:
        try:
            await asyncio.to_thread(on_ready, running)
        except Exception:
            log.exception("on_ready_failed")


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


def _spawn(broken: asyncio.Event, stack: AsyncExitStack, work: Any) -> None:
    """Run ``work`` beside the server until the stack unwinds; should it end in error, say so and set ``broken``."""
    task = asyncio.create_task(work)

    def ended(task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (exc := task.exception()) is not None:
            log.error("part_broken", part=str(task.get_coro()), exc_info=exc)
            broken.set()

    async def stop() -> None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    task.add_done_callback(ended)
    stack.push_async_callback(stop)
