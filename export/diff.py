"""Owns what changed between two published versions, by asking both; must not know how either was written.

Shape suffixes: N ids of one table, D embedding dimension.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from export.contract import NO_ROW, Manifest, Routing, Table, version_dir
from export.errors import ExportError
from export.loaded import LoadedVersion, load_version
from export.oracle import Answer
from export.progress import Progress, silent
from export.published import find_version
from export.routes import shard_of
from export.stored import ids_by_table

_STEP_IDS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TableDiff:
    """What one table answers otherwise in the newer of two versions."""

    table: str
    added: int = 0
    """Ids that have a row of their own now, and had none."""
    evicted: int = 0
    """Ids that had one, and have none now."""
    moved: int = 0
    """Ids that have another row of the table than before."""
    changed: int = 0
    """Ids (of a plain table: rows) that have the same row, with other numbers."""


def diff_versions(
    repo: str | Path, name: str, older: int, newer: int, *, on_progress: Progress = silent
) -> tuple[TableDiff, ...]:
    """Compare every id that either version holds.

    Args:
        repo: The model repository.
        name: The collection.
        older: A version.
        newer: Another one; they may be cut over different numbers of shards.
        on_progress: Told (step, ids done, of how many).

    Returns:
        One for each table, in the newer version's order.

    Raises:
        ExportError: A version is not there, its files do not load, or their tables differ.
    """
    root = Path(repo)
    manifests = [find_version(root, name, version) for version in (older, newer)]
    tables = [[(table.name, table.rows, table.dim, table.remap) for table in manifest.tables] for manifest in manifests]
    if sorted(tables[0]) != sorted(tables[1]):
        raise ExportError(f"versions {older} and {newer} of {name!r} are of different tables and cannot be compared")
    loaded = [_load(root, manifest) for manifest in manifests]
    held = [ids_by_table(version_dir(root, name, manifest.version), manifest) for manifest in manifests]
    return tuple(
        _diff(loaded, table.name, [ids.get(table.name) for ids in held], on_progress) for table in manifests[1].tables
    )


def _load(repo: Path, manifest: Manifest) -> LoadedVersion:
    return load_version(version_dir(repo, manifest.collection, manifest.version), manifest, range(manifest.num_shards))


def _diff(loaded: list[LoadedVersion], table: str, held: list[torch.Tensor | None], on_progress: Progress) -> TableDiff:
    counts = dict.fromkeys(("added", "evicted", "moved", "changed"), 0)
    rows = loaded[1].manifest.table(table).rows
    ids = [part for part in held if part is not None]
    total = int(torch.unique(torch.cat(ids)).shape[0]) if ids else rows
    done = 0
    for ids_N in _chunks(ids, rows):
        before, now = (_answers(version, table, ids_N) for version in loaded)
        same = before.hits_N & now.hits_N & (before.row_ids_N == now.row_ids_N)
        numbers = (before.embeddings_ND.view(torch.int32) != now.embeddings_ND.view(torch.int32)).any(dim=1)
        for name, which_N in (
            ("added", now.hits_N & ~before.hits_N),
            ("evicted", before.hits_N & ~now.hits_N),
            ("moved", before.hits_N & now.hits_N & (before.row_ids_N != now.row_ids_N)),
            ("changed", same & numbers),
        ):
            counts[name] += int(which_N.sum())
        done += int(ids_N.shape[0])
        on_progress(f"comparing {table}", done, total)
        for version in loaded:
            version.release()
    return TableDiff(table=table, **counts)


def _chunks(ids: list[torch.Tensor], rows: int) -> Iterator[torch.Tensor]:
    """Ids of a managed table's maps, or every row of a plain one, some at a time."""
    if ids:
        yield from torch.split(torch.unique(torch.cat(ids)), _STEP_IDS)
        return
    for first in range(0, rows, _STEP_IDS):
        yield torch.arange(first, min(first + _STEP_IDS, rows))


def _answers(version: LoadedVersion, name: str, ids_N: torch.Tensor) -> Answer:
    """What a version answers to ids of one table (after the input hash), joined from its shards."""
    table = version.manifest.table(name)
    rows_ND = torch.zeros(ids_N.shape[0], table.dim)
    row_ids_N = torch.full_like(ids_N, NO_ROW)
    hits_N = torch.zeros_like(ids_N, dtype=torch.bool)
    for index, mine in _asked(version, table, ids_N):
        shard = version.manifest.shards[index]
        empty = torch.empty(0, dtype=torch.int64)
        pieces = [ids_N[mine] if entry.table == name else empty for entry in shard.tables]
        answers = next(iter(version.programs[index].values()))(shard, pieces)
        answer = answers[[entry.table for entry in shard.tables].index(name)]
        row_ids_N[mine], hits_N[mine] = answer.row_ids_N, answer.hits_N
        done = 0
        for piece in table.pieces_on(index):
            start, stop = piece.columns(table.dim)
            rows_ND[mine, start:stop] = answer.embeddings_ND[:, done : done + stop - start]
            done += stop - start
    return Answer(embeddings_ND=rows_ND, row_ids_N=row_ids_N, hits_N=hits_N)


def _asked(version: LoadedVersion, table: Table, ids_N: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Each shard that is asked for a table, and which of the ids it is asked."""
    holders = list(dict.fromkeys(piece.shard for piece in table.placements))
    everything = torch.ones_like(ids_N, dtype=torch.bool)
    if table.routing is Routing.COLUMNS:
        yield from ((shard, everything) for shard in holders)
    elif table.routing is Routing.REPLICATED:
        yield holders[0], everything
    else:
        shards_N = torch.from_numpy(np.asarray(shard_of(table, ids_N, version.manifest.num_shards)))
        yield from ((shard, shards_N == shard) for shard in holders)
