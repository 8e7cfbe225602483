"""Owns what a person reads about a version: tables of tables and shards.

Reads manifests only; must not import torch.
"""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Column
from rich.table import Table as Grid
from rich.text import Text

from export.contract import Kind, Manifest, Routing, RowDtype, Shard, Table

if TYPE_CHECKING:
    from export.diff import TableDiff

_MANAGED_ROWS = (
    "A managed table has on each shard its share of the rows and a copy of the row for unknown ids; "
    "these need not add up to its rows."
)


def describe_version(manifest: Manifest, published: list[int]) -> RenderableType:
    """A version for reading: where its tables lie, how full their maps are, and how large its shards."""
    maps = [describe_maps(manifest)] if any(table.managed for table in manifest.tables) else []
    overlay = [describe_overlay(manifest)] if manifest.kind is Kind.DELTA else []
    return Group(_title(manifest, published), describe_tables(manifest), *maps, *overlay, describe_shards(manifest))


def describe_tables(manifest: Manifest) -> Grid:
    """Features, routing and row dtype of each table, and what each shard holds of it: rows, and which columns if not all.

    ``dtype`` comes with the bound on the error of a number.
    """
    caption = _MANAGED_ROWS if any(table.managed for table in manifest.tables) else None
    columns = ("table", "features", "routing", "dtype", Column("rows", justify="right"), "shard: rows")
    grid = Grid(*columns, caption=caption, caption_justify="left")
    for table in manifest.tables:
        held = [f"{shard.index}: {rows}" for shard in manifest.shards if (rows := _held(table, shard))]
        cells = (table.name, ", ".join(table.embedding_names), table.routing.value, _dtype(manifest, table))
        grid.add_row(*map(Text, (*cells, f"{table.rows:,}", "  ".join(held))))
    return grid


def describe_maps(manifest: Manifest) -> Grid:
    """Kind and occupancy of each managed-collision map: training's buckets, ids, how full it is, slots still open."""
    grid = Grid("map", "remap")
    for column in ("buckets", "ids", "full", "open"):
        grid.add_column(column, justify="right")
    for table in manifest.tables:
        zch, training = table.zch, table.training
        if zch is not None and training is not None:
            grid.add_row(
                Text(table.name),
                f"{table.remap.value} {zch.policy.removesuffix('_EvictionPolicy')}",
                f"{training.buckets:,}",
                f"{zch.occupied:,}",
                f"{zch.occupied / zch.size:.1%}",
                f"{zch.open_slots:,}",
            )
    return grid


def describe_shards(manifest: Manifest) -> Grid:
    """Triton model, device and size of each shard."""
    grid = Grid("shard", "Triton model", "device", Column("tables", justify="right"), Column("state", justify="right"))
    for shard in manifest.shards:
        size = human_bytes(shard.state_bytes)
        grid.add_row(str(shard.index), shard.model, shard.device, str(len(shard.tables)), size)
    return grid


def describe_overlay(manifest: Manifest) -> Grid:
    """What a delta holds of each table, over all shards: ids with another row, evicted ids, rows."""
    grid = Grid("table")
    for column in ("ids moved or new", "evicted", "rows", "of rows"):
        grid.add_column(column, justify="right")
    for table in manifest.tables:
        held = [entry for shard in manifest.shards for entry in shard.tables if entry.table == table.name]
        sums = [
            sum(getattr(entry, name) for entry in held)
            for name in ("overlay_ids", "overlay_tombstones", "overlay_rows")
        ]
        grid.add_row(*map(Text, (table.name, *(f"{number:,}" for number in sums), f"{table.rows:,}")))
    return grid


def describe_diff(tables: "Sequence[TableDiff]") -> Grid:
    """What each table answers otherwise."""
    grid = Grid("table")
    for column in ("ids added", "evicted", "moved", "rows changed"):
        grid.add_column(column, justify="right")
    for table in tables:
        numbers = (table.added, table.evicted, table.moved, table.changed)
        grid.add_row(*map(Text, (table.table, *(f"{number:,}" for number in numbers))))
    return grid


def human_bytes(size: float) -> str:
    """A size for reading, in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"


def _held(table: Table, shard: Shard) -> str:
    rows = next((f"{entry.rows:,}" for entry in shard.tables if entry.table == table.name), "")
    if not rows or table.routing is not Routing.COLUMNS:
        return rows
    columns = ", ".join("{}:{}".format(*piece.columns(table.dim)) for piece in table.pieces_on(shard.index))
    return f"{rows} [{columns}]"


def _dtype(manifest: Manifest, table: Table) -> str:
    if table.row_dtype is RowDtype.FP32:
        return table.row_dtype.value
    errors = [entry.max_error for shard in manifest.shards for entry in shard.tables if entry.table == table.name]
    return f"{table.row_dtype.value} ±{max(errors):.2g}"


def _title(manifest: Manifest, published: list[int]) -> str:
    created = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(manifest.created_s))
    size = human_bytes(sum(file.size_bytes for file in manifest.files))
    others = ", ".join(str(version) for version in published)
    return (
        f"[bold]{manifest.collection}[/bold] version {manifest.version} (published: {others}), {created}, "
        f"dim {manifest.dim}, {manifest.num_shards} shard{'s' if manifest.num_shards > 1 else ''}, {size}, "
        f"runtime {manifest.runtime.value}{', need_indices' if manifest.need_indices else ''}"
    )
