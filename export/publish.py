"""Owns how a version appears in a repository: one exporter at a time, staged, all or nothing.

A version is staged beside its final place, and appears by one rename after everything in it is on the disk. Whatever
fails before that leaves earlier versions, their links and configurations as they were. Must not know what is in a
version's files.
"""

import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from export.contract import INT64_MAX, Manifest, StateFile, version_dir
from export.contract.layout import CONFIG_FILE, MANIFEST_FILE, shard_dir
from export.errors import ExportError
from export.options import check_number

_LOCK_FILE = ".lock"
_STAGING = ".staging-"


@contextmanager
def lock_collection(repo: Path, collection: str) -> Iterator[None]:
    """Be the only exporter of a collection; what an earlier one that died left behind is cleared first.

    Raises:
        ExportError: Another export of the collection is running.
    """
    root = repo / collection
    root.mkdir(parents=True, exist_ok=True)
    with (root / _LOCK_FILE).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise ExportError(f"{root}: another export of {collection!r} is running; wait until it is done") from exc
        _clear_leftovers(repo, collection)
        yield


def choose_version(repo: Path, collection: str, version: int | None) -> int:
    """The version to write: the one asked for if it is free, else the newest plus one.

    Raises:
        ExportError: It exists (versions are immutable), is no number that a version can have, or no number is left above.
    """
    taken = [int(path.name) for path in (repo / collection).iterdir() if path.name.isdecimal()]
    newest = max(taken, default=0)
    if version is None:
        if newest >= INT64_MAX:
            raise ExportError(
                f"version {newest} of {collection!r} leaves no number above it; give a free one as version"
            )
        return newest + 1
    check_number("version", version)
    if version in taken:
        advice = f"use --version {newest + 1}, or leave it out" if newest < INT64_MAX else "use a number that is free"
        raise ExportError(f"version {version} of {collection!r} exists and versions are immutable; {advice}")
    return version


@contextmanager
def stage(repo: Path, collection: str, version: int) -> Iterator[Path]:
    """An empty directory to build a version in; it is gone afterwards, published or not."""
    directory = repo / collection / f"{_STAGING}{version}-{os.getpid()}"
    directory.mkdir()
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def write_file(path: Path, content: bytes) -> StateFile:
    """Write a new file onto the disk; the path in the answer is the file's name only."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return StateFile(path=path.name, size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


def publish(repo: Path, directory: Path, manifest: Manifest, configs: list[str]) -> None:
    """Make a staged version visible: manifest, Triton's configurations and links, then one rename.

    Args:
        repo: The repository.
        directory: What ``stage`` gave, with every file of the manifest in it.
        manifest: Written last, as the completeness marker.
        configs: config.pbtxt of each shard.

    Raises:
        ExportError: The version is visible, but the disk did not confirm it.
        OSError: The disk failed before; nothing is visible.
    """
    write_file(directory / MANIFEST_FILE, (manifest.model_dump_json(indent=1) + "\n").encode())
    for shard in manifest.shards:
        _sync(shard_dir(directory, shard.index))
    _sync(directory)
    target = version_dir(repo, manifest.collection, manifest.version)
    with ExitStack() as undo:
        try:
            for shard, config in zip(manifest.shards, configs, strict=True):
                _place_model(repo / shard.model, manifest, shard.index, config, undo)
            directory.rename(target)
        finally:
            if target.exists():
                undo.pop_all()
    try:
        _sync(target.parent)
        _sync(repo)
    except OSError as exc:
        raise ExportError(
            f"{exc.filename or target}: version {manifest.version} is published, but may not survive a power loss: "
            f"{exc.strerror or exc}; run sync, and export again under a new number if it is gone after one"
        ) from exc


def _place_model(model: Path, manifest: Manifest, shard: int, config: str, undo: ExitStack) -> None:
    """Give Triton the shard's configuration and the link that becomes its version."""
    if not model.is_dir():
        model.mkdir()
        undo.callback(model.rmdir)
    path = model / CONFIG_FILE
    before = path.read_text(encoding="utf-8") if path.exists() else None
    if before != config:
        _replace(path, config)
        if before is None:
            undo.callback(path.unlink)
        else:
            undo.callback(_replace, path, before)
    link = model / str(manifest.version)
    link.symlink_to(Path("..", manifest.collection, str(manifest.version), f"shard_{shard}"))
    undo.callback(link.unlink)
    _sync(model)


def _replace(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}")
    draft.unlink(missing_ok=True)
    write_file(draft, text.encode())
    draft.replace(path)


def _clear_leftovers(repo: Path, collection: str) -> None:
    """Remove staging directories, and links to versions that never appeared; their exporter is dead, we hold its lock."""
    for staging in (repo / collection).glob(f"{_STAGING}*"):
        shutil.rmtree(staging)
    # Not a glob: `clicks_shard_*` also matches the models of a collection named clicks_shard_x, whose lock we do not hold.
    model = re.compile(re.escape(collection) + r"_shard_\d+")
    for directory in repo.iterdir():
        if model.fullmatch(directory.name) and directory.is_dir():
            for link in directory.iterdir():
                if link.is_symlink() and not link.exists():
                    link.unlink()


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
