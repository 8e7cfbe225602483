"""Owns the deltas that a process answers from: mapped beside its base when first asked for, the last few kept.

Must not know Triton, nor what an overlay's tensors mean.
"""

import hashlib
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from export.contract import Kind, Manifest, RepositoryError, check_digest, read_manifest, version_dir
from export.contract.layout import MANIFEST_FILE, OVERLAY_FILE
from model_repo.errors import NotReady, ShardLoadError, Unservable, WrongVersion
from model_repo.shard import LoadedShard, ShardVersion
from model_repo.state import map_state, place_state

KEPT = 4
"""Deltas that stay mapped: the one in use, the one before it, and the next ones while front tiers change over."""


class Deltas:
    """Finds the version that a request names.

    Args:
        shard: The loaded base.
        directory: Its shard's directory, ``REPO/<collection>/<version>/shard_<i>``.
    """

    def __init__(self, shard: LoadedShard, directory: Path) -> None:
        self._shard = shard
        self._directory = directory.resolve()
        self._mapped: OrderedDict[int, ShardVersion] = OrderedDict()
        self._mapping: dict[int, Future[ShardVersion]] = {}
        # Not in the caller's thread: reading an overlay for its checksum would hold up the lookups behind it.
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kjtserve-delta")

    def find(self, version: int) -> ShardVersion:
        """A version that is mapped; begins to map one that is not.

        Raises:
            NotReady: It is being mapped.
            Unservable: It cannot be mapped; the next call tries again.
            WrongVersion: It is neither the base nor a delta that is published beside it.
        """
        if version == self._shard.base.version:
            return self._shard.base
        if version in self._mapped:
            self._mapped.move_to_end(version)
            return self._mapped[version]
        if version not in self._mapping:
            root = self._directory.parent.parent
            if version < 1 or not (root / str(version) / MANIFEST_FILE).is_file():
                raise WrongVersion(
                    f"version: {version}, this process serves {self._shard.base.version} and deltas on it; there is none of "
                    f"that number in {root}"
                )
            self._mapping[version] = self._executor.submit(map_delta, self._shard, self._directory, version)
        if not self._mapping[version].done():
            raise NotReady(f"version: {version} is being mapped; ask again")
        try:
            self._mapped[version] = self._mapping.pop(version).result()
        except ShardLoadError as exc:
            raise Unservable(f"version: {version} cannot be served: {exc}") from exc
        while len(self._mapped) > KEPT:
            self._mapped.popitem(last=False)
        return self._mapped[version]

    def close(self) -> None:
        """End what is under way."""
        self._executor.shutdown(wait=True, cancel_futures=True)


def map_delta(base: LoadedShard, directory: Path, version: int) -> ShardVersion:
    """Map a delta's overlay, every byte of it checked, and lay it over the base.

    Args:
        base: The loaded base.
        directory: Its shard's directory.
        version: The delta's number.

    Raises:
        ShardLoadError: It is of another base, or a file is missing, damaged or not what the manifest says.
    """
    root, collection = directory.parent.parent.parent, directory.parent.parent.name
    place = version_dir(root, collection, version)
    try:
        manifest = read_manifest(root, collection, version)
        _check_base(manifest, base, directory.parent)
        path = check_digest(place, manifest, f"{directory.name}/{OVERLAY_FILE}")
    except RepositoryError as exc:
        raise ShardLoadError(str(exc)) from exc
    shard = manifest.shards[base.shard.index]
    if shard.state != base.shard.state or [entry.table for entry in shard.tables] != [t.name for t in base.tables]:
        raise ShardLoadError(
            f"{place}: its shard {shard.index} is of other tables than base {manifest.base}; export again"
        )
    overlay = dict(zip(shard.overlay, place_state(map_state(path, shard.overlay), base.device), strict=True))
    held = zip(shard.state, base.base.state, strict=True)
    return ShardVersion(version=version, shard=shard, state=[overlay.get(name, tensor) for name, tensor in held])


def _check_base(manifest: Manifest, base: LoadedShard, directory: Path) -> None:
    number = base.base.version
    if manifest.kind is not Kind.DELTA or manifest.base != number:
        raise ShardLoadError(
            f"version {manifest.version} is a {manifest.kind.value} on base {manifest.base}, this process holds base {number}"
        )
    if hashlib.sha256((directory / MANIFEST_FILE).read_bytes()).hexdigest() != manifest.base_sha256:
        raise ShardLoadError(
            f"version {manifest.version} was made on another base {number} than the one in {directory}: export a new base"
        )
