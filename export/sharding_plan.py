"""Owns the reading of TorchRec's own sharding plans as ours; must not place anything.

A training rank becomes the serving shard of the same number.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from torchrec.distributed.types import EnumerableShardingSpec, ParameterSharding, ShardingPlan, ShardingType

from export.contract import Remap, Routing
from export.errors import ExportError
from export.plans import Pieces, Plan, TablePlan, make_plan
from export.source import CollectionSource, TableSource

_log = logging.getLogger(__name__)

_ROWS = {ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value, ShardingType.GRID_SHARD.value}
_COLUMNS = {ShardingType.COLUMN_WISE.value, ShardingType.TABLE_COLUMN_WISE.value, ShardingType.GRID_SHARD.value}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rectangle:
    """One shard of a table, as a plan's ``ShardMetadata`` names it."""

    shard: int
    row: int
    rows: int
    col: int
    cols: int


def read_sharding_plan(
    source: CollectionSource, plan: object, *, device: str | None = None, shards: int | None = None
) -> Plan:
    """Our plan for TorchRec's.

    Args:
        source: The module that the plan is for.
        plan: An ``EmbeddingModuleShardingPlan``, or any dict of ``ParameterSharding`` by table: one module's entry of a
            ``ShardingPlan``.
        device: Given, the plan's own devices do not count; None: each rank's device comes from its placements.
        shards: How many there are; None: up to the highest rank that the plan names.

    Raises:
        ExportError: It is no such plan, is for other tables, names no rank, or cuts a table in a way that is not
            served; names the table.
    """
    shardings = _check_plan(plan)
    names = [table.name for table in source.tables]
    for strange in shardings:
        if strange not in names:
            raise ExportError(f"plan: table {strange!r} is not in the module; its tables are {names}")
    tables = {}
    for table in source.tables:
        if table.name not in shardings:
            raise ExportError(f"plan: table {table.name} is missing; a TorchRec plan names every table")
        tables[table.name] = _read_table(table, shardings[table.name])
    if shards is None:
        shards = 1 + max(
            (rank for table, sharding in shardings.items() for rank in _ranks(table, sharding)), default=-1
        )
    if not shards:
        raise ExportError("plan: no table names a rank, so the number of shards is unknown; use a plan.yaml")
    devices = [device] * shards if device is not None else _devices(shardings, shards)
    return make_plan({"shards": shards, "devices": devices, "tables": tables})


def describe_cuts(plan: Mapping[str, ParameterSharding]) -> dict[str, tuple[str, ...]]:
    """How a plan cuts each table and which rank has which part, in words that are equal where the cuts are."""
    cuts = {}
    for table, sharding in plan.items():
        ranks, shards = _ranks(table, sharding), _shards_of(sharding)
        parts = [
            f"{' x '.join(map(str, shard.shard_sizes))} at {list(shard.shard_offsets)} on rank {rank}"
            for rank, shard in zip(ranks, shards, strict=False)
        ]
        cuts[table] = (sharding.sharding_type, *(parts or [f"on ranks {ranks}"]))
    return cuts


def check_same_cuts(cuts: Sequence[Mapping[str, tuple[str, ...]]]) -> None:
    """Hold the plans of all ranks against rank 0's; see ``describe_cuts``.

    Raises:
        ExportError: One differs; names the rank, the table and the first difference.
    """
    for rank, mine in enumerate(cuts):
        for table in sorted({*cuts[0], *mine}):
            for first, own in zip_longest(cuts[0].get(table, ()), mine.get(table, ()), fillvalue="nothing"):
                if own != first:
                    raise ExportError(
                        f"table {table}: rank {rank}'s sharding plan says {own}, rank 0's {first}; all ranks need one plan, as "
                        "the planner's collective_plan gives"
                    )


def _check_plan(plan: object) -> Mapping[str, ParameterSharding]:
    if isinstance(plan, ShardingPlan):
        raise ExportError(
            f"plan: a ShardingPlan is for a whole model; pass one module's entry, plan.plan[PATH], of {list(plan.plan)}"
        )
    if not isinstance(plan, Mapping) or not all(isinstance(value, ParameterSharding) for value in plan.values()):
        raise ExportError(
            f"plan: {type(plan).__name__} is not read; give the path of a plan.yaml or an EmbeddingModuleShardingPlan"
        )
    return plan


def _read_table(table: TableSource, sharding: ParameterSharding) -> TablePlan:
    kind = sharding.sharding_type
    if kind == ShardingType.DATA_PARALLEL.value:
        return TablePlan(routing=Routing.REPLICATED, shards="all" if sharding.ranks is None else tuple(sharding.ranks))
    parts = _rectangles(table, sharding)
    wide = all((part.col, part.cols) == (0, table.dim) for part in parts)
    tall = all((part.row, part.rows) == (0, table.rows) for part in parts)
    if kind == ShardingType.TABLE_WISE.value and wide and tall and len(parts) == 1:
        return TablePlan(routing=Routing.TABLE, shard=parts[0].shard)
    if kind in _ROWS and wide:
        cut = _join(table, "rows", table.rows, [(part.row, part.rows, part.shard) for part in parts])
        return TablePlan(routing=Routing.ROWS, rows=cut) if table.map is None else _read_managed(table, cut)
    if kind in _COLUMNS and tall:
        cut = _join(table, "columns", table.dim, [(part.col, part.cols, part.shard) for part in parts])
        return TablePlan(routing=Routing.COLUMNS, columns=cut)
    if kind == ShardingType.GRID_SHARD.value:
        raise ExportError(
            f"plan: table {table.name}: grid_shard cuts rows and columns at once, which is not served; "
            "give a plan.yaml with rows or columns"
        )
    if kind in {known.value for known in ShardingType}:
        sizes = [(part.rows, part.cols) for part in parts]
        raise ExportError(
            f"plan: table {table.name}: shards of sizes {sizes} are not {kind} of {table.rows} x {table.dim}"
        )
    raise ExportError(f"plan: table {table.name}: sharding_type {kind!r} is not one of TorchRec's ShardingType")


