"""Owns a person's word on which version is served: pins and unpins a collection in the repository."""

from pathlib import Path

from export.contract import RepositoryError, UserError, collections, read_manifest, read_pin, versions, write_pin


def roll_back(repo: Path, name: str | None, to: int | None) -> str:
    """Pin a collection to a version; None: the one before the one that is pinned or the newest. Says what was done.

    Raises:
        UserError: There is no such collection or version, or the repository cannot be written.
    """
    collection = _choose(repo, name)
    published = versions(repo, collection)
    now = read_pin(repo, collection) or published[-1]
    if to is None:
        older = [version for version in published if version < now]
        if not older:
            raise UserError(f"{repo}: {collection} has no version before {now}; published are {published}")
        to = older[-1]
    read_manifest(repo, collection, to)  # raises with the versions that there are
    _write(repo, collection, to)
    return (
        f"{repo}: {collection} is pinned to version {to}; newer versions wait until "
        f"`kjtserve rollback {repo} --name {collection} --follow`"
    )


def follow_newest(repo: Path, name: str | None) -> str:
    """Take a pin back. Says what was done.

    Raises:
        UserError: There is no such collection, or the repository cannot be written.
    """
    collection = _choose(repo, name)
    _write(repo, collection, None)
    return f"{repo}: {collection} follows the newest version, which is {versions(repo, collection)[-1]}"


def _choose(repo: Path, name: str | None) -> str:
    names = list(collections(repo))
    if name is None and len(names) == 1:
        return names[0]
    if name not in names:
        said = "say which one with --name" if name is None else f"there is no {name!r}"
        raise RepositoryError(f"{repo}: holds {len(names)} collections {names}; {said}")
    return name


def _write(repo: Path, collection: str, version: int | None) -> None:
    try:
        write_pin(repo, collection, version)
    except OSError as exc:
        raise UserError(
            f"{exc.filename or repo}: {exc.strerror}; the pin is written where the repository is written"
        ) from exc
