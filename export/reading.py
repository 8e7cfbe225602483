"""Owns the reading of an unsharded TorchRec module; must not change the module or write a file."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import MCHManagedCollisionModule

from export.errors import ExportError
from export.maps import buckets_of, check_served, piece_of, read_map, unconsumed_rows
from export.options import Evicted
from export.rows import RowPiece, TableRows, piece_at
from export.shards import local_shards
from export.source import CollectionSource, MapSource, TableSource


def read_collection(
    module: nn.Module,
    *,
    evicted: Evicted = Evicted.REFUSE,
    collisions: Mapping[str, nn.Module] | None = None,
    numbers: Mapping[str, TableRows] | None = None,
) -> CollectionSource:
    """Describe a TorchRec module without copying its rows.

    Args:
        module: An unsharded ``EmbeddingCollection`` or ``ManagedCollisionEmbeddingCollection``.
        evicted: What to do when ids were evicted and ``evict()`` has not been called.
        collisions: By table, managed collision modules to read in place of the module's own: copies of them.
        numbers: By table, rows to read in place of the module's own.

    Raises:
        ExportError: It is something else, or a table of it is not served; names the table and what to do.
    """
    collection, own = split_module(module)
    maps = own if collisions is None else collisions
    configs = collection.embedding_configs()
    if not configs:
        raise ExportError("the module has no tables: there is nothing to serve")
    names = collection.embedding_names_by_table()

    def rows_of(config: Any, zeroed: torch.Tensor | None) -> TableRows:
        if numbers is not None:
            return numbers[config.name]
        return read_rows(config, collection.embeddings[config.name].weight, zeroed)

    tables = tuple(
        _read_table(config, tuple(embedding_names), maps, evicted, rows_of)
        for config, embedding_names in zip(configs, names, strict=True)
    )
    check_embedding_names(tables)
    return CollectionSource(
        module=module if collisions is None else nn.ModuleDict(dict(collisions)),
        tables=tables,
        managed=maps is not None,
        need_indices=collection.need_indices(),
    )


def split_module(module: nn.Module) -> tuple[Any, Any | None]:
    """The embedding collection of a module, and its managed collision modules by table, if it has them.

    Raises:
        ExportError: It is neither of the two that are served.
    """
    if isinstance(module, EmbeddingCollection):
        return module, None
    if isinstance(module, ManagedCollisionEmbeddingCollection) and isinstance(
        module._embedding_module, EmbeddingCollection
    ):
        return module._embedding_module, module._managed_collision_collection._managed_collision_modules
    kind = type(module).__name__
    if isinstance(module, (EmbeddingBagCollection, ManagedCollisionEmbeddingBagCollection)):
        raise ExportError(f"{kind} gives pooled embeddings, which are not served; train with an EmbeddingCollection")
    if type(module).__module__.startswith("torchrec.quant"):
        raise ExportError(f"{kind} of torchrec.quant is quantised; pass the trained module, and int8 as row_dtype")
    if kind.startswith("Sharded") or kind == "DistributedModelParallel":
        raise ExportError(f"{kind} is sharded; call export_sharded on every rank, or export its checkpoint")
    raise ExportError(
        f"{kind} cannot be exported: pass an EmbeddingCollection or ManagedCollisionEmbeddingCollection "
        "(of a larger model, the submodule)"
    )


def check_embedding_names(tables: tuple[TableSource, ...]) -> None:
    """TorchRec names a shared feature's output ``feature@table``, which can be another feature's own name."""
    makers: dict[str, str] = {}
    for table in tables:
        for feature, name in zip(table.features, table.embedding_names, strict=True):
            maker = f"feature {feature!r} of table {table.name}"
            if name in makers:
                raise ExportError(f"{makers[name]} and {maker} both have the embedding name {name!r}; rename a feature")
            makers[name] = maker


def check_config(config: Any) -> tuple[str, ...]:
    """Features of a table whose config can be served.

    Raises:
        ExportError: It cannot; names the table.
    """
    if config.use_virtual_table:
        raise ExportError(
            f"table {config.name}: use_virtual_table keeps its rows in a key-value store, which is not served; use a "
            "managed collision module for ids of a large range"
        )
    features = tuple(config.feature_names)
    if len(set(features)) != len(features):
        raise ExportError(f"table {config.name}: features {list(features)} name one twice; list each feature once")
    for name in (config.name, *features):
        if not _is_text(name):
            raise ExportError(f"table {config.name!r}: the name {name!r} has no UTF-8 form; rename it")
    return features


def _is_text(name: str) -> bool:
    """Python has strings, with a surrogate alone in them, that no manifest and no request can carry."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _read_table(
    config: Any,
    embedding_names: tuple[str, ...],
    collisions: Any | None,
    evicted: Evicted,
    rows_of: Callable[[Any, torch.Tensor | None], TableRows],
) -> TableSource:
    features = check_config(config)
    zeroed = None
    source: MapSource | None = None
    if collisions is not None:
        collision = collisions[config.name]
        check_served(config.name, collision)
        zeroed = unconsumed_rows(config.name, [collision], evicted)
        source = _read_map(config.name, collision, rows=config.num_embeddings)
    return TableSource(
        name=config.name,
        features=features,
        embedding_names=embedding_names,
        numbers=rows_of(config, zeroed),
        map=source,
    )


