"""Owns what a person reads about a version: tables of tables and shards.

Reads manifests only; must not import torch.
"""

import time

from rich.console import Group, RenderableType
from rich.table import Table as Grid
from rich.text import Text

from export.contract import Manifest, Routing, RowDtype, Shard, Table


def describe_version(manifest: Manifest, published: list[int]) -> RenderableType:
    """A version for reading: its tables, then its shards."""
    return Group(_title(manifest, published), describe_tables(manifest), describe_shards(manifest))


def describe_tables(manifest: Manifest) -> Grid:
    """Features, routing, rows and occupancy of each table: ids in the map, how full that is, slots still open.

    ``buckets`` are those of training; ``dtype`` comes with the bound on the error of a number.
    """
    grid = Grid("table", "features", "remap", "routing", "dtype")
    for column in ("buckets", "rows", "ids", "full", "open"):
        grid.add_column(column, justify="right")
    for table in manifest.tables:
        zch = table.zch
        grid.add_row(
            table.name,
            ", ".join(table.embedding_names),
            table.remap.value if zch is None else f"{table.remap.value} {zch.policy.removesuffix('_EvictionPolicy')}",
            table.routing.value,
            _dtype(manifest, table),
            "" if table.training is None else f"{table.training.buckets:,}",
            f"{table.rows:,}",
            "" if zch is None else f"{zch.occupied:,}",
            "" if zch is None else f"{zch.occupied / zch.size:.1%}",
            "" if zch is None else f"{zch.open_slots:,}",
        )
    return grid


def describe_shards(manifest: Manifest) -> Grid:
    """What of each table lies on each shard (its rows, and which columns if not all), where, and how many bytes."""
    grid = Grid("shard", "Triton model")
    for table in manifest.tables:
        header = Text(f"{table.name}\n{table.routing.value}, {table.row_dtype.value}")
        grid.add_column(header, justify="right")
    grid.add_column("device")
    grid.add_column("state", justify="right")
    for shard in manifest.shards:
        cells = [Text(_held(table, shard)) for table in manifest.tables]
        grid.add_row(str(shard.index), shard.model, *cells, shard.device, human_bytes(shard.state_bytes))
    return grid


def human_bytes(size: float) -> str:
    """A size for reading, in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"


def _held(table: Table, shard: Shard) -> str:
    rows = next((f"{entry.rows:,}" for entry in shard.tables if entry.table == table.name), "-")
    if rows == "-" or table.routing is not Routing.COLUMNS:
        return rows
    columns = ", ".join(f"{piece.col_start}:{piece.col_stop or table.dim}" for piece in table.pieces_on(shard.index))
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
