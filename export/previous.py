"""Owns what a new version is counted against: the ids of the newest version before it; must not write anything.

Shape suffixes: K ids of a table.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from export.contract import Manifest, read_manifest, version_dir, versions
from export.contract.errors import UserError
from export.routes import shard_of
from export.source import CollectionSource
from export.stored import ids_by_table

Evicted = Mapping[int, Mapping[str, int]]
"""By shard and table: ids that the version before holds and the new one does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Previous:
    """The newest version before the one that is being built."""

    version: int
    ids: Mapping[str, torch.Tensor]
    """By managed-collision table: the ids that it holds, INT64 [K]."""
    evictions: Mapping[str, int]
    """By managed-collision table: ``Zch.evictions``."""


def read_previous(repo: Path, collection: str) -> Previous | None:
    """The newest version of a collection; None: there is none, or none that can be read back."""
    published = versions(repo, collection)
    if not published:
        return None
    try:
        manifest = read_manifest(repo, collection, published[-1])
        ids = ids_by_table(version_dir(repo, collection, published[-1]), manifest)
    except UserError:
        return None
    evictions = {table.name: table.zch.evictions for table in manifest.tables if table.zch is not None}
    return Previous(version=published[-1], ids=ids, evictions=evictions)


def count_evicted(manifest: Manifest, source: CollectionSource, previous: Previous, shards: Collection[int]) -> Evicted:
    """Ids of the version before that the new one does not hold, by the shard that they are routed to now.

    Args:
        manifest: Of the new version.
        source: What it was made from; it need not hold ids of other shards than ``shards``.
        previous: The version before.
        shards: Those to count for.
    """
    found: dict[int, dict[str, int]] = {shard: {} for shard in shards}
    for table in source.tables:
        if table.map is None or table.name not in previous.ids:
            continue
        ids_K = previous.ids[table.name]
        gone_K = torch.unique(ids_K[~torch.isin(ids_K, table.map.ids_K)])
        owners_K = shard_of(manifest.table(table.name), gone_K, manifest.num_shards)
        for shard in shards:
            found[shard][table.name] = int((owners_K == shard).sum())
    return found


def with_evicted(manifest: Manifest, previous: Previous, evicted: Evicted) -> Manifest:
    """The manifest with those numbers in it, and the table's totals over all versions."""
    shards = tuple(
        shard.model_copy(
            update={
                "tables": tuple(
                    entry.model_copy(update={"evicted": evicted[shard.index].get(entry.table, 0)})
                    for entry in shard.tables
                )
            }
        )
        for shard in manifest.shards
    )
    tables = tuple(
        table
        if table.zch is None
        else table.model_copy(
            update={
                "zch": table.zch.model_copy(
                    update={
                        "evictions": previous.evictions.get(table.name, 0)
                        + sum(counts.get(table.name, 0) for counts in evicted.values())
                    }
                )
            }
        )
        for table in manifest.tables
    )
    return manifest.model_copy(update={"shards": shards, "tables": tables, "previous": previous.version})
