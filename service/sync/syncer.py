"""Owns one round of bringing versions: what is missing is staged, checked, published and loaded, and what is old goes.

Whatever fails leaves what is there as it is.
"""

import errno
import hashlib
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from export.contract import (
    Kind,
    Manifest,
    RepositoryError,
    StateFile,
    read_manifest,
    read_pin,
    versions,
    write_pin,
)
from export.contract.layout import PROBES_FILE
from export.contract.pins import parse_pin
from export.contract.publishing import lock_collection, publish_files, remove_version, stage
from service.sync.source import Source

log = structlog.get_logger(__name__)

Load = Callable[[str, Sequence[int]], None]
"""(model, bases) → the Triton that serves the destination holds just these; raises ``RepositoryError``."""


@dataclass(slots=True)
class Round:
    """What one round did."""

    brought: list[tuple[str, int]] = field(default_factory=list)
    """(Collection, version)."""
    removed: list[tuple[str, int]] = field(default_factory=list)
    failed: list[tuple[str, int, str]] = field(default_factory=list)
    """(Collection, version, why)."""
    bytes: int = 0


class Syncer:
    """Keeps a directory up to date with a repository elsewhere.

    Args:
        source: Where versions are published.
        dest: A directory on this machine, a model repository of its own.
        names: Collections to bring; none: all.
        shards: Shards whose files to bring; None: all of them.
        keep: Versions to keep of each collection, and the bases that they need.
        load: Tells a Triton which bases to hold; None: nobody.
        on_bytes: Told (what, bytes done, of how many).
    """

    def __init__(
        self,
        source: Source,
        dest: Path,
        *,
        names: Collection[str] = (),
        shards: Collection[int] | None = None,
        keep: int = 4,
        load: Load | None = None,
        on_bytes: Callable[[str, int, int], None] = lambda _what, _done, _total: None,
    ) -> None:
        self._source, self._dest, self._names = source, dest, tuple(names)
        self._shards = None if shards is None else frozenset(shards)
        self._keep, self._load, self._on_bytes = keep, load, on_bytes

    def round(self) -> Round:
        """Look once, and do what is to be done.

        Raises:
            RepositoryError: The source cannot be listed.
        """
        done = Round()
        self._dest.mkdir(parents=True, exist_ok=True)
        for name in self._names or self._source.collections():
            published = self._source.versions(name)
            if published:
                self._collection(name, published, done)
        return done

    def _collection(self, name: str, published: Sequence[int], done: Round) -> None:
        pin = self._source.pin(name)
        pinned = None if pin is None else parse_pin(pin)
        wanted = sorted({*published[-self._keep :], *({pinned} if pinned in published else ())})
        for version in wanted:
            try:
                manifest, content = self._source.manifest(name, version)
                self._bring(name, manifest.base, done)
                self._bring_one(manifest, content, done)
            except (RepositoryError, OSError) as exc:
                reason = _explain(exc)
                log.error("version_not_brought", collection=name, version=version, reason=reason)  # noqa: TRY400
                done.failed.append((name, version, reason))
        held = versions(self._dest, name)
        arrived = pinned is None or pinned in held
        if held and arrived and read_pin(self._dest, name) != pinned:
            write_pin(self._dest, name, pinned)
            log.info("pin_mirrored", collection=name, version=pinned)
        self._load_bases(name, done)
        self._remove_old(name, wanted, done)

    def _remove_old(self, name: str, wanted: Collection[int], done: Round) -> None:
        """Keep the versions that are wanted, the newest that is here, and the bases of all of them."""
        held = versions(self._dest, name)
        stay = {*(version for version in held if version in wanted), *held[-1:]}
        stay |= {read_manifest(self._dest, name, version).base for version in stay}
        for version in held:
            if version not in stay:
                with lock_collection(self._dest, name):
                    remove_version(self._dest, name, version)
                done.removed.append((name, version))
                log.info("version_removed", collection=name, version=version)

    def _bring(self, name: str, version: int, done: Round) -> None:
        if version not in versions(self._dest, name):
            manifest, content = self._source.manifest(name, version)
            self._bring_one(manifest, content, done)

    def _bring_one(self, manifest: Manifest, content: bytes, done: Round) -> None:
        name, version = manifest.collection, manifest.version
        if version in versions(self._dest, name):
            return
        configs = {}
        if manifest.kind is Kind.BASE:
            configs = {
                shard.model: self._source.config(shard.model) for shard in manifest.shards if self._has(shard.index)
            }
        files = [file for file in manifest.files if self._is_wanted(file)]
        with lock_collection(self._dest, name), stage(self._dest, name, version) as directory:
            total, copied = sum(file.size_bytes for file in files), 0
            for file in files:
                copied = self._copy(manifest, file, directory, copied, total)
            publish_files(self._dest, directory, manifest, content, configs)
        done.brought.append((name, version))
        done.bytes += total
        log.info("version_brought", collection=name, version=version, bytes=total)

    def _copy(self, manifest: Manifest, file: StateFile, directory: Path, copied: int, total: int) -> int:
        """Copy a file of a version, and hold it against the manifest."""
        target = directory / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256()
        size = 0

        def passed(block: bytes) -> None:
            nonlocal size
            digest.update(block)
            size += len(block)
            self._on_bytes(f"{manifest.collection} version {manifest.version}", copied + size, total)

        path = f"{manifest.collection}/{manifest.version}/{file.path}"
        self._source.copy(path, target, passed)
        if size != file.size_bytes or digest.hexdigest() != file.sha256:
            raise RepositoryError(
                f"{self._source.url}/{path}: {size} bytes that are not what was exported (the manifest says "
                f"{file.size_bytes} and another SHA-256, or they were changed): publish the version again"
            )
        with target.open("rb+") as written:
            os.fsync(written.fileno())
        return copied + size

    def _has(self, shard: int) -> bool:
        return self._shards is None or shard in self._shards

    def _is_wanted(self, file: StateFile) -> bool:
        """Files of other shards are left where they are, but for the probes, which a front tier asks of all."""
        place, _, rest = file.path.partition("/")
        return rest in {"", PROBES_FILE} or self._has(int(place.removeprefix("shard_")))

    def _load_bases(self, name: str, done: Round) -> None:
        """Have two bases loaded at most: the newest, and before it the pinned version's or the next newest."""
        if self._load is None:
            return
        held = versions(self._dest, name)
        manifests = [read_manifest(self._dest, name, version) for version in held]
        pin = read_pin(self._dest, name)
        pinned = {manifest.base for manifest in manifests if manifest.version == pin}
        others = sorted({manifest.base for manifest in manifests} - pinned)
        bases = sorted(pinned | set(others[-1:] if pinned else others[-2:]))
        models = {shard.model for manifest in manifests for shard in manifest.shards if self._has(shard.index)}
        for model in sorted(models):
            try:
                self._load(model, bases)
            except RepositoryError as exc:
                log.error("base_not_loaded", collection=name, model=model, bases=bases, reason=str(exc))  # noqa: TRY400
                done.failed.append((name, bases[-1], str(exc)))


def _explain(exc: Exception) -> str:
    if isinstance(exc, OSError):
        full = exc.errno in {errno.ENOSPC, errno.EDQUOT}
        return f"{exc.filename or 'the disk'}: {exc.strerror}" + (
            "; make room or keep fewer versions (--keep)" if full else ""
        )
    return str(exc)