def _read_managed(table: TableSource, cut: Pieces) -> TablePlan:
    """Row-wise managed collision: training's own routing where whole buckets lie on each rank, else what can be."""
    assert table.map is not None
    starts = {sum(size for _, size in cut[:index]) for index in range(len(cut))}
    if starts <= set(table.map.training.row_edges):
        return TablePlan(routing=Routing.TRAINING, rows=cut)
    chosen = Routing.HASH if table.map.remap is Remap.MCH else Routing.TRAINING
    _log.warning(
        "table %s: the plan cuts rows inside its %d training bucket(s), so it is served by %s over all shards instead",
        table.name,
        table.map.training.buckets,
        chosen.value,
    )
    return TablePlan(routing=chosen)


def _shards_of(sharding: ParameterSharding) -> Sequence[Any]:
    """The ``ShardMetadata`` of a table; none for copies."""
    spec: Any = sharding.sharding_spec
    return spec.shards if isinstance(spec, EnumerableShardingSpec) else ()


def _rectangles(table: TableSource, sharding: ParameterSharding) -> list[_Rectangle]:
    shards = _shards_of(sharding)
    if not shards:
        raise ExportError(
            f"plan: table {table.name}: sharding_spec is {type(sharding.sharding_spec).__name__}; "
            f"{sharding.sharding_type} needs an EnumerableShardingSpec that lists its shards"
        )
    parts = []
    for rank, shard in zip(_ranks(table.name, sharding), shards, strict=True):
        if len(shard.shard_sizes) != 2:
            raise ExportError(f"plan: table {table.name}: shard_sizes {shard.shard_sizes} are not rows and columns")
        row, col = shard.shard_offsets
        rows, cols = shard.shard_sizes
        parts.append(_Rectangle(shard=rank, row=row, rows=rows, col=col, cols=cols))
    return parts


def _ranks(table: str, sharding: ParameterSharding) -> list[int]:
    """Rank of each shard: ``ranks`` if it names one for each, as TorchRec reads it, else its placement's.

    Not the placement first: TorchRec's helpers place every shard on ``rank:0/cpu`` when they are asked for the CPU.
    """
    shards = _shards_of(sharding)
    if sharding.ranks is not None and (not shards or len(sharding.ranks) == len(shards)):
        return list(sharding.ranks)
    ranks: list[int] = []
    for index, shard in enumerate(shards):
        rank = None if shard.placement is None else shard.placement.rank()
        if rank is None:
            raise ExportError(
                f"plan: table {table}: its shard {index} is on no rank; place it as rank:0/cpu or rank:1/cuda:1"
            )
        ranks.append(rank)
    return ranks


def _join(table: TableSource, what: str, whole: int, parts: list[tuple[int, int, int]]) -> Pieces:
    """(shard, size) in order. Row ranges of one rank that follow each other are one; empty ones hold nothing."""
    rows = what == "rows"
    holders = {shard for _, size, shard in parts if size}
    cut: list[tuple[int, int]] = []
    edge = 0
    for start, size, shard in sorted(parts):
        if start > edge:  # an EnumerableShardingSpec does not overlap
            raise ExportError(f"plan: table {table.name}: {what} {edge}..{start} are on no rank")
        edge += size
        if rows and cut and cut[-1][0] == shard:
            cut[-1] = (shard, cut[-1][1] + size)
        elif size or (rows and shard not in holders):
            cut.append((shard, size))
            holders.add(shard)
    if edge != whole:
        raise ExportError(f"plan: table {table.name}: {what} add up to {edge}, the table has {whole}")
    return tuple(cut)


def _devices(shardings: Mapping[str, ParameterSharding], shards: int) -> list[str]:
    """Device of each shard, from the placements on its rank; a rank that only holds copies names none: the CPU."""
    devices: dict[int, str] = {}
    for table, sharding in shardings.items():
        # Copies list no shards, so they name no device.
        for rank, shard in zip(_ranks(table, sharding), _shards_of(sharding), strict=False):
            device = "cpu" if shard.placement is None else str(shard.placement.device())
            if devices.setdefault(rank, device) != device:
                raise ExportError(
                    f"plan: table {table}: rank {rank} is on {device}, for another table on {devices[rank]}; "
                    "a shard lies on one device: name it with device"
                )
    return [devices.get(shard, "cpu") for shard in range(shards)]
