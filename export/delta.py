"""Owns what a delta inherits from its base, and how a module is held against it; must not look for changes.

A delta is cumulative: it holds everything that differs from its base, so that any delta can be skipped.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from export.assembly import Base, VersionOrder
from export.changes import Touched
from export.contract import Kind, Manifest, Remap, RepositoryError, Runtime, Table, read_manifest, version_dir, versions
from export.contract.layout import MANIFEST_FILE
from export.errors import ExportError
from export.input_hash import InputHashFiles
from export.source import CollectionSource, TableSource
from export.state import PlacedTable


def find_base(repo: Path, collection: str, base: int | None, touched: Touched | None = None) -> Base:
    """The base of a delta.

    Args:
        repo: The model repository.
        collection: Its collection.
        base: A base's version number; None: the newest base.
        touched: Where rows may have other numbers than in it; None: anywhere.

    Raises:
        ExportError: There is no such base, or it cannot have deltas.
    """
    published = versions(repo, collection)
    try:
        if base is None:
            manifests = (read_manifest(repo, collection, version) for version in reversed(published))
            manifest = next((found for found in manifests if found.kind is Kind.BASE), None)
        else:
            manifest = read_manifest(repo, collection, base)
    except RepositoryError as exc:
        raise ExportError(str(exc)) from exc
    if manifest is None:
        raise ExportError(f"{repo}: holds no base of {collection!r}; `kjtserve export --name {collection}` writes one")
    if manifest.kind is not Kind.BASE:
        raise ExportError(
            f"base {manifest.version}: is a delta itself, on base {manifest.base}; a delta is cumulative: use --base "
            f"{manifest.base}"
        )
    if manifest.runtime is Runtime.PYTORCH:
        raise ExportError(
            f"base {manifest.version}: runtime 'pytorch' keeps its state inside its programs, where no delta can be laid "
            "over it; export versions with runtime 'python'"
        )
    directory = version_dir(repo, collection, manifest.version)
    digest = hashlib.sha256((directory / MANIFEST_FILE).read_bytes()).hexdigest()
    return Base(manifest=manifest, directory=directory, sha256=digest, touched=touched)


def order_delta(source: CollectionSource, base: Base) -> VersionOrder:
    """What to build: the module as it is now, placed and stored as the base is.

    Raises:
        ExportError: The module is not the base's: other tables, or cut otherwise in training.
    """
    manifest = base.manifest
    names = [table.name for table in source.tables]
    if names != [table.name for table in manifest.tables]:
        raise _refusal(manifest, f"the module has tables {names}, it {[table.name for table in manifest.tables]}")
    if source.need_indices != manifest.need_indices:
        raise _refusal(manifest, f"the module has need_indices {source.need_indices}, it {manifest.need_indices}")
    for table, entry in zip(source.tables, manifest.tables, strict=True):
        _check_table(manifest, table, entry)
    return VersionOrder(
        collection=manifest.collection,
        num_shards=manifest.num_shards,
        source=source,
        tables=tuple(
            PlacedTable(source=table, routing=entry.routing, placements=entry.placements, unknown=entry.unknown)
            for table, entry in zip(source.tables, manifest.tables, strict=True)
        ),
        input_hashes=_input_hashes(base),
        out_of_range=manifest.tables[0].out_of_range,
        row_dtype=manifest.tables[0].row_dtype,
        devices=tuple(shard.device for shard in manifest.shards),
        base=base,
    )


def _check_table(manifest: Manifest, table: TableSource, entry: Table) -> None:
    found, wanted = _described(table), _recorded(entry)
    for field, value in found.items():
        if value != wanted[field]:
            raise _refusal(manifest, f"table {table.name}: the module has {field} {value}, it {wanted[field]}")


def _described(table: TableSource) -> Mapping[str, object]:
    source = table.map
    return {
        "rows": table.rows,
        "dim": table.dim,
        "features": table.features,
        "embedding names": table.embedding_names,
        "remap": str(Remap.NONE if source is None else source.remap),
        "training buckets": None if source is None else source.training,
        "MPZCH constants": None if source is None else source.mpzch,
    }


def _recorded(entry: Table) -> Mapping[str, object]:
    return {
        "rows": entry.rows,
        "dim": entry.dim,
        "features": entry.features,
        "embedding names": entry.embedding_names,
        "remap": str(entry.remap),
        "training buckets": entry.training,
        "MPZCH constants": entry.mpzch,
    }


def _input_hashes(base: Base) -> InputHashFiles:
    """The base's own programs; the check of the new version holds them against the module."""
    file_of = {table.name: table.input_hash for table in base.manifest.tables if table.input_hash is not None}
    contents = {file: (base.directory / file).read_bytes() for file in sorted(set(file_of.values()))}
    return InputHashFiles(contents=contents, file_of=file_of)


def _refusal(manifest: Manifest, why: str) -> ExportError:
    return ExportError(f"no delta on base {manifest.version} of {manifest.collection!r}: {why}; export a new base")
