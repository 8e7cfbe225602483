"""Owns the reading of a TorchRec module into a neutral description; must not change the module or write a file.

Shape suffixes: K ids in a managed-collision map, R rows of a table.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import ManagedCollisionModule, MCHManagedCollisionModule

from export.contract import INT64_MAX, Mpzch, Remap, TrainingBuckets
from export.errors import ExportError
from export.rows import TableRows, whole_table

_log = logging.getLogger(__name__)

HashFunction = Callable[[torch.Tensor, int], torch.Tensor]
"""TorchRec's ``input_hash_func``: (ids INT64 [N], input_hash_size) → ids INT64 [N]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputHash:
    """What a managed collision module does to an id before it looks it up."""

    function: HashFunction
    size: int
    """``input_hash_size``, the function's second argument."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MapPiece:
    """The part of a map that one training rank owned, as TorchRec's own module: what the oracle asks."""

    row_start: int
    row_stop: int
    module: ManagedCollisionModule


@dataclass(frozen=True, slots=True, kw_only=True)
class MapSource:
    """The learned id → row map of one managed-collision table."""

    remap: Remap
    pieces: tuple[MapPiece, ...]
    """In row order: one for an unsharded module, one for each training rank of a checkpoint, this rank's alone of a live
    sharded module."""
    training: TrainingBuckets
    policy: str
    """Name of the eviction policy, see ``export.contract.Zch``."""
    ids_K: torch.Tensor
    """INT64, after the input hash, sentinels left out; each piece's are ascending (MCH) or in row order (MPZCH)."""
    rows_K: torch.Tensor
    """INT64: the row of each id, in the whole table's numbering."""
    open_slots: int
    input_hash: InputHash | None
    mpzch: Mpzch | None = None
    identities_R: torch.Tensor | None = None
    """MPZCH: INT64 [R], the id in each row's slot, −1 where empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSource:
    """One table of the module."""

    name: str
    features: tuple[str, ...]
    embedding_names: tuple[str, ...]
    numbers: TableRows
    map: MapSource | None
    """None: a plain table."""

    @property
    def rows(self) -> int:
        """``num_embeddings``."""
        return self.numbers.rows

    @property
    def dim(self) -> int:
        """Embedding dimension."""
        return self.numbers.dim


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectionSource:
    """A whole module: its tables in config order."""

    module: nn.Module
    tables: tuple[TableSource, ...]
    managed: bool
    """True for a ManagedCollisionEmbeddingCollection."""
    need_indices: bool = False

    @property
    def dim(self) -> int:
        """Embedding dimension, the same for all tables."""
        return self.tables[0].dim


def read_collection(module: nn.Module) -> CollectionSource:
    """Describe a TorchRec module without copying its rows.

    Args:
        module: An unsharded ``EmbeddingCollection`` or ``ManagedCollisionEmbeddingCollection``.

    Raises:
        ExportError: It is something else, or a table of it is not served; names the table and what to do.
    """
    collection, managed = _embedding_collection(module)
    configs = collection.embedding_configs()
    if not configs:
        raise ExportError("the module has no tables: there is nothing to serve")
    names = collection.embedding_names_by_table()
    tables = tuple(
        _read_table(
            config,
            collection.embeddings[config.name],
            tuple(embedding_names),
            _collision_module(module, config.name) if managed else None,
        )
        for config, embedding_names in zip(configs, names, strict=True)
    )
    _check_embedding_names(tables)
    return CollectionSource(module=module, tables=tables, managed=managed, need_indices=collection.need_indices())


def _check_embedding_names(tables: tuple[TableSource, ...]) -> None:
    """TorchRec names a shared feature's output ``feature@table``, which can be another feature's own name."""
    makers: dict[str, str] = {}
    for table in tables:
        for feature, name in zip(table.features, table.embedding_names, strict=True):
            maker = f"feature {feature!r} of table {table.name}"
            if name in makers:
                raise ExportError(f"{makers[name]} and {maker} both have the embedding name {name!r}; rename a feature")
            makers[name] = maker


def _embedding_collection(module: nn.Module) -> tuple[Any, bool]:
    if isinstance(module, EmbeddingCollection):
        return module, False
    if isinstance(module, ManagedCollisionEmbeddingCollection) and isinstance(
        module._embedding_module, EmbeddingCollection
    ):
        return module._embedding_module, True
    kind = type(module).__name__
    if isinstance(module, (EmbeddingBagCollection, ManagedCollisionEmbeddingBagCollection)):
        raise ExportError(f"{kind} gives pooled embeddings, which are not served; train with an EmbeddingCollection")
    raise ExportError(
        f"{kind} cannot be exported: pass an unsharded EmbeddingCollection or ManagedCollisionEmbeddingCollection "
        "(of a larger model, the submodule)"
    )


def _collision_module(module: nn.Module, table: str) -> nn.Module:
    modules: Any = module._managed_collision_collection._managed_collision_modules  # type: ignore[union-attr]
    found: nn.Module = modules[table]
    return found


def _read_table(
    config: Any, embedding: nn.Module, embedding_names: tuple[str, ...], collision: nn.Module | None
) -> TableSource:
    features = tuple(config.feature_names)
    if len(set(features)) != len(features):
        raise ExportError(f"table {config.name}: features {list(features)} name one twice; list each feature once")
    weight = _read_weight(config, embedding)
    return TableSource(
        name=config.name,
        features=features,
        embedding_names=embedding_names,
        numbers=whole_table(config.name, weight),
        map=None if collision is None else _read_map(config.name, collision, rows=int(weight.shape[0])),
    )


def _read_weight(config: Any, embedding: nn.Module) -> torch.Tensor:
    weight: Any = embedding.weight
    if weight.is_meta:
        raise ExportError(
            f"table {config.name}: its rows are on the meta device; load a checkpoint into the module first"
        )
    if type(weight) not in (torch.Tensor, nn.Parameter) or not weight.is_floating_point():
        raise ExportError(
            f"table {config.name}: its rows are a {type(weight).__name__} of {weight.dtype}; "
            "export the unsharded module with floating point rows"
        )
    shape = (config.num_embeddings, config.embedding_dim)
    if tuple(weight.shape) != shape:
        raise ExportError(f"table {config.name}: its rows have shape {tuple(weight.shape)}, its config says {shape}")
    return weight.detach()  # type: ignore[no-any-return]


def _read_map(table: str, collision: nn.Module, *, rows: int) -> MapSource:
    if not isinstance(collision, MCHManagedCollisionModule):
        raise ExportError(
            f"table {table}: {type(collision).__name__} is not served; use MCHManagedCollisionModule "
            "with LFU, LRU or DistanceLFU eviction"
        )
    raw_ids: Any = collision._mch_sorted_raw_ids
    mapping: Any = collision._mch_remapped_ids_mapping
    if raw_ids.is_meta:
        raise ExportError(f"table {table}: its id map is on the meta device; load a checkpoint into the module first")
    _check_map(table, collision, raw_ids, mapping, rows=rows)
    ids_K, rows_K = _served_ids(table, raw_ids.cpu(), mapping.cpu())
    function = collision._input_hash_func
    return MapSource(
        remap=Remap.MCH,
        pieces=(MapPiece(row_start=0, row_stop=rows, module=collision),),
        training=TrainingBuckets(input_hash_size=collision._input_hash_size, row_edges=(0, rows)),
        policy=type(collision._eviction_policy).__name__,
        ids_K=ids_K,
        rows_K=rows_K,
        open_slots=max(0, int(collision.open_slots())),
        input_hash=None if function is None else InputHash(function=function, size=collision._input_hash_size),
    )


def _check_map(
    table: str, collision: MCHManagedCollisionModule, raw_ids: torch.Tensor, mapping: torch.Tensor, *, rows: int
) -> None:
    if collision._evicted:
        raise ExportError(
            f"table {table}: ids were evicted since the last evict(), so their rows still hold the evicted ids' "
            "embeddings; call evict() on the collision modules, reset the rows that it names, then export"
        )
    if collision._output_global_offset or collision._zch_size != rows:
        raise ExportError(
            f"table {table}: its id map covers rows {collision._output_global_offset}.."
            f"{collision._output_global_offset + collision._zch_size} of {rows}, so it is one rank's piece; "
            "export the unsharded module"
        )
    if bool((raw_ids[1:] < raw_ids[:-1]).any()):
        raise ExportError(f"table {table}: its id map is not sorted; call validate_state() after loading it")
    if bool(((mapping < 0) | (mapping >= rows)).any()):
        raise ExportError(f"table {table}: its id map points outside the table's {rows} rows; the checkpoint is broken")


def _served_ids(table: str, raw_ids: torch.Tensor, mapping: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut the empty slots off the map, and the one sentinel that training can put there."""
    occupied = int(torch.searchsorted(raw_ids, INT64_MAX))
    ids_K, rows_K = raw_ids[:occupied], mapping[:occupied]
    if bool((ids_K[1:] == ids_K[:-1]).any()):
        raise ExportError(f"table {table}: its id map holds an id twice; the checkpoint is broken")
    served = ids_K != -1
    if not bool(served.all()):
        _log.warning("table %s: the map holds the id -1, which marks an empty slot and is served as unknown", table)
        ids_K, rows_K = ids_K[served], rows_K[served]
    return ids_K, rows_K
