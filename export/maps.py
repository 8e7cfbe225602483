"""Owns the reading of learned id maps: MCH and MPZCH modules, one or a training rank's each, into ``MapSource``.

Must not change a module. Shape suffixes: K ids in a map, R rows of a table.
"""

import itertools
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
from torchrec.modules.mc_modules import MCHManagedCollisionModule

from export.contract import INT64_MAX, NO_ROW, Mpzch, Remap, TrainingBuckets, training_bucket
from export.errors import ExportError
from export.options import Evicted
from export.oracle import remap_ids
from export.source import InputHash, MapPiece, MapSource

_log = logging.getLogger(__name__)

_IDS_AT_ONCE = 1 << 20
"""Ids that the kernel is asked for in one call, so that a large map does not take its memory several times."""


def check_served(table: str, module: nn.Module) -> None:
    """Raise ExportError, in one line that names it, for a managed collision module that is not served."""
    if not isinstance(module, (MCHManagedCollisionModule, HashZchManagedCollisionModule)):
        raise ExportError(
            f"table {table}: {type(module).__name__} is not served; use MCHManagedCollisionModule "
            "(LFU, LRU or DistanceLFU eviction) or HashZchManagedCollisionModule"
        )
    if isinstance(module, HashZchManagedCollisionModule):
        _check_mpzch(table, module)


def unconsumed_rows(table: str, modules: Sequence[nn.Module], evicted: Evicted) -> torch.Tensor | None:
    """Rows that ``evict()`` would name, in the whole table's numbering; None where it would name none.

    Raises:
        ExportError: There are some, and ``evicted`` is ``refuse``.
    """
    named = [rows for module in modules for rows in evicted_rows(module)]
    if not named:
        return None
    if evicted is Evicted.REFUSE:
        raise ExportError(
            f"table {table}: ids were evicted since the last evict(), so their rows still hold the evicted ids' "
            "embeddings; call evict() on the collision modules and reset the rows that it names, or export with "
            "evicted='reset' (--evicted reset), which serves them as zeros"
        )
    return torch.cat(named)


def evicted_rows(module: Any) -> list[torch.Tensor]:
    """Rows that a module's ``evict()`` would name, in the whole table's numbering; does not call it."""
    if isinstance(module, MCHManagedCollisionModule):
        named = [module._evicted_emb_indices.to(torch.int64).cpu()] if module._evicted else []
    else:
        named = [rows.cpu() + _first_row(module) for rows in module._evicted_indices]
    return [rows for rows in named if rows.numel()]  # TorchRec also notes an eviction that took no id


def _first_row(module: Any) -> int:
    """First row of the table that a module's map covers."""
    if isinstance(module, MCHManagedCollisionModule):
        return int(module._output_global_offset)
    offset = module._output_global_offset_tensor
    return 0 if offset is None else int(offset)


def piece_of(module: Any) -> MapPiece:
    """The rows of the table that a module's map covers."""
    start = _first_row(module)
    return MapPiece(row_start=start, row_stop=start + module._zch_size, module=module)


def buckets_of(module: Any, row_edges: Sequence[int]) -> TrainingBuckets:
    """How training cut the table of a module, whose buckets have the rows between ``row_edges``."""
    size = module._input_hash_size
    floor_modulo = size == 0 and not isinstance(module, MCHManagedCollisionModule)
    return TrainingBuckets(input_hash_size=size, row_edges=tuple(row_edges), floor_modulo=floor_modulo)


def segments_of(padded: torch.Tensor) -> list[int]:
    """Row edges out of ``_output_segments_tensor``, which TorchRec fills up with −1."""
    edges: list[int] = padded.reshape(-1).to(torch.int64).tolist()
    return edges[: edges.index(-1)] if -1 in edges else edges


def check_bucket_count(table: str, saved: int, module: Any) -> None:
    """Raise ExportError when state was saved with another number of MPZCH buckets than the module has."""
    if saved != module._buckets:
        raise ExportError(
            f"table {table}: its state was saved with {saved} buckets, the module has {module._buckets}: ids would be "
            "looked up in the wrong bucket; build the module with the bucket count of its training"
        )


