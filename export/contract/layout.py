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
      clicks/2/                    a delta on version 1: no program, and nothing that Triton loads
        manifest.json
        shard_0/
          overlay.safetensors      what differs from the base, cumulative
          probes.safetensors
      clicks_shard_0/              what Triton loads
        config.pbtxt               the same for every version
        1 -> ../clicks/1/shard_0
      clicks_shard_1/
"""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

from pydantic import ValidationError

from export.contract.errors import UserError
from export.contract.manifest import Manifest

MANIFEST_FILE = "manifest.json"
STATE_FILE = "state.safetensors"
OVERLAY_FILE = "overlay.safetensors"
PROBES_FILE = "probes.safetensors"
PROGRAM_FILE = "shard.pt2"
TORCHSCRIPT_FILE = "model.pt"
RUNTIME_FILE = "model.py"
CONFIG_FILE = "config.pbtxt"
BYTECODE_GUARD = "__pycache__"
"""An empty file where Python would make a directory: a shard's directory must never change, or Triton takes a version
that is being served for a modified one and reloads its process when the next version is loaded."""

_MAX_FAULTS = 3
_BLOCK_BYTES = 8 << 20


class RepositoryError(UserError):
    """A model repository, or something in it, is not what it has to be; the message names the path and the rule."""


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
        content = path.read_bytes()
    except OSError as exc:
        raise RepositoryError(f"{path}: {exc.strerror}; published versions: {versions(repo, collection)}") from exc
    return parse_manifest(content, str(path), collection, version)


def parse_manifest(content: bytes, path: str, collection: str, version: int) -> Manifest:
    """Read and validate a manifest's file that lies at ``path``, in the place of a version.

    Raises:
        RepositoryError: It breaks the schema, or is another version's.
    """
    try:
        manifest = Manifest.model_validate_json(content)
    except ValidationError as exc:
        raise RepositoryError(f"{path}: not a manifest this kjtserve can read: {_faults(exc)}") from exc
    if (manifest.collection, manifest.version) != (collection, version):
        raise RepositoryError(
            f"{path}: says {manifest.collection} version {manifest.version}, its place says {collection} {version}"
        )
    return manifest


def _faults(exc: ValidationError) -> str:
    """The first faults on one line; each names its field."""
    faults = [f"{'.'.join(map(str, error['loc'])) or 'manifest'}: {error['msg']}" for error in exc.errors()]
    more = [f"and {len(faults) - _MAX_FAULTS} more"] if len(faults) > _MAX_FAULTS else []
    return " ".join("; ".join([*faults[:_MAX_FAULTS], *more]).replace("Value error, ", "").split())


def check_size(directory: Path, manifest: Manifest, relative: str) -> Path:
    """Path of a file that a version lists, once it is known to be there and as long as the manifest says.

    Only the length: reading a large file whole is the business of ``kjtserve verify``, not of every start.

    Args:
        directory: The version's directory.
        manifest: The version's manifest.
        relative: The file, as the manifest lists it.

    Raises:
        RepositoryError: The manifest does not list the file, or it is missing, or has another size.
    """
    size_bytes = next((file.size_bytes for file in manifest.files if file.path == relative), None)
    if size_bytes is None:
        raise RepositoryError(f"{directory / MANIFEST_FILE}: lists no file {relative}; export again")
    path = directory / relative
    try:
        actual_bytes = path.stat().st_size
    except OSError as exc:
        raise RepositoryError(
            f"{path}: {exc.strerror}; the manifest lists it: copy the version directory again"
        ) from exc
    if actual_bytes != size_bytes:
        raise RepositoryError(
            f"{path}: {actual_bytes} bytes, the manifest says {size_bytes}: the copy is incomplete or was changed; "
            "copy the version directory again"
        )
    return path


def check_digest(
    directory: Path, manifest: Manifest, relative: str, *, on_bytes: Callable[[int], None] = lambda _: None
) -> Path:
    """Path of a file that a version lists, once every byte of it has been read and is what was written.

    Args:
        directory: The version's directory.
        manifest: The version's manifest.
        relative: The file, as the manifest lists it.
        on_bytes: Told how many bytes were read, from time to time.

    Raises:
        RepositoryError: As ``check_size``, or its SHA-256 is another one.
    """
    path = check_size(directory, manifest, relative)
    wanted = next(file.sha256 for file in manifest.files if file.path == relative)
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
                on_bytes(len(block))
    except OSError as exc:
        raise RepositoryError(f"{path}: {exc.strerror}; copy the version directory again") from exc
    if digest.hexdigest() != wanted:
        raise RepositoryError(
            f"{path}: its SHA-256 differs from the manifest's; it was changed after the export: copy the version directory "
            "again"
        )
    return path
