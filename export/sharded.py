"""Owns the reading of one rank's part of a live sharded TorchRec module; must not gather a row or change the module."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.mc_embedding import ShardedManagedCollisionEmbeddingCollection
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ParameterSharding, ShardingType
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.modules.mc_modules import MCHManagedCollisionModule

from export.contract import RowDtype
from export.errors import ExportError
from export.maps import buckets_of, check_served, piece_of, read_map, segments_of, unconsumed_rows
from export.options import Evicted
from export.reading import check_config, check_embedding_names, check_piece
from export.rows import TableRows, piece_at
from export.shards import local_shards
from export.source import CollectionSource, MapSource, TableSource


def read_sharded(
    module: nn.Module, *, evicted: Evicted = Evicted.REFUSE, row_dtype: str = RowDtype.FP32
) -> CollectionSource:
    """Describe what this rank holds of a sharded module; every rank's tables are the same, their rows are its own.

    Args:
        module: See ``export_sharded``.
        evicted: What to do when ids were evicted and ``evict()`` has not been called.
        row_dtype: How rows will be stored.

    Raises:
        ExportError: It is no sharded module, or a table of it is not served; names the table and what to do.
    """
    collection, collisions = _split(module)
    configs = collection._embedding_configs
    state = collection.state_dict()
    tables = []
    for config, names in zip(configs, get_embedding_names_by_table(configs), strict=True):
        _check_sharding(config.name, collection.module_sharding_plan[config.name], row_dtype)
        collision = None if collisions is None else collisions[config.name]
        if collision is not None:
            check_served(config.name, collision)
        zeroed = None if collision is None else unconsumed_rows(config.name, [collision], evicted)
        shards = local_shards(state[f"embeddings.{config.name}.weight"])
        pieces = [check_piece(f"table {config.name}", piece_at(*shard)) for shard in shards if shard[1].numel()]
        tables.append(
            TableSource(
                name=config.name,
                features=check_config(config),
                embedding_names=tuple(names),
                numbers=TableRows(
                    table=config.name,
                    rows=config.num_embeddings,
                    dim=config.embedding_dim,
                    pieces=pieces,
                    zeroed=zeroed,
                ),
                map=None if collision is None else _read_map(config.name, collision),
            )
        )
    check_embedding_names(tuple(tables))
    return CollectionSource(
        module=module, tables=tuple(tables), managed=collisions is not None, need_indices=collection._need_indices
    )


def is_sharded(module: nn.Module) -> bool:
    """Whether ``read_sharded`` reads it."""
    try:
        _split(module)
    except ExportError:
        return False
    return True


def sharding_plan_of(module: nn.Module) -> Mapping[str, ParameterSharding]:
    """The plan that a sharded module was made with.

    Raises:
        ExportError: It is no sharded module.
    """
    plan: Mapping[str, ParameterSharding] = _split(module)[0].module_sharding_plan
    return plan


def ranks_of(module: nn.Module) -> int:
    """How many ranks a sharded module's tables are spread over.

    Raises:
        ExportError: It is no sharded module.
    """
    ranks: int = _split(module)[0]._env.world_size
    return ranks


def _split(module: nn.Module) -> tuple[Any, Any | None]:
    inner: Any = module
    while isinstance(inner, (DistributedModelParallel, DistributedDataParallel)):
        inner = inner.module
    if isinstance(inner, ShardedEmbeddingCollection):
        return inner, None
    if isinstance(inner, ShardedManagedCollisionEmbeddingCollection):
        return inner._embedding_module, inner._managed_collision_collection._managed_collision_modules
    raise ExportError(
        f"{type(inner).__name__} is not sharded by TorchRec: pass a ShardedEmbeddingCollection or "
        "ShardedManagedCollisionEmbeddingCollection (of a larger model, the submodule), or call export_collection"
    )


def _check_sharding(table: str, sharding: ParameterSharding, row_dtype: str) -> None:
    if sharding.sharding_type == ShardingType.COLUMN_WISE.value and row_dtype == RowDtype.INT8:
        raise ExportError(
            f"table {table}: int8 takes its scale from whole rows, and no rank of a column-wise table has them; export a "
            "checkpoint, or use fp16"
        )
    if sharding.compute_kernel == EmbeddingComputeKernel.KEY_VALUE.value:
        raise ExportError(
            f"table {table}: compute kernel 'key_value' keeps its rows on SSD, which is not served; use one that holds them "
            "in memory"
        )


def _read_map(table: str, collision: Any) -> MapSource:
    if isinstance(collision, MCHManagedCollisionModule):
        edges = segments_of(collision._output_segments_tensor)
    else:
        edges = collision._output_segments
    return read_map(table, [piece_of(collision)], buckets_of(collision, edges))
