"""Owns the exporter's commands: options in, one line or a table out; must not know how an export is done.

The root of the command line registers the functions and prints ``ExportError``. Heavy imports wait until a command
runs, so that ``--help`` is quick.
"""

import dataclasses
import json
import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from export.contract import (
    OutOfRange,
    RepositoryError,
    RowDtype,
    Runtime,
    Stopped,
    Unknown,
    check_collection_name,
    collections,
    versions,
)
from export.options import Evicted
from export.progress import Progress
from export.terminal import is_first, show_progress

if TYPE_CHECKING:
    from torch import nn


CHECKPOINT_HELP = (
    "A torch.distributed.checkpoint directory, written by any number of ranks: where the numbers are. It is mapped, not "
    "loaded."
)
EVICTED_HELP = "When a live module's ids were evicted and evict() was not called: refuse, or serve the rows that it would name as zeros."


def _check_name(name: str) -> str:
    try:
        return check_collection_name(name)
    except ValueError as exc:
        raise typer.BadParameter(str(exc)) from exc


def export(  # noqa: PLR0917  typer calls it by keyword
    module: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FACTORY",
            help="What to export: a Python module, and in it a TorchRec [bold]EmbeddingCollection[/bold] or "
            "[bold]ManagedCollisionEmbeddingCollection[/bold], or a function without arguments that returns one. "
            "The working directory is on the path.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="REPO", help="Triton model repository to write to; made if missing.")],
    name: Annotated[str, typer.Option(help="The collection's name, which clients ask for.", callback=_check_name)],
    shards: Annotated[
        int | None, typer.Option(min=1, help="Spread every table over this many shards. [dim]default: 1")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help="A plan.yaml that cuts each table its own way; instead of --shards.")
    ] = None,
    version: Annotated[
        int | None, typer.Option(min=1, help="Version to write; published ones never change. [dim]default: newest + 1")
    ] = None,
    unknown: Annotated[
        Unknown,
        typer.Option(
            help="Answer to an id that a managed-collision map does not hold: the row that the trained "
            "module gives in eval mode, or zeros."
        ),
    ] = Unknown.TRAINING,
    out_of_range: Annotated[
        OutOfRange, typer.Option(help="Answer to an id that a plain table has no row for: an error, or zeros.")
    ] = OutOfRange.REJECT,
    checkpoint: Annotated[Path | None, typer.Option(metavar="DCP_DIR", help=CHECKPOINT_HELP)] = None,
    row_dtype: Annotated[
        RowDtype,
        typer.Option(
            help="How shards store rows: the trainer's own numbers, or in half of the bytes, or in a quarter and 8 bytes for "
            "each row, with a bound on the error in the manifest."
        ),
    ] = RowDtype.FP32,
    runtime: Annotated[
        Runtime,
        typer.Option(
            help="What of Triton runs the shards: the Python backend, or pytorch_libtorch, for servers that have LibTorch "
            "and FBGEMM's operators."
        ),
    ] = Runtime.PYTHON,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="cpu|cuda:N", help="Where every shard's state lies. [dim]default: as the plan says, else cpu"
        ),
    ] = None,
    evicted: Annotated[Evicted, typer.Option(help=EVICTED_HELP)] = Evicted.REFUSE,
) -> None:
    """Export a trained TorchRec collection to a Triton model repository.

    Every answer of the written shards is held against the module first; a version that differs is not published.

    [bold]Example[/bold]: kjtserve export training.model:build --out repo --name clicks --shards 2

    What several ranks trained comes from their checkpoint; MODULE:FACTORY then gives the configs only, and may build on the
    meta device. Under [bold]torchrun[/bold] the ranks share the work: each writes some of the shards.

    [bold]Example[/bold]: torchrun --no-python --nproc-per-node 2 kjtserve export training.model:build --checkpoint step_9000
    --out repo --name clicks --shards 8

    A [bold]plan.yaml[/bold] cuts tables one by one; those that it leaves out are spread over all shards:

    shards: 3

    tables: {item: {shard: 1}, category: {rows: [4, 3, 3]}, brand: {columns: [[0, 8], [2, 8]]}, country: {shards: all}}

    rows and columns are sizes, one for each shard, or pairs of shard and size in their order. Managed-collision tables
    have {routing: hash}, or {routing: training}, which keeps TorchRec's buckets whole. devices: cuda:0, or one for each
    shard.
    """
    if shards is not None and plan is not None:
        raise typer.BadParameter("give --shards or --plan, not both: the plan says how many shards there are")
    _check_target(module)
    from export.report import describe_shards, describe_tables

    with show_progress() as show, _ended_by_sigterm(show) as on_progress:
        on_progress("loading torch and torchrec", 0, 1)
        with _sigterm_held_back():
            from export.collection import export_collection
            from export.team import join_team

        on_progress("loading torch and torchrec", 1, 1)
        with join_team() as team:
            manifest = export_collection(
                _load(module, on_progress),
                out,
                name=name,
                num_shards=shards,
                plan=plan,
                version=version,
                unknown=unknown,
                out_of_range=out_of_range,
                checkpoint=checkpoint,
                row_dtype=row_dtype,
                runtime=runtime,
                device=device,
                evicted=evicted,
                team=team,
                on_progress=on_progress,
            )
    if is_first():
        console = Console()
        published = f"{out}: published {name} version {manifest.version}"
        console.print(published, markup=False, highlight=False, soft_wrap=True)
        console.print(describe_tables(manifest))
        console.print(describe_shards(manifest))


