"""Owns the command ``kjtserve sync``: options in, rounds out, for as long as it is told to.

Heavy imports wait until the command runs, so that ``--help`` is quick.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from export.contract import RepositoryError, UserError

if TYPE_CHECKING:
    from service.sync.metrics import SyncMetrics
    from service.sync.syncer import Syncer


def sync(  # noqa: PLR0917  typer calls it by keyword
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="Where versions are published: a path, or what fsspec knows, e.g. s3://bucket/repo, gcs://bucket/repo, "
            "https://host/repo. Credentials come from the environment.",
        ),
    ],
    dest: Annotated[Path, typer.Argument(metavar="DEST", help="This machine's own repository; made if missing.")],
    name: Annotated[
        list[str] | None, typer.Option("--name", help="Collection to bring; may be given again. [dim]default: all")
    ] = None,
    shard: Annotated[
        list[int] | None,
        typer.Option("--shard", min=0, help="Bring this shard's files; may be given again. [dim]default: all"),
    ] = None,
    front: Annotated[
        bool, typer.Option("--front", help="Bring what a front tier needs, and no shard's state.")
    ] = False,
    keep: Annotated[int, typer.Option(min=1, help="Versions to keep of each collection, and the bases they need.")] = 4,
    every: Annotated[
        float | None, typer.Option(metavar="SECONDS", min=0.05, help="Go on, looking so often. [dim]default: once")
    ] = None,
    triton: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="gRPC address of the Triton that serves DEST: it is told to load new bases."
        ),
    ] = None,
    metrics_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Serve Prometheus metrics of the syncing on this port.")
    ] = None,
) -> None:
    """Bring published versions to this machine's disk, check them, and have its Triton load new bases.

    A version appears in DEST whole or not at all, after every file of it was held against its checksum. This is what runs
    beside each shard.

    [bold]Example[/bold]: kjtserve sync s3://models/repo /models --name clicks --shard 0 --triton 127.0.0.1:8001 --every 1
    """
    from service.log import configure_logging
    from service.sync.metrics import SyncMetrics
    from service.sync.source import Source
    from service.sync.syncer import Syncer

    if front and shard:
        raise typer.BadParameter("give --front or --shard, not both: a front tier needs no shard's files")
    configure_logging(json=every is not None, level="info")
    metrics = SyncMetrics()
    if metrics_port is not None:
        metrics.serve(metrics_port)
    with _progress(quiet=every is not None) as on_bytes:
        syncer = Syncer(
            Source(source),
            dest,
            names=name or (),
            shards=frozenset() if front else shard,
            keep=keep,
            load=None if triton is None else _loader(dest, triton),
            on_bytes=on_bytes,
        )
        if every is not None:
            _repeat(syncer, metrics, every)
            return
        done = syncer.round()
        metrics.count(done)
    for collection, version in done.brought:
        typer.echo(f"{dest}: brought {collection} version {version}")
    if done.failed:
        collection, version, reason = done.failed[0]
        raise UserError(f"{collection} version {version} was not brought: {reason}")
    if not done.brought:
        typer.echo(f"{dest}: nothing is missing")


def _repeat(syncer: "Syncer", metrics: "SyncMetrics", every_s: float) -> None:
    """Round after round, until SIGTERM or SIGINT; what fails is tried again, less and less often."""
    import signal

    import structlog

    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    log = structlog.get_logger(__name__)
    failures = 0
    while not stop.is_set():
        try:
            done = syncer.round()
        except (RepositoryError, OSError) as exc:
            log.error("source_unreadable", reason=str(exc))  # noqa: TRY400 - its message says it all
            metrics.unreadable()
            failures += 1
        else:
            metrics.count(done)
            failures = failures + 1 if done.failed else 0
        stop.wait(min(every_s * 2 ** min(failures, 6), max(every_s, 30.0)))


def _loader(dest: Path, address: str) -> Callable[[str, Sequence[int]], None]:
    """Has a Triton hold just some bases of a model; asks only when they change."""
    import asyncio

    from service.triton_control import TritonCallError, load_model
    from service.triton_versions import pin_versions, read_config

    held: dict[str, tuple[int, ...]] = {}

    def load(model: str, bases: Sequence[int]) -> None:
        if held.get(model) == tuple(bases):
            return
        try:
            asyncio.run(load_model(address, model, pin_versions(read_config(dest, model), bases)))
        except TritonCallError as exc:
            raise RepositoryError(f"{address}: {exc}") from exc
        held[model] = tuple(bases)

    return load


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda _what, _done, _total: None
        return
    with Progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), console=console
    ) as progress:
        task = progress.add_task("looking", total=None)
        yield lambda what, done, total: progress.update(task, description=what, completed=done, total=total)
