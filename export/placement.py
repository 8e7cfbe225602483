"""Owns the decision which shard holds which table, rows or columns; must not read rows.

What a plan says is in ``export.plans``; what TorchRec's own plans say, in ``export.sharding_plan``.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from export.contract import ROUTINGS, Placement, Remap, Routing, even_row_ranges
from export.errors import ExportError
from export.options import check_number
from export.plans import DEVICE, DEVICE_RULE, Pieces, Plan, TablePlan, read_plan
from export.sharding_plan import read_sharding_plan
from export.source import CollectionSource, TableSource

_KINDS = {Remap.NONE: "plain", Remap.MCH: "MCH", Remap.MPZCH: "MPZCH"}


def choose_plan(
    source: CollectionSource, *, num_shards: int | None = None, plan: object = None, device: str | None = None
) -> Plan:
    """The plan that the options of an export mean.

    Args:
        source: The module.
        num_shards: Over how many shards to spread every table; 1 if there is no plan either.
        plan: A ``Plan``, the path of a plan.yaml, or TorchRec's ``EmbeddingModuleShardingPlan``.
        device: Where every shard's state lies, whatever the plan says; None: as the plan says, else the CPU.

    Raises:
        ExportError: The options contradict each other or break a rule; names the field.
    """
    if device is not None and not re.fullmatch(DEVICE, device):
        raise ExportError(f"device {device!r}: {DEVICE_RULE}")
    if plan is None:
        if num_shards is not None:
            check_number("num_shards", num_shards)
        cut = Plan(shards=1 if num_shards is None else num_shards)
    elif num_shards is not None:
        raise ExportError("num_shards and plan were both given; the plan says how many shards there are")
    elif isinstance(plan, Plan):
        cut = plan
    elif isinstance(plan, (str, Path)):
        cut = read_plan(Path(plan))
    else:
        cut = read_sharding_plan(source, plan, device=device)
    return cut if device is None else cut.model_copy(update={"devices": (device,) * cut.shards})


def place_tables(source: CollectionSource, plan: Plan) -> dict[str, tuple[Routing, tuple[Placement, ...]]]:
    """Routing and placements of every table, by name.

    Raises:
        ExportError: The plan names a table that is not there, a routing that is not for its kind, a shard out of range
            or twice, or rows or columns that do not add up or cut a training bucket.
    """
    names = [table.name for table in source.tables]
    unknown = sorted(set(plan.tables) - set(names))
    if unknown:
        raise ExportError(f"plan: table {unknown[0]!r} is not in the module; its tables are {names}")
    return {table.name: _place(table, plan.tables.get(table.name, TablePlan()), plan.shards) for table in source.tables}


def _place(table: TableSource, plan: TablePlan, shards: int) -> tuple[Routing, tuple[Placement, ...]]:
    remap = Remap.NONE if table.map is None else table.map.remap
    routing = plan.chosen_routing or (Routing.ROWS if table.map is None else ROUTINGS[remap][0])
    if routing not in ROUTINGS[remap]:
        use = ", ".join(repr(str(routing)) for routing in ROUTINGS[remap])
        raise ExportError(f"plan: table {table.name}: routing '{routing}' is not for {_KINDS[remap]} tables; use {use}")
    pieces = _cut(table, routing, plan, shards)
    _check_shards(table.name, routing, [piece.shard for piece in pieces], shards)
    return routing, pieces


def _cut(table: TableSource, routing: Routing, plan: TablePlan, shards: int) -> tuple[Placement, ...]:
    if routing is Routing.COLUMNS:
        assert plan.columns is not None
        cut = _pieces(table.name, "columns", plan.columns, shards, table.dim)
        if any(size == 0 for _, size in cut):
            raise ExportError(f"plan: table {table.name}: columns names a piece of no columns; leave it out")
        return tuple(
            Placement(shard=shard, row_start=0, row_stop=table.rows, col_start=start, col_stop=stop)
            for shard, start, stop in _ranges(cut)
        )
    if routing in {Routing.ROWS, Routing.TRAINING}:
        if plan.rows is not None:
            ranges = _ranges(_pieces(table.name, "rows", plan.rows, shards, table.rows))
        elif routing is Routing.TRAINING:
            ranges = _even_buckets(table, shards)
        else:
            ranges = [(shard, *rows) for shard, rows in enumerate(even_row_ranges(table.rows, shards))]
        if routing is Routing.TRAINING:
            _check_buckets(table, [start for _, start, _ in ranges])
        return tuple(Placement(shard=shard, row_start=start, row_stop=stop) for shard, start, stop in ranges)
    holders: Mapping[Routing, tuple[int, ...]] = {
        Routing.TABLE: (plan.shard or 0,),
        Routing.HASH: tuple(range(shards)),
        Routing.REPLICATED: tuple(range(shards)) if plan.shards in (None, "all") else tuple(map(int, plan.shards)),
    }
    return tuple(Placement(shard=shard, row_start=0, row_stop=table.rows) for shard in holders[routing])


def _pieces(table: str, field: str, cut: Sequence[int | tuple[int, int]], shards: int, whole: int) -> Pieces:
    """Pieces that are known to add up, from either way of writing them."""
    pieces = tuple((shard, item) if isinstance(item, int) else item for shard, item in enumerate(cut))
    if isinstance(cut[0], int) and len(cut) != shards:
        raise ExportError(f"plan: table {table}: {field} names {len(cut)} shards, the plan has {shards}")
    if (total := sum(size for _, size in pieces)) != whole:
        raise ExportError(f"plan: table {table}: {field} add up to {total}, the table has {whole}")
    return pieces


def _ranges(pieces: Pieces) -> list[tuple[int, int, int]]:
    """(shard, start, stop) of pieces that follow each other."""
    edges = itertools.accumulate((size for _, size in pieces), initial=0)
    return [(shard, *edge) for (shard, _), edge in zip(pieces, itertools.pairwise(edges), strict=True)]


def _even_buckets(table: TableSource, shards: int) -> list[tuple[int, int, int]]:
    """Whole training buckets, spread as TorchRec spreads ``num_buckets``: the first shards take one more."""
    assert table.map is not None
    edges = table.map.training.row_edges
    each, more = divmod(table.map.training.buckets, shards)
    firsts = [shard * each + min(shard, more) for shard in range(shards + 1)]
    return [(shard, edges[first], edges[last]) for shard, (first, last) in enumerate(itertools.pairwise(firsts))]


def _check_buckets(table: TableSource, starts: list[int]) -> None:
    assert table.map is not None
    edges = table.map.training.row_edges
    for start in starts:
        if start not in edges:
            last = next(index for index, edge in enumerate(edges) if edge > start)
            raise ExportError(
                f"plan: table {table.name}: rows are cut at {start}, inside the training bucket of rows "
                f"{edges[last - 1]}..{edges[last]}; cut between buckets, or use routing 'hash' where that is offered"
            )


def _check_shards(table: str, routing: Routing, named: list[int], shards: int) -> None:
    if not named:
        raise ExportError(f"plan: table {table}: shards names none; name those that hold a copy, or all")
    if (highest := max(named)) >= shards:
        raise ExportError(f"plan: table {table}: shard {highest} is out of range, shards are 0..{shards - 1}")
    twice = [shard for shard in named if named.count(shard) > 1]
    if twice and routing is not Routing.COLUMNS:
        raise ExportError(f"plan: table {table}: shard {twice[0]} is named twice; routing '{routing}' names it once")