def _read_map(table: str, collision: Any, *, rows: int) -> MapSource:
    piece = piece_of(collision)
    if (piece.row_start, piece.row_stop) != (0, rows):
        raise ExportError(
            f"table {table}: its id map covers rows {piece.row_start}..{piece.row_stop} of {rows}, so it is one rank's "
            "piece; call export_sharded on every rank, or export the unsharded module or a checkpoint"
        )
    edges = (0, rows) if isinstance(collision, MCHManagedCollisionModule) else collision._output_segments
    return read_map(table, [piece], buckets_of(collision, edges))


def read_rows(config: Any, weight: Any, zeroed: torch.Tensor | None = None) -> TableRows:
    """A table's rows from a parameter: a tensor, a ``ShardedTensor`` or a ``DTensor``.

    Raises:
        ExportError: See ``rows_of``.
    """
    pieces = [piece_at(*shard) for shard in local_shards(weight)]
    return rows_of(config, f"table {config.name}", tuple(weight.shape), pieces, zeroed)


def rows_of(
    config: Any, place: str, shape: tuple[int, ...], pieces: Sequence[RowPiece], zeroed: torch.Tensor | None = None
) -> TableRows:
    """A table's rows from the pieces of a tensor of that shape; ``place`` is what a message calls it.

    Raises:
        ExportError: The shape is not the config's, a piece cannot be served, or they are not the whole table.
    """
    rows, dim = config.num_embeddings, config.embedding_dim
    if shape != (rows, dim):
        raise ExportError(f"{place}: its rows have shape {shape}, its config says {(rows, dim)}")
    checked = [check_piece(place, piece) for piece in pieces]
    held = sum(piece.numbers.numel() for piece in checked)
    if held != rows * dim:
        raise ExportError(
            f"{place}: {held} of its {rows * dim} numbers are in this process; call export_sharded on every rank, or "
            "pass a checkpoint with all of them"
        )
    return TableRows(table=config.name, rows=rows, dim=dim, pieces=checked, zeroed=zeroed)


def check_piece(place: str, piece: RowPiece) -> RowPiece:
    """The piece, if its numbers can be served; else raises ExportError."""
    if piece.numbers.is_meta:
        raise ExportError(f"{place}: its rows are on the meta device; pass the checkpoint they are in")
    if not piece.numbers.is_floating_point() or type(piece.numbers) not in (torch.Tensor, nn.Parameter):
        raise ExportError(
            f"{place}: its rows are a {type(piece.numbers).__name__} of {piece.numbers.dtype}; "
            "only floating point rows are served, quantise with row_dtype"
        )
    return piece