def warn_of_unsaid_buckets(table: str, module: Any) -> None:
    """Say so where state without a bucket count could be of another one although all of its ids are found."""
    smallest = min(stop - start for start, stop in itertools.pairwise(module._output_segments))
    if not module._disable_fallback and module._max_probe >= smallest:
        _log.warning(
            "table %s: its state does not say its bucket count, and max_probe %d reaches over whole buckets of %d rows, "
            "where ids are found under several counts; make sure that training had %d, or unknown ids get other rows",
            table,
            module._max_probe,
            smallest,
            module._buckets,
        )


def read_map(table: str, pieces: Sequence[MapPiece], training: TrainingBuckets) -> MapSource:
    """Describe the map of one table.

    Args:
        table: Its name.
        pieces: Its modules, all of one kind: the unsharded one, or those of training ranks, in row order.
        training: The whole table's buckets.

    Raises:
        ExportError: A module's state is not what training leaves; names the table and what to do.
    """
    if isinstance(pieces[0].module, MCHManagedCollisionModule):
        return _read_mch(table, pieces, training)
    return _read_mpzch(table, pieces, training)


def _read_mch(table: str, pieces: Sequence[MapPiece], training: TrainingBuckets) -> MapSource:
    parts = [_served_ids(table, piece, training) for piece in pieces]
    first: Any = pieces[0].module
    function = first._input_hash_func
    return MapSource(
        remap=Remap.MCH,
        pieces=tuple(pieces),
        training=training,
        policy=type(first._eviction_policy).__name__,
        ids_K=torch.cat([ids for ids, _ in parts]),
        rows_K=torch.cat([rows for _, rows in parts]),
        input_hash=None if function is None else InputHash(function=function, size=first._input_hash_size),
    )


def _served_ids(table: str, piece: MapPiece, training: TrainingBuckets) -> tuple[torch.Tensor, torch.Tensor]:
    """A piece's ids and rows, without empty slots, sentinels, and ids that training asks another rank for."""
    module: Any = piece.module
    raw_ids, mapping = module._mch_sorted_raw_ids, module._mch_remapped_ids_mapping
    if raw_ids.is_meta:
        raise ExportError(f"table {table}: its id map is on the meta device; load a checkpoint into the module first")
    raw_ids, mapping = raw_ids.cpu(), mapping.cpu()
    if bool((raw_ids[1:] < raw_ids[:-1]).any()):
        raise ExportError(f"table {table}: its id map is not sorted; call validate_state() after loading it")
    if bool(((mapping < piece.row_start) | (mapping >= piece.row_stop)).any()):
        raise ExportError(
            f"table {table}: its id map points outside rows {piece.row_start}..{piece.row_stop}; the checkpoint is broken"
        )
    occupied = int(torch.searchsorted(raw_ids, INT64_MAX))
    ids_K, rows_K = raw_ids[:occupied], mapping[:occupied]
    if bool((ids_K[1:] == ids_K[:-1]).any()):
        raise ExportError(f"table {table}: its id map holds an id twice; the checkpoint is broken")
    served = ids_K != -1
    if not bool(served.all()):
        _log.warning("table %s: the map holds the id -1, which marks an empty slot and is served as unknown", table)
    asked = torch.from_numpy(_asked(ids_K, piece, training))
    if strayed := int((served & ~asked).sum()):
        _log.warning("table %s: %d ids lie on a rank that training does not ask for them: unknown", table, strayed)
    served &= asked
    return (ids_K, rows_K) if bool(served.all()) else (ids_K[served], rows_K[served])


def _asked(ids_K: torch.Tensor, piece: MapPiece, training: TrainingBuckets) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Whether training's routing leads each id to this piece."""
    if training.buckets == 1:
        return np.ones(ids_K.shape[0], dtype=np.bool_)
    bucket = training_bucket(
        ids_K.numpy().view(np.uint64), input_hash_size=training.input_hash_size, buckets=training.buckets
    )
    starts = np.array(training.row_edges[:-1], dtype=np.int64)[bucket.astype(np.int64)]
    asked: np.ndarray[Any, np.dtype[np.bool_]] = (starts >= piece.row_start) & (starts < piece.row_stop)
    return asked


