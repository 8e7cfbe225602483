"""Owns the decision which shard holds which table or rows, and plan.yaml; must not read rows.

::

    shards: 3
    tables:
      user: {routing: hash}
      item: {routing: table, shard: 1}
      category: {routing: rows, rows: [4, 3, 3]}
"""

import itertools
from pathlib import Path
from typing import Annotated, Self

import yaml
from pydantic import ConfigDict, Field, ValidationError, model_validator

from export.contract import Placement, Routing, even_row_ranges
from export.contract.terms import Strict
from export.errors import ExportError
from export.source import CollectionSource, TableSource


class TablePlan(Strict):
    """How one table is cut; fields that its routing does not use must be left out."""

    model_config = ConfigDict(strict=False)  # YAML knows neither enums nor tuples

    routing: Routing | None = None
    """None: ``hash`` for a managed-collision table, ``rows`` for a plain one."""
    shard: Annotated[int, Field(ge=0)] | None = None
    """``table`` routing: the shard that holds it."""
    rows: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    """``rows`` routing: rows on each shard, 0 allowed. None: even ranges as TorchRec's row-wise sharding cuts them."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.routing is Routing.TABLE) != (self.shard is not None):
            raise ValueError("'shard' belongs to routing 'table', which needs it")
        if self.rows is not None and self.routing not in (None, Routing.ROWS):
            raise ValueError(f"'rows' belongs to routing 'rows', not {self.routing}")
        return self


class Plan(Strict):
    """A whole plan; tables that it does not name get the default routing."""

    model_config = ConfigDict(strict=False)

    shards: Annotated[int, Field(ge=1)]
    tables: dict[str, TablePlan] = Field(default_factory=dict)


def read_plan(path: Path) -> Plan:
    """Read plan.yaml.

    Raises:
        ExportError: It cannot be read, is not YAML, or breaks a rule; names the field.
    """
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ExportError(f"plan {path}: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise ExportError(f"plan {path}: not UTF-8 text") from exc
    except yaml.YAMLError as exc:
        raise ExportError(f"plan {path}: not YAML: {' '.join(str(exc).split())}") from exc
    try:
        return Plan.model_validate(document)
    except ValidationError as exc:
        faults = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'plan'}: {e['msg']}" for e in exc.errors())
        raise ExportError(f"plan {path}: {faults}") from exc


def place_tables(source: CollectionSource, plan: Plan) -> dict[str, tuple[Routing, tuple[Placement, ...]]]:
    """Routing and placements of every table, by name.

    Raises:
        ExportError: The plan names a table that is not there, a shard out of range, or rows that do not add up.
    """
    names = [table.name for table in source.tables]
    unknown = sorted(set(plan.tables) - set(names))
    if unknown:
        raise ExportError(f"plan: table {unknown[0]!r} is not in the module; its tables are {names}")
    return {table.name: _place(table, plan.tables.get(table.name, TablePlan()), plan.shards) for table in source.tables}


def _place(table: TableSource, plan: TablePlan, shards: int) -> tuple[Routing, tuple[Placement, ...]]:
    managed = table.map is not None
    routing = plan.routing or (Routing.HASH if managed else Routing.ROWS)
    if managed and (routing is Routing.ROWS or plan.rows is not None):
        raise ExportError(f"plan: table {table.name}: routing 'rows' is for plain tables; use 'hash' or 'table'")
    if not managed and routing is Routing.HASH:
        raise ExportError(f"plan: table {table.name}: routing 'hash' is for managed-collision tables; use 'rows'")
    if routing is Routing.TABLE:
        shard = plan.shard or 0
        if shard >= shards:
            raise ExportError(f"plan: table {table.name}: shard {shard} is out of range, shards are 0..{shards - 1}")
        return routing, (Placement(shard=shard, row_start=0, row_stop=table.rows),)
    if routing is Routing.HASH:
        return routing, tuple(Placement(shard=shard, row_start=0, row_stop=table.rows) for shard in range(shards))
    return routing, _row_ranges(table, plan.rows, shards)


def _row_ranges(table: TableSource, sizes: tuple[int, ...] | None, shards: int) -> tuple[Placement, ...]:
    if sizes is None:
        ranges = even_row_ranges(table.rows, shards)
    else:
        if len(sizes) != shards:
            raise ExportError(f"plan: table {table.name}: rows names {len(sizes)} shards, the plan has {shards}")
        if sum(sizes) != table.rows:
            raise ExportError(f"plan: table {table.name}: rows add up to {sum(sizes)}, the table has {table.rows}")
        edges = [sum(sizes[:shard]) for shard in range(shards + 1)]
        ranges = list(itertools.pairwise(edges))
    return tuple(Placement(shard=shard, row_start=start, row_stop=stop) for shard, (start, stop) in enumerate(ranges))
