"""Where the suite's tables lie: for each number of shards, every routing that is offered for a table of its kind."""

from collections.abc import Mapping, Sequence

from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import EmbeddingModuleShardingPlan
from torchrec.modules.embedding_modules import EmbeddingCollection

from export.plans import Plan, make_plan
from tests.parity.tables import TableCase

PLAIN_ROUTINGS = (
    "table",
    "rows",
    "rows_uneven",
    "rows_empty",
    "columns",
    "columns_twice",
    "replicated",
    "replicated_some",
)
MANAGED_ROUTINGS = {"mch": ("hash", "training", "table"), "mpzch": ("training", "table")}


def plain_plan(tables: Sequence[TableCase], shards: int, dim: int) -> Plan:
    """Each table by the next routing, pieces in another order than their shards."""
    cut = {}
    for at, table in enumerate(tables):
        options = _plain_options(table, at, shards, dim)
        cut[table.name] = options[PLAIN_ROUTINGS[at % len(PLAIN_ROUTINGS)]]
    return make_plan({"shards": shards, "tables": cut})


def _plain_options(table: TableCase, at: int, shards: int, dim: int) -> Mapping[str, Mapping[str, object]]:
    order = [(at + 2 * step) % shards if shards % 2 else (at - step) % shards for step in range(shards)]
    last = shards - 1
    uneven = [1] * last + [table.rows - last]
    empty = [table.rows - min(last, 3), *[0] * max(last - 3, 0), *[1] * min(last, 3)]
    first, rest = dim // 3, dim - dim // 3
    return {
        "table": {"shard": at % shards},
        "rows": {"routing": "rows"},
        "rows_uneven": {"rows": [list(pair) for pair in zip(order, uneven, strict=True)]},
        # one holder at most keeps two empty shards beside it
        "rows_empty": {"rows": [[shard, size] for shard, size in zip(reversed(order), empty, strict=True) if size]},
        "columns": {"columns": [[order[-1], rest], [order[0], first]]},
        "columns_twice": {"columns": [[order[0], first], [order[-1], rest - first], [order[0], first]]},
        "replicated": {"shards": "all"},
        "replicated_some": {"shards": sorted({order[0], order[-1]})},
    }


def managed_plan(tables: Sequence[TableCase], shards: int) -> Plan:
    """Each table by the next routing of its kind, beginning with another one for each number of shards."""
    cut = {}
    for at, table in enumerate(tables):
        routings = MANAGED_ROUTINGS["mpzch" if table.fallback else "mch"]
        routing = routings[(at + shards) % len(routings)]
        cut[table.name] = {"routing": routing, **({"shard": at % shards} if routing == "table" else {})}
    return make_plan({"shards": shards, "tables": cut})


def torchrec_plan(
    module: EmbeddingCollection, tables: Sequence[TableCase], ranks: int, dim: int
) -> EmbeddingModuleShardingPlan:
    """TorchRec's own plan for a plain collection, of every sharding type that an EmbeddingCollection takes."""
    ways = (
        lambda at: table_wise(rank=at % ranks),
        lambda _: row_wise(),
        lambda at: column_wise(ranks=[at % ranks, (at + 1) % ranks, at % ranks][: 3 if dim % 3 == 0 else 2]),
        lambda _: data_parallel(),
    )
    return construct_module_sharding_plan(
        module,
        {table.name: ways[at % len(ways)](at) for at, table in enumerate(tables)},
        sharder=EmbeddingCollectionSharder(),
        local_size=ranks,
        world_size=ranks,
        device_type="cpu",
    )
