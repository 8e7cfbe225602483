"""Owns what a person reads about a version: tables of tables and shards, and a warning about uneven ones.

Reads manifests only; must not import torch.
"""

import math
import time
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table as Grid

from export.contract import Manifest, Routing, Table

_SKEW = 1.5
_DEVIATIONS = 4


def describe_version(manifest: Manifest, published: list[int]) -> RenderableType:
    """A version for reading: its tables, then its shards."""
    return Group(_title(manifest, published), describe_tables(manifest), describe_shards(manifest))


def describe_tables(manifest: Manifest) -> Grid:
    """Features, routing, rows and occupancy of each table: ids in the map, how full that is, slots still open."""
    grid = Grid("table", "features", "remap", "routing")
    for column in ("rows", "ids", "full", "open"):
        grid.add_column(column, justify="right")
    for table in manifest.tables:
        zch = table.zch
        grid.add_row(
            table.name,
            ", ".join(table.embedding_names),
            table.remap.value if zch is None else f"{table.remap.value} {zch.policy.removesuffix('_EvictionPolicy')}",
            table.routing.value,
            f"{table.rows:,}",
            "" if zch is None else f"{zch.occupied:,}",
            "" if zch is None else f"{zch.occupied / zch.size:.1%}",
            "" if zch is None else f"{zch.open_slots:,}",
        )
    return grid


def describe_shards(manifest: Manifest) -> Grid:
    """Rows of each table on each shard, and the bytes of its state."""
    grid = Grid("shard", "Triton model")
    for table in manifest.tables:
        grid.add_column(table.name, justify="right")
    grid.add_column("state", justify="right")
    for shard in manifest.shards:
        rows = {entry.table: f"{entry.rows:,}" for entry in shard.tables}
        cells = [rows.get(table.name, "-") for table in manifest.tables]
        grid.add_row(str(shard.index), shard.model, *cells, human_bytes(shard.state_bytes))
    return grid


def skew_warnings(manifest: Manifest) -> Iterator[str]:
    """One line for each table whose ids or rows lie on few of its shards."""
    for table in manifest.tables:
        held = _held(manifest, table)
        if table.routing is Routing.TABLE or len(held) < 2 or not sum(held):
            continue
        mean, most = sum(held) / len(held), max(held)
        if most > _SKEW * mean and most - mean > _DEVIATIONS * math.sqrt(mean):
            shard = held.index(most)
            yield (
                f"table {table.name}: shard {shard} holds {most:,} of {sum(held):,} "
                f"{'rows' if table.zch is None else 'ids'}, {most / mean:.1f} times its share; it will be the slowest"
            )


def human_bytes(size: float) -> str:
    """A size for reading, in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"


def _held(manifest: Manifest, table: Table) -> list[int]:
    return [
        entry.rows if table.zch is None else entry.zch_rows
        for shard in manifest.shards
        for entry in shard.tables
        if entry.table == table.name
    ]


def _title(manifest: Manifest, published: list[int]) -> str:
    created = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(manifest.created_s))
    size = human_bytes(sum(file.size_bytes for file in manifest.files))
    others = ", ".join(str(version) for version in published)
    return (
        f"[bold]{manifest.collection}[/bold] version {manifest.version} (published: {others}), {created}, "
        f"dim {manifest.dim}, {manifest.num_shards} shard{'s' if manifest.num_shards > 1 else ''}, {size}"
    )
