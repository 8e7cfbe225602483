"""Owns how a version appears in a repository, and how it goes: one writer at a time, staged, all or nothing.

A version is staged beside its final place, and appears by one rename after everything in it is on the disk. Whatever
fails before that leaves earlier versions, their links and configurations as they were. Must not know what is in a
version's files.
"""

import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from export.contract.layout import CONFIG_FILE, MANIFEST_FILE, RepositoryError, version_dir
from export.contract.manifest import Manifest, StateFile

_LOCK_FILE = ".lock"
_STAGING = ".staging-"


@contextmanager
def lock_collection(repo: Path, collection: str) -> Iterator[None]:
    """Be the only writer of a collection; what an earlier one that died left behind is cleared first.

    Raises:
        RepositoryError: Another writer of the collection is at work.
    """
    root = repo / collection
    root.mkdir(parents=True, exist_ok=True)
    with (root / _LOCK_FILE).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise RepositoryError(
                f"{root}: another export of {collection!r} is running; wait until it is done"
            ) from exc
        _clear_leftovers(repo, collection)
        yield


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


def publish_files(repo: Path, directory: Path, manifest: Manifest, content: bytes, configs: Mapping[str, str]) -> None:
    """Make a staged version visible: manifest, Triton's configurations and links, then one rename.

    Args:
        repo: The repository.
        directory: What ``stage`` gave, with the version's files in it.
        manifest: The version's manifest.
        content: The manifest's file, written last, as the completeness marker.
        configs: config.pbtxt of the Triton models that get a link to the version. A delta is no version of any: its base's
            process answers for it.

    Raises:
        RepositoryError: The version is visible, but the disk did not confirm it.
        OSError: The disk failed before; nothing is visible.
    """
    write_file(directory / MANIFEST_FILE, content)
    for place in directory.iterdir():
        if place.is_dir():
            _sync(place)
    _sync(directory)
    target = version_dir(repo, manifest.collection, manifest.version)
    models = {shard.model: shard.index for shard in manifest.shards}
    with ExitStack() as undo:
        try:
            for model, config in configs.items():
                _place_model(repo / model, manifest, models[model], config, undo)
            directory.rename(target)
        finally:
            if target.exists():
                undo.pop_all()
    try:
        _sync(target.parent)
        _sync(repo)
    except OSError as exc:
        raise RepositoryError(
            f"{exc.filename or target}: version {manifest.version} is published, but may not survive a power loss: "
            f"{exc.strerror or exc}; run sync, and export again under a new number if it is gone after one"
        ) from exc


def remove_version(repo: Path, collection: str, version: int) -> None:
    """Unpublish a version by one rename, then remove its links and files; call it with the collection's lock.

    Raises:
        OSError: It cannot be removed.
    """
    directory = version_dir(repo, collection, version)
    aside = directory.with_name(f"{_STAGING}removed-{version}-{os.getpid()}")
    directory.rename(aside)
    for model in _models(repo, collection):
        link = model / str(version)
        if link.is_symlink():
            link.unlink()
    shutil.rmtree(aside)


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
    """Remove staging directories, and links to versions that never appeared; their writer is dead, we hold its lock."""
    for staging in (repo / collection).glob(f"{_STAGING}*"):
        shutil.rmtree(staging)
    for model in _models(repo, collection):
        for link in model.iterdir():
            if link.is_symlink() and not link.exists():
                link.unlink()


def _models(repo: Path, collection: str) -> Iterator[Path]:
    """Directories of a collection's Triton models."""
    # Not a glob: `clicks_shard_*` also matches the models of a collection named clicks_shard_x, whose lock we do not hold.
    model = re.compile(re.escape(collection) + r"_shard_\d+")
    for directory in repo.iterdir():
        if model.fullmatch(directory.name) and directory.is_dir():
            yield directory


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