def delta(  # noqa: PLR0917  typer calls it by keyword
    module: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FACTORY",
            help="The module as it is now; with --checkpoint, its configs. See `kjtserve export`.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="REPO", help="Triton model repository that holds the base.")],
    name: Annotated[str | None, typer.Option(help="Collection. [dim]default: the only one")] = None,
    base: Annotated[
        int | None, typer.Option(min=1, help="Version to lay it over. [dim]default: the newest base")
    ] = None,
    version: Annotated[int | None, typer.Option(min=1, help="Version to write. [dim]default: newest + 1")] = None,
    checkpoint: Annotated[Path | None, typer.Option(metavar="DCP_DIR", help=CHECKPOINT_HELP)] = None,
    evicted: Annotated[Evicted, typer.Option(help=EVICTED_HELP)] = Evicted.REFUSE,
) -> None:
    """Publish what a module answers otherwise than a published base: changed rows, new ids, evicted ids.

    A delta holds all that differs from its base, so that any delta can be skipped. Front tiers take it up within
    milliseconds, without a new process. Placement, row dtype and rules are the base's.

    [bold]Example[/bold]: kjtserve delta training.model:build --checkpoint step_9500 --out repo --name clicks
    """
    _check_target(module)
    from export.report import describe_overlay

    collection = _collection(out, name)
    with show_progress() as show, _ended_by_sigterm(show) as on_progress:
        on_progress("loading torch and torchrec", 0, 1)
        with _sigterm_held_back():
            from export.collection import export_delta

        on_progress("loading torch and torchrec", 1, 1)
        manifest = export_delta(
            _load(module, on_progress),
            out,
            name=collection,
            base=base,
            version=version,
            checkpoint=checkpoint,
            evicted=evicted,
            on_progress=on_progress,
        )
    console = Console()
    published = f"{out}: published {collection} version {manifest.version}, a delta on base {manifest.base}"
    console.print(published, markup=False, highlight=False, soft_wrap=True)
    console.print(describe_overlay(manifest))