def _read_mpzch(table: str, pieces: Sequence[MapPiece], training: TrainingBuckets) -> MapSource:
    first: Any = pieces[0].module
    whole = (pieces[0].row_start, pieces[0].row_stop) == (0, training.row_edges[-1])
    if first._disable_fallback and first._no_bag and not whole:
        raise ExportError(
            f"table {table}: trained on several ranks with no_bag, where each rank answers an id that it does not hold "
            "with its own first row; that is not served; export with no_bag=False, which answers zeros"
        )
    identities_R = torch.full((training.row_edges[-1],), -1, dtype=torch.int64)
    for piece in pieces:
        identities: Any = piece.module._hash_zch_identities
        if identities.is_meta:
            raise ExportError(
                f"table {table}: its identities are on the meta device; load a checkpoint into the module first"
            )
        identities_R[piece.row_start : piece.row_stop] = identities.detach().cpu().reshape(-1)
    rows_K = (identities_R != -1).nonzero()[:, 0]
    policy = first._eviction_policy_name_copy
    source = MapSource(
        remap=Remap.MPZCH,
        pieces=tuple(pieces),
        training=training,
        policy="none" if policy is None else policy.name,
        ids_K=identities_R[rows_K],
        rows_K=rows_K,
        input_hash=None,
        mpzch=_constants(table, first, training),
        identities_R=identities_R,
    )
    _check_found(table, source)
    return source


def _check_found(table: str, source: MapSource) -> None:
    """Raise ExportError unless the kernel finds every id of an MPZCH map.

    Training puts an id into a slot that is probed for it, so every id is found: in its own slot, or, where threads of
    one batch evicted a slot each for one id, in the first of its copies.
    """
    assert source.mpzch is not None
    hits = [remap_ids(source, ids_N)[1] for ids_N in torch.split(source.ids_K, _IDS_AT_ONCE)]
    known = int(torch.cat(hits).sum())
    held = int(source.ids_K.shape[0])
    if known != held:
        raise ExportError(
            f"table {table}: {held - known} of {held} ids are not found where they lie by a module of "
            f"{source.training.buckets} buckets and max_probe {source.mpzch.max_probe}, so they were put there by another; "
            "build the module with the bucket count, max_probe, input_hash_size and reserved slots of its training"
        )


def _constants(table: str, module: Any, training: TrainingBuckets) -> Mpzch:
    reserved = int(module.get_reserved_slots_per_bucket())
    smallest = min(stop - start for start, stop in itertools.pairwise(training.row_edges))
    if module._opt_in_prob != -1 and not 0 < reserved < smallest:
        raise ExportError(
            f"table {table}: {reserved} reserved slots in a bucket of {smallest} rows; opt-in needs some of each"
        )
    return Mpzch(
        max_probe=module._max_probe,
        disable_fallback=module._disable_fallback,
        opt_in_prob=module._opt_in_prob,
        num_reserved_slots=reserved,
        default_row=0 if module._disable_fallback and module._no_bag else NO_ROW,
    )


def _check_mpzch(table: str, module: Any) -> None:
    if not module._hash_zch_bucket.is_meta:
        check_bucket_count(table, int(module._hash_zch_bucket), module)
    if module.input_mapper._inference_dispatch_div_train_world_size:
        raise ExportError(
            f"table {table}: inference_dispatch_div_train_world_size is not served: identities would hold other numbers "
            "than the ids; train and export without it"
        )
    identities = module._hash_zch_identities
    if identities.dtype != torch.int64 or identities.dim() != 2 or identities.shape[1] != 1:
        raise ExportError(
            f"table {table}: identities are {identities.dtype} {list(identities.shape)}; only INT64 [R, 1] is served"
        )
