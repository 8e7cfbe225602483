"""Owns the removal of old versions: all but the last few, the bases that those need, and the one that is pinned."""

from pathlib import Path

from export.contract import read_manifest, read_pin, versions
from export.contract.errors import UserError
from export.contract.publishing import remove_version
from export.errors import ExportError
from export.publish import lock_collection


def prune_versions(repo: Path, collection: str, keep: int) -> list[int]:
    """Remove the versions of a collection that are older than its last ``keep``, and that none of these needs.

    A front tier or shard that still serves one goes on, since what is mapped stays; it could not be started again with it.

    Args:
        repo: The model repository.
        collection: Its collection.
        keep: Versions to keep, 1 or more.

    Returns:
        The versions that were removed, oldest first.

    Raises:
        ExportError: ``keep`` is less than 1, another export runs, or a version cannot be removed.
    """
    if keep < 1:
        raise ExportError(f"keep {keep}: use a number from 1 on")
    with lock_collection(repo, collection):
        published = versions(repo, collection)
        needed = set(published[-keep:])
        pin = read_pin(repo, collection)
        needed |= {pin} if pin is not None else set()
        for version in sorted(needed & set(published)):
            try:
                needed.add(read_manifest(repo, collection, version).base)
            except UserError:  # a version that cannot be read says nothing of its base
                needed |= set(published)
        gone = [version for version in published if version not in needed]
        for version in gone:
            try:
                remove_version(repo, collection, version)
            except OSError as exc:
                raise ExportError(
                    f"{exc.filename or repo}: {exc.strerror or exc}; version {version} was not removed"
                ) from exc
        return gone