def diff(
    repo: Annotated[Path, typer.Argument(metavar="REPO", help="Triton model repository.")],
    older: Annotated[int, typer.Argument(metavar="V1", min=1, help="A version.")],
    newer: Annotated[int, typer.Argument(metavar="V2", min=1, help="Another version.")],
    name: Annotated[str | None, typer.Option(help="Collection. [dim]default: the only one")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print the numbers as a JSON list.")] = False,
) -> None:
    """Show what changed from one version to another: ids added, evicted and moved, and rows with other numbers.

    Both versions are asked for every id that either holds, so the numbers are what clients see.

    [bold]Example[/bold]: kjtserve diff repo 3 7 --name clicks
    """
    from export.report import describe_diff

    collection = _collection(repo, name)
    with show_progress() as on_progress:
        on_progress("loading torch and torchrec", 0, 1)
        from export.diff import diff_versions

        on_progress("loading torch and torchrec", 1, 1)
        found = diff_versions(repo, collection, older, newer, on_progress=on_progress)
    if json_output:
        typer.echo(json.dumps([dataclasses.asdict(table) for table in found], indent=1))
        return
    Console().print(describe_diff(found))


def verify(  # noqa: PLR0917  typer calls it by keyword
    repo: Annotated[Path, typer.Argument(metavar="REPO", help="Triton model repository.")],
    against: Annotated[
        str, typer.Option(metavar="MODULE:FACTORY", help="The module that the version was exported from.")
    ],
    name: Annotated[str | None, typer.Option(help="Collection. [dim]default: the only one")] = None,
    version: Annotated[int | None, typer.Option(min=1, help="Version. [dim]default: the newest")] = None,
    checkpoint: Annotated[Path | None, typer.Option(metavar="DCP_DIR", help=CHECKPOINT_HELP)] = None,
    evicted: Annotated[Evicted, typer.Option(help=EVICTED_HELP)] = Evicted.REFUSE,
) -> None:
    """Prove that a published version is whole and answers as the module does.

    Compares the checksum of every file, then every row and ids of every kind: bit by bit in fp32, within the bound that
    the manifest states otherwise.

    [bold]Example[/bold]: kjtserve verify repo --against training.model:build --name clicks
    """
    from export.report import human_bytes

    _check_target(against)
    collection = _collection(repo, name)
    with show_progress() as on_progress:
        on_progress("loading torch and torchrec", 0, 1)
        from export.collection import verify_version

        on_progress("loading torch and torchrec", 1, 1)
        report = verify_version(
            repo,
            collection,
            _load(against, on_progress),
            version,
            checkpoint=checkpoint,
            evicted=evicted,
            on_progress=on_progress,
        )
    how = f"numbers within ±{report.max_error:.2g}" if report.max_error else "bit by bit"
    Console().print(
        f"{repo}: {report.collection} version {report.version} is whole and answers as {against} does: "
        f"{report.files} files ({human_bytes(report.bytes)}), {report.ids:,} ids compared, {how}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def inspect(
    repo: Annotated[Path, typer.Argument(metavar="REPO", help="Triton model repository.")],
    name: Annotated[str | None, typer.Option(help="Collection. [dim]default: all of them")] = None,
    version: Annotated[int | None, typer.Option(min=1, help="Version. [dim]default: the newest of each")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print the manifests as a JSON list.")] = False,
) -> None:
    """Show tables, shards, occupancy and sizes of what a repository holds.

    [bold]Example[/bold]: kjtserve inspect repo --name clicks --json
    """
    from export.published import find_version
    from export.report import describe_version

    names = [name] if name is not None else _collections(repo)
    manifests = [find_version(repo, each, version) for each in names]
    if json_output:
        typer.echo(json.dumps([manifest.model_dump(mode="json") for manifest in manifests], indent=1))
        return
    console = Console()
    if not manifests:
        console.print(
            f"{repo}: holds no collection; `kjtserve export --out {repo}` adds one", markup=False, soft_wrap=True
        )
    for manifest in manifests:
        console.print(describe_version(manifest, versions(repo, manifest.collection)))


def _check_target(target: str) -> None:
    module, colon, factory = target.partition(":")
    if not (module and colon and factory):
        raise typer.BadParameter(f"{target!r}: write MODULE:FACTORY, e.g. training.model:build")
    # Building a KeyedJaggedTensor makes torch log advice about tracing that no user of a command can act on.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)


def _load(target: str, on_progress: Progress) -> "nn.Module":
    from export.factory import load_module

    on_progress(f"loading {target}", 0, 1)
    module = load_module(target)
    on_progress(f"loading {target}", 1, 1)
    return module


def _collections(repo: Path) -> list[str]:
    from export.errors import ExportError

    try:
        found = list(collections(repo))
    except RepositoryError as exc:
        raise ExportError(str(exc)) from exc
    if not found:
        raise ExportError(f"{repo}: holds no collection; `kjtserve export … --out {repo}` writes one")
    return found


def _collection(repo: Path, name: str | None) -> str:
    from export.errors import ExportError

    if name is not None:
        return name
    names = _collections(repo)
    if len(names) != 1:
        raise ExportError(f"{repo}: holds {len(names)} collections {names}; say which one with --name")
    return names[0]


@contextmanager
def _ended_by_sigterm(show: Progress) -> Iterator[Progress]:
    """Let SIGTERM end an export as Ctrl-C does, so that no half-written version stays behind on the disk.

    What is given shows a step. It raises again if SIGTERM came and was lost: a bare except, or C code that calls Python,
    may drop an exception of any kind.
    """
    came = False

    def stop(_signal: int, _frame: object) -> None:
        nonlocal came
        came = True
        raise _stopped()

    def on_progress(step: str, done: int, total: int) -> None:
        if came:
            raise _stopped()
        show(step, done, total)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield on_progress
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _sigterm_held_back() -> Iterator[None]:
    """Let SIGTERM wait until this is done: torch's C code imports Python modules, and loses what they raise or aborts."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _stopped() -> Stopped:
    return Stopped("stopped by SIGTERM; published versions are untouched")
