"""Owns how a version comes to be: staged, written, checked and published, by one process or by a team of them.

Must not read a module or a plan: what to build is a ``VersionOrder``.
"""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from export.assembly import VersionOrder, describe_version, write_version
from export.check import check_loaded
from export.contract import Manifest, Shard, StateFile, Stopped, version_dir
from export.contract.publishing import stage
from export.errors import ExportError
from export.loaded import check_clean_process, load_version, portions
from export.oracle import eval_mode
from export.previous import Evicted, Previous, count_evicted, read_previous, with_evicted
from export.probes import write_probes
from export.progress import Progress
from export.publish import choose_version, lock_collection, publish
from export.published import check_devices, check_runtime
from export.team import Team
from export.triton_config import render_config


def build_version(
    repo: Path,
    order: VersionOrder,
    version: int | None,
    *,
    team: Team,
    shards: Sequence[int],
    on_progress: Progress,
) -> Manifest:
    """Build and publish a version; every rank of the team calls it.

    Args:
        repo: The model repository; the ranks of a team share its file system.
        order: What to build. Ranks may hold different rows, but of one collection with one plan and the same options.
        version: A number that is not taken; None: the newest plus one.
        team: Who builds it.
        shards: Which shards this rank writes and checks; over the team each one once.
        on_progress: Told (step, done, of how many).

    Raises:
        ExportError: Anything failed on any rank, or they want different things. Nothing is published then, and nothing
            half written stays; unless the message says that the version is published, but may not survive a power loss.
    """
    _check_same_options(team, order, version)
    with _told_if_published(repo, order.collection) as chosen, ExitStack() as stack, _disk_errors(repo):
        number, directory = team.on_first(lambda: _open_stage(stack, repo, order, version))
        chosen.append(number)
        mine = dataclasses.replace(order, version=number)
        team.each(lambda: _check_visible(directory))
        previous = team.each(lambda: read_previous(repo, order.collection))
        written = team.together(
            lambda: list(write_version(directory, mine, shards, on_progress, hashes=team.rank == 0))
        )
        draft = team.on_first(lambda: _describe(mine, [part for rank in written for part in rank]))
        finished = team.together(
            lambda: _finish(directory, draft, mine, previous, shards=shards, on_progress=on_progress)
        )
        manifest = team.on_first(lambda: _complete(draft, previous, finished))
        configs = [render_config(shard, manifest.runtime) for shard in manifest.shards]
        team.on_first(lambda: publish(repo, directory, manifest, configs))
        return manifest


def _finish(
    directory: Path,
    manifest: Manifest,
    order: VersionOrder,
    previous: Previous | None,
    *,
    shards: Sequence[int],
    on_progress: Progress,
) -> tuple[list[StateFile], Evicted]:
    """Check this rank's shards, write their probes, and count their evictions."""
    touched = None if order.base is None else order.base.touched
    probes: list[StateFile] = []
    check_clean_process(directory, manifest, shards)
    for portion in portions(manifest, shards):
        loaded = load_version(directory, manifest, portion)
        check_loaded(loaded, order.source, on_progress, touched=touched)
        with eval_mode(order.source.module):
            probes += write_probes(loaded, directory, order.source)
    return probes, {} if previous is None else count_evicted(manifest, order.source, previous, shards)


def _complete(
    manifest: Manifest, previous: Previous | None, finished: Sequence[tuple[list[StateFile], Evicted]]
) -> Manifest:
    files = [*manifest.files, *(file for probes, _ in finished for file in probes)]
    complete = manifest.model_copy(update={"files": tuple(sorted(files, key=lambda file: file.path))})
    if previous is None:
        return complete
    return with_evicted(complete, previous, {shard: counts for _, own in finished for shard, counts in own.items()})


def _check_same_options(team: Team, order: VersionOrder, version: int | None) -> None:
    """Hold what the ranks were asked for against each other, before the first of them writes."""
    asked: dict[str, object] = {
        "name": order.collection,
        "version": version,
        "num_shards": order.num_shards,
        "unknown": [table.unknown.value for table in order.tables],
        "out_of_range": order.out_of_range.value,
        "row_dtype": order.row_dtype.value,
        "runtime": order.runtime.value,
    }
    by_rank = team.together(lambda: asked)
    for field in asked:
        for rank, other in enumerate(by_rank):
            if other[field] != by_rank[0][field]:
                raise ExportError(
                    f"{field}: rank 0 was given {by_rank[0][field]!r} and rank {rank} {other[field]!r}; give every rank "
                    "the same"
                )


@contextmanager
def _told_if_published(repo: Path, collection: str) -> Iterator[list[int]]:
    """Let a signal that came after the rename say so; the version is put in the list once it is chosen."""
    chosen: list[int] = []
    try:
        yield chosen
    except Stopped as exc:
        if chosen and version_dir(repo, collection, chosen[0]).exists():
            raise Stopped(f"stopped after version {chosen[0]} of {collection!r} was published, which is whole") from exc
        raise


@contextmanager
def _disk_errors(repo: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise ExportError(f"{exc.filename or repo}: {exc.strerror or exc}") from exc


def _open_stage(stack: ExitStack, repo: Path, order: VersionOrder, version: int | None) -> tuple[int, Path]:
    stack.enter_context(lock_collection(repo, order.collection))
    check_runtime(repo, order.collection, order.runtime)
    check_devices(repo, order.collection, order.devices or ("cpu",) * order.num_shards)
    number = choose_version(repo, order.collection, version)
    if order.base is not None and number <= order.base.manifest.version:
        raise ExportError(
            f"version {number}: a delta comes after its base, which is {order.base.manifest.version}; leave version out"
        )
    return number, stack.enter_context(stage(repo, order.collection, number)).absolute()


def _check_visible(directory: Path) -> None:
    if not directory.is_dir():
        raise ExportError(
            f"{directory}: rank 0 made it, and it is not here; all ranks need the repository on a file system they share"
        )


def _describe(order: VersionOrder, parts: list[StateFile | Shard]) -> Manifest:
    shards = sorted((part for part in parts if isinstance(part, Shard)), key=lambda shard: shard.index)
    files = sorted((part for part in parts if isinstance(part, StateFile)), key=lambda file: file.path)
    return describe_version(order, tuple(files), tuple(shards), created_s=time.time())
