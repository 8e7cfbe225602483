"""Owns what an exporter adds to publishing: which number a version gets, and refusals in its own words."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from export.contract import INT64_MAX, Kind, Manifest, RepositoryError, publishing
from export.errors import ExportError
from export.options import check_number


@contextmanager
def lock_collection(repo: Path, collection: str) -> Iterator[None]:
    """Be the only exporter of a collection; what an earlier one that died left behind is cleared first.

    Raises:
        ExportError: Another export of the collection is running.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(publishing.lock_collection(repo, collection))
        except RepositoryError as exc:
            raise ExportError(str(exc)) from exc
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


def publish(repo: Path, directory: Path, manifest: Manifest, configs: Sequence[str]) -> None:
    """Make a staged version visible; ``configs`` holds config.pbtxt of each shard, see ``publishing.publish_files``.

    Raises:
        ExportError: The version is visible, but the disk did not confirm it.
        OSError: The disk failed before; nothing is visible.
    """
    content = (manifest.model_dump_json(indent=1) + "\n").encode()
    models = [shard.model for shard in manifest.shards] if manifest.kind is Kind.BASE else []
    try:
        publishing.publish_files(repo, directory, manifest, content, dict(zip(models, configs, strict=bool(models))))
    except RepositoryError as exc:
        raise ExportError(str(exc)) from exc
