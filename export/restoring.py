"""Owns the reading of a collection whose state lies elsewhere: a module for its configs, a checkpoint for its numbers.

The module may be on the meta device; it is never loaded into, and never changed.
"""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchrec.modules.mc_modules import MCHManagedCollisionModule

from export.checkpoint import State, find_name, open_state, read_whole
from export.errors import ExportError
from export.maps import (
    buckets_of,
    check_bucket_count,
    check_served,
    piece_of,
    read_map,
    segments_of,
    warn_of_unsaid_buckets,
)
from export.reading import check_config, check_embedding_names, rows_of, split_module
from export.rows import TableRows, piece_at
from export.source import CollectionSource, MapSource, TableSource


def restore_collection(module: nn.Module, checkpoint: str | Path | Mapping[str, Any]) -> CollectionSource:
    """Describe a collection as its training ranks left it; nothing of its rows is copied.

    Args:
        module: An unsharded module of the same configs, on any device.
        checkpoint: A ``torch.distributed.checkpoint`` directory, or a state dict (plain, ``ShardedTensor`` or
            ``DTensor`` entries). Names may lie behind a path of modules.

    Raises:
        ExportError: Something is missing, ambiguous or does not fit the module; names it.
    """
    state = open_state(checkpoint)
    collection, collisions = split_module(module)
    tables = []
    for config, names in zip(collection.embedding_configs(), collection.embedding_names_by_table(), strict=True):
        collision = None if collisions is None else collisions[config.name]
        tables.append(
            TableSource(
                name=config.name,
                features=check_config(config),
                embedding_names=tuple(names),
                numbers=_read_rows(state, config),
                map=None if collision is None else _restore_map(state, config, collision),
            )
        )
    if not tables:
        raise ExportError("the module has no tables: there is nothing to serve")
    check_embedding_names(tuple(tables))
    return CollectionSource(
        module=module,
        tables=tuple(tables),
        managed=collisions is not None,
        need_indices=collection.need_indices(),
    )


def _read_rows(state: State, config: Any) -> TableRows:
    name = _require(state, f"embeddings.{config.name}.weight", (config.num_embeddings, config.embedding_dim))
    pieces = [piece_at(chunk.offsets, chunk.numbers, release=chunk.release) for chunk in state.chunks(name)]
    return rows_of(config, f"{state.place}: {name}", state.shape(name), pieces)


def _restore_map(state: State, config: Any, collision: nn.Module) -> MapSource:
    check_served(config.name, collision)
    if isinstance(collision, MCHManagedCollisionModule):
        return _restore_mch(state, config, collision)
    return _restore_mpzch(state, config, collision)


def _restore_mch(state: State, config: Any, collision: Any) -> MapSource:
    """Each training rank's segment as TorchRec's own module of that rank."""
    rows = config.num_embeddings
    prefix = f"_managed_collision_modules.{config.name}."
    raw_ids = _read_integers(state, _require(state, prefix + "_mch_sorted_raw_ids", (rows,)))
    mapping = _read_integers(state, _require(state, prefix + "_mch_remapped_ids_mapping", (rows,)))
    segments = find_name(state, prefix + "_output_segments_tensor")
    edges = [0, rows] if segments is None else segments_of(read_whole(state, segments))
    if edges[:1] != [0] or edges[-1] != rows or any(start >= stop for start, stop in itertools.pairwise(edges)):
        raise ExportError(
            f"{state.place}: table {config.name}: segments {edges} do not rise from 0 to its {rows} rows; save it again"
        )
    pieces = []
    for start, stop in itertools.pairwise(edges):
        piece = collision.rebuild_with_output_id_range((start, stop), edges, device=torch.device("cpu"))
        piece._mch_sorted_raw_ids.copy_(raw_ids[start:stop])
        piece._mch_remapped_ids_mapping.copy_(mapping[start:stop])
        pieces.append(piece_of(piece.eval()))
    return read_map(config.name, pieces, buckets_of(collision, edges))


def _restore_mpzch(state: State, config: Any, collision: Any) -> MapSource:
    """Whole buckets, one piece for each stored chunk, as the ranks that wrote them had them."""
    rows = config.num_embeddings
    prefix = f"_managed_collision_modules.{config.name}."
    name = _require(state, prefix + "_hash_zch_identities", (rows, 1))
    saved = find_name(state, prefix + "_hash_zch_bucket")
    if saved is None:
        warn_of_unsaid_buckets(config.name, collision)
    else:
        check_bucket_count(config.name, int(read_whole(state, saved)), collision)
    identities = read_whole(state, name)
    edges = collision._output_segments
    starts = sorted({chunk.offsets[0] for chunk in state.chunks(name)} | {0, rows})
    if inside := sorted(set(starts) - set(edges)):
        raise ExportError(
            f"{state.place}: {name}: chunks begin inside of buckets, at rows {inside[:5]}; save it in whole buckets"
        )
    pieces = []
    for start, stop in itertools.pairwise(starts):
        piece = collision.rebuild_with_output_id_range((start, stop), edges, device=torch.device("cpu"))
        with torch.no_grad():
            piece._hash_zch_identities.copy_(identities[start:stop])
        pieces.append(piece_of(piece.eval()))
    return read_map(config.name, pieces, buckets_of(collision, edges))


def _read_integers(state: State, name: str) -> torch.Tensor:
    whole = read_whole(state, name)
    if whole.is_floating_point() or whole.is_complex() or whole.dtype == torch.bool:
        raise ExportError(f"{state.place}: {name}: holds {whole.dtype}; a map is made of INT64: save it again")
    return whole


def _require(state: State, suffix: str, shape: tuple[int, ...]) -> str:
    name = find_name(state, suffix)
    if name is None:
        near = ", ".join(name if name.isprintable() else repr(name) for name in sorted(state.names())[:5]) or "nothing"
        raise ExportError(f"{state.place}: holds no {suffix}; it has {near}{', …' if len(state.names()) > 5 else ''}")
    if state.shape(name) != shape:
        raise ExportError(f"{state.place}: {name}: shape {state.shape(name)}, the module says {shape}")
    return name
