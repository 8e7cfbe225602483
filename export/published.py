"""Owns the reading of published versions: which there are, and whether their files are whole; must not import torch."""

from collections.abc import Sequence
from pathlib import Path

from export.contract import (
    Kind,
    Manifest,
    RepositoryError,
    Runtime,
    check_digest,
    read_manifest,
    shard_dir,
    version_dir,
    versions,
)
from export.errors import ExportError
from export.options import check_number
from export.progress import Progress


def find_version(repo: Path, collection: str, version: int | None) -> Manifest:
    """Manifest of a version; None: the newest.

    Raises:
        ExportError: There is no such collection or version, or its manifest cannot be read.
    """
    if version is not None:
        check_number("version", version)
    published = versions(repo, collection)
    if not published:
        raise ExportError(f"{repo}: holds no version of a collection {collection!r}")
    try:
        return read_manifest(repo, collection, published[-1] if version is None else version)
    except RepositoryError as exc:
        raise ExportError(str(exc)) from exc


def check_runtime(repo: Path, collection: str, runtime: Runtime) -> None:
    """Triton's configuration of a shard is one for all versions, so what runs them is too.

    Raises:
        ExportError: The collection has a version for the other runtime.
    """
    newest = _newest(repo, collection)
    if newest is not None and newest.runtime is not runtime:
        raise ExportError(
            f"runtime {runtime.value!r}: version {newest.version} of {collection!r} is for {newest.runtime.value!r}, and "
            f"Triton runs all versions of a shard alike; use --name or --out of its own, or --runtime {newest.runtime.value}"
        )


def check_devices(repo: Path, collection: str, devices: Sequence[str]) -> None:
    """Triton's configuration of a shard is one for all versions, so they lie on one device.

    Args:
        repo: The model repository.
        collection: Its name.
        devices: Of each shard; one that the newest version does not have may be anywhere.

    Raises:
        ExportError: The collection has a version with a shard on another device.
    """
    newest = _newest(repo, collection)
    if newest is None:
        return
    for index, (device, shard) in enumerate(zip(devices, newest.shards, strict=False)):
        if shard.device != device:
            raise ExportError(
                f"device {device!r} of shard {index}: version {newest.version} of {collection!r} has it on "
                f"{shard.device!r}, and Triton runs all versions of a shard alike; use the same --device, or --name or --out "
                "of its own"
            )


def _newest(repo: Path, collection: str) -> Manifest | None:
    """None: there is no version, or none that this kjtserve serves."""
    try:
        return find_version(repo, collection, None)
    except ExportError:
        return None


def check_files(repo: Path, manifest: Manifest, on_progress: Progress) -> None:
    """Compare size and SHA-256 of every file of a version, and where Triton's links lead.

    Raises:
        ExportError: A file is missing, cut or changed, or a link leads elsewhere; names it.
    """
    directory = version_dir(repo, manifest.collection, manifest.version)
    total, done = sum(file.size_bytes for file in manifest.files), 0

    def read(size: int) -> None:
        nonlocal done
        done += size
        on_progress("checking files", done, total)

    for file in manifest.files:
        try:
            check_digest(directory, manifest, file.path, on_bytes=read)
        except RepositoryError as exc:
            raise ExportError(str(exc)) from exc
    for shard in manifest.shards if manifest.kind is Kind.BASE else ():
        link = repo / shard.model / str(manifest.version)
        if not link.exists() or link.resolve() != shard_dir(directory, shard.index).resolve():
            raise ExportError(f"{link}: does not lead to {shard_dir(directory, shard.index)}, so Triton cannot load it")
