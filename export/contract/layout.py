"""Owns where things lie in a model repository; must not read or write a state file.

::

    REPO/
      clicks/                      one collection, one directory a version
        1/                         appears by one atomic rename, immutable from then on
          manifest.json            the completeness marker: written last, checksums of everything beside it
          input_hash_0.pt2         only if the module has an input_hash_func
          shard_0/                 model.py, shard.pt2, model.pt, state.safetensors,
                                   __pycache__ (an empty file, see BYTECODE_GUARD)
          shard_1/
      clicks_shard_0/              what Triton loads
        config.pbtxt               the same for every version
        1 -> ../clicks/1/shard_0
      clicks_shard_1/
"""

import re
from collections.abc import Iterator
from pathlib import Path

from export.contract.errors import UserError
from export.contract.manifest import Manifest

MANIFEST_FILE = "manifest.json"
STATE_FILE = "state.safetensors"
PROGRAM_FILE = "shard.pt2"
TORCHSCRIPT_FILE = "model.pt"
RUNTIME_FILE = "model.py"
CONFIG_FILE = "config.pbtxt"
BYTECODE_GUARD = "__pycache__"
"""An empty file where Python would make a directory: a shard's directory must never change, or Triton takes a version
that is being served for a modified one and reloads its process when the next version is loaded."""

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,62}")
_SHARD_SUFFIX = re.compile(r".*_shard_\d+")


class RepositoryError(UserError):
    """A model repository, or something in it, is not what it has to be; the message names the path and the rule."""


def check_collection_name(name: str) -> str:
    """Return ``name`` if it can name a collection, else raise ValueError with the rule it breaks."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"collection name {name!r}: use a letter, then up to 62 letters, digits, '_', '-' or '.'")
    if _SHARD_SUFFIX.fullmatch(name):
        raise ValueError(f"collection name {name!r}: a name that ends in _shard_<number> is kept for Triton's models")
    return name


def shard_model_name(collection: str, shard: int) -> str:
    """Name of the Triton model that serves one shard of a collection."""
    return f"{collection}_shard_{shard}"


def version_dir(repo: Path, collection: str, version: int) -> Path:
    """Directory of one version of a collection."""
    return repo / collection / str(version)


def shard_dir(version_directory: Path, shard: int) -> Path:
    """Directory of one shard inside a version directory."""
    return version_directory / f"shard_{shard}"


def versions(repo: Path, collection: str) -> list[int]:
    """Published versions of a collection, oldest first; directories without a manifest are not versions."""
    root = repo / collection
    if not root.is_dir():
        return []
    return sorted(
        int(path.name)
        for path in root.iterdir()
        if path.name.isdecimal() and path.name == str(int(path.name)) and (path / MANIFEST_FILE).is_file()
    )


def collections(repo: Path) -> Iterator[str]:
    """Names of the collections that have at least one published version, sorted."""
    if not repo.is_dir():
        raise RepositoryError(f"{repo}: no such directory; `kjtserve export --out {repo}` makes a repository")
    for path in sorted(repo.iterdir()):
        if path.is_dir() and versions(repo, path.name):
            yield path.name


def read_manifest(repo: Path, collection: str, version: int) -> Manifest:
    """Read and validate one version's manifest.

    Raises:
        RepositoryError: The version is not there, or its manifest breaks the schema.
    """
    path = version_dir(repo, collection, version) / MANIFEST_FILE
    try:
        manifest = Manifest.model_validate_json(path.read_bytes())
    except OSError as exc:
        raise RepositoryError(f"{path}: {exc.strerror}; published versions: {versions(repo, collection)}") from exc
    except ValueError as exc:
        raise RepositoryError(f"{path}: not a manifest this kjtserve can read: {exc}") from exc
    if (manifest.collection, manifest.version) != (collection, version):
        raise RepositoryError(
            f"{path}: says {manifest.collection} version {manifest.version}, its place says {collection} {version}"
        )
    return manifest
