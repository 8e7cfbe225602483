"""Owns how things in a repository may be named: collections, Triton's models, files; must not touch a file system."""

import re
from typing import Annotated

from pydantic import AfterValidator

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,62}")
_SHARD_SUFFIX = re.compile(r".*_shard_\d+")


def check_collection_name(name: str) -> str:
    """Return ``name`` if it can name a collection, else raise ValueError with the rule it breaks."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"collection name {name!r}: use a letter, then up to 62 letters, digits, '_', '-' or '.'")
    if _SHARD_SUFFIX.fullmatch(name):
        raise ValueError(f"collection name {name!r}: a name that ends in _shard_<number> is kept for Triton's models")
    return name


def check_relative_path(path: str) -> str:
    """Return ``path`` if it stays inside the directory it is relative to, else raise ValueError with the rule it breaks.

    Symbolic links are not looked at: this judges names.
    """
    if any(part in {"", ".", ".."} for part in path.split("/")) or "\\" in path or not path.isprintable():
        raise ValueError(f"path {path!r}: must be relative to the version directory, with '/' and without '.' or '..'")
    return path


def shard_model_name(collection: str, shard: int) -> str:
    """Name of the Triton model that serves one shard of a collection."""
    return f"{collection}_shard_{shard}"


PROBE_ID = "kjtserve-probe"
"""Id of the requests by which a front tier tries a shard out: answered as any other, and not counted."""

CollectionName = Annotated[str, AfterValidator(check_collection_name)]
"""A name that can name a collection."""

RelativePath = Annotated[str, AfterValidator(check_relative_path)]
"""A file's place inside a version directory."""
