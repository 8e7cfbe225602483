"""Owns the expected answers: TorchRec's own modules, table by table, in eval mode; must not look at an artifact.

The collection's own forward is no oracle: it splits a request in config order but runs its modules in dict order,
keeps the first request's key order, and fails on an empty batch. So each table is asked by name, through its own
``preprocess`` and ``remap``; a table that several ranks trained is asked rank by rank, and FBGEMM's own operator says
which rank an id goes to. Sentinel ids are unknown by rule, although they "hit" empty slots upstream.

Shape suffixes: N ids, D embedding dimension.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from export.contract import NO_ROW, SENTINEL_IDS, Mpzch, Remap, Unknown
from export.source import MapPiece, MapSource, TableSource

_EMPTY = -1
"""What an empty slot of an MPZCH table holds; an id of that number finds one, and is not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Rows of N ids."""

    embeddings_ND: torch.Tensor
    """FP32."""
    row_ids_N: torch.Tensor
    """INT64, −1 where the answer is no row of the table."""
    hits_N: torch.Tensor
    """BOOL."""


@contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """Put every submodule in eval mode, without gradients, and give each its own flag back afterwards."""
    flags = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, training in flags:
            part.training = training


def hash_ids(table: TableSource, ids_N: torch.Tensor) -> torch.Tensor:
    """Ids after the table's ``input_hash_func``, INT64 [N]; the ids themselves if it has none."""
    if table.map is None or table.map.input_hash is None or not ids_N.numel():
        return ids_N
    return _values(table.map.pieces[0].module, ids_N.clone(), method="preprocess")


def look_up(
    table: TableSource, ids_N: torch.Tensor, unknown: Unknown, *, columns: Sequence[slice] = (slice(None),)
) -> Answer:
    """What the trained module answers to ids INT64 [N] after the input hash; call it inside ``eval_mode``.

    An id without a row (a plain table's that is out of range) gets zeros, row id −1 and no hit. Of each row, the given
    columns, one span after the other.
    """
    rows_N, hits_N = find_rows(table, ids_N, unknown)
    parts = [table.numbers.gather(rows_N, columns=span) for span in columns]
    rows_ND = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    return Answer(embeddings_ND=rows_ND, row_ids_N=rows_N, hits_N=hits_N)


def find_rows(table: TableSource, ids_N: torch.Tensor, unknown: Unknown) -> tuple[torch.Tensor, torch.Tensor]:
    """Row INT64 [N] and hit BOOL [N] of ids, as in ``look_up``."""
    if table.map is None:
        hits_N = (ids_N >= 0) & (ids_N < table.rows)
        return torch.where(hits_N, ids_N, NO_ROW), hits_N
    rows_N, hits_N = remap_ids(table.map, ids_N)
    return (torch.where(hits_N, rows_N, NO_ROW) if unknown is Unknown.ZERO else rows_N), hits_N


def remap_ids(source: MapSource, ids_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Row of each id INT64 [N] in the whole table's numbering, INT64 [N], and whether the map holds it, BOOL [N].

    An id that belongs to a piece that is not here has row −1 and no hit.
    """
    buckets_N = training_buckets(source, ids_N)
    edges = torch.tensor(source.training.row_edges)
    rows_N, hits_N = torch.full_like(ids_N, NO_ROW), torch.zeros_like(ids_N, dtype=torch.bool)
    for piece in source.pieces:
        starts_N = edges[buckets_N]
        own = (starts_N >= piece.row_start) & (starts_N < piece.row_stop)
        if source.remap is Remap.MCH:
            rows_N[own], hits_N[own] = _remap_mch(piece, ids_N[own])
        else:
            assert source.mpzch is not None
            rows_N[own], hits_N[own] = _remap_mpzch(piece, source.mpzch, ids_N[own], buckets_N[own])
    return rows_N, hits_N


def training_buckets(source: MapSource, ids_N: torch.Tensor) -> torch.Tensor:
    """Training bucket of each id, INT64 [N], by FBGEMM's routing, or MPZCH's own mapper where the two can differ."""
    buckets = source.training.buckets
    if buckets == 1 or not ids_N.numel():
        return torch.zeros_like(ids_N)
    if source.training.floor_modulo:
        mapper: Any = source.pieces[0].module
        _, _, starts_N = mapper.input_mapper(ids_N)
        return torch.searchsorted(torch.tensor(source.training.row_edges), starts_N, right=True) - 1
    size = -(-source.training.input_hash_size // buckets)
    lengths_B, *_, order_N = torch.ops.fbgemm.block_bucketize_sparse_features(
        torch.tensor([ids_N.numel()]),
        ids_N,
        bucketize_pos=False,
        sequence=True,
        block_sizes=torch.tensor([size]),
        total_num_blocks=torch.tensor([[buckets]]),
        my_size=buckets,
        keep_orig_idx=True,
    )
    return torch.searchsorted(lengths_B.cumsum(0), order_N, right=True)


def _remap_mch(piece: MapPiece, ids_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    module: Any = piece.module
    rows_N = _values(module, ids_N, method="remap")
    raw_ids = module._mch_sorted_raw_ids
    hits_N = module._match_indices(raw_ids, ids_N.to(raw_ids.device))[0].cpu()
    for sentinel in SENTINEL_IDS:
        hits_N &= ids_N != sentinel
        rows_N = torch.where(ids_N == sentinel, piece.row_stop - 1, rows_N)
    return rows_N, hits_N


def _remap_mpzch(
    piece: MapPiece, mpzch: Mpzch, ids_N: torch.Tensor, buckets_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel call of the module's own ``remap`` in eval mode, without its dropping of ids that miss."""
    module: Any = piece.module
    mapper = module.input_mapper
    identities = module._hash_zch_identities.detach().cpu()
    slots_N = torch.ops.fbgemm.zero_collision_hash(
        input=ids_N,
        identities=identities,
        max_probe=module._max_probe,
        circular_probe=True,
        exp_hours=-1,
        readonly=True,
        local_sizes=mapper._zch_size_per_training_rank.cpu()[buckets_N],
        offsets=mapper._train_rank_offsets.cpu()[buckets_N] - piece.row_start,
        disable_fallback=module._disable_fallback,
        opt_in_prob=module._opt_in_prob,
        num_reserved_slots=module.get_reserved_slots_per_bucket(),
    )[0]
    hits_N = (slots_N >= 0) & (ids_N != _EMPTY)
    hits_N &= identities[slots_N.clamp(min=0), 0] == ids_N
    missed_N = ~hits_N & torch.tensor(mpzch.disable_fallback)
    return torch.where(missed_N, mpzch.default_row, slots_N + piece.row_start), hits_N


def _values(module: Any, ids_N: torch.Tensor, *, method: str) -> torch.Tensor:
    on_device_N = ids_N.to(module.device)
    features = {
        "ids": JaggedTensor(values=on_device_N, lengths=torch.tensor([ids_N.numel()], device=on_device_N.device))
    }
    values: torch.Tensor = getattr(module, method)(features)["ids"].values()
    return values.cpu()
