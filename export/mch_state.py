"""Owns an MCH table's part of a shard: the ids that it serves, their local rows, and the rows of unknown ids.

Shape suffixes: K ids of the table on this shard, B training buckets.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from export.bucket_state import ONE_BUCKET, bucket_rule
from export.contract import NO_ROW, Routing, ShardTable, TrainingBuckets, Unknown, hash_shard
from export.hash_table import build_hash_table
from export.rows import TableRows
from export.source import MapSource
from export.state import PlacedTable


@dataclass(frozen=True, slots=True, kw_only=True)
class MchTable:
    """One MCH table on one shard."""

    entry: ShardTable
    numbers: TableRows
    row_ids: torch.Tensor
    """Trainer's row of each local row, INT64; ``NO_ROW``: a row of zeros."""
    ids_K: torch.Tensor
    locals_K: torch.Tensor
    training: TrainingBuckets
    """``ONE_BUCKET`` where all unknown ids have one row."""
    unknown_B: torch.Tensor
    """Local row of an id of each bucket that the map does not hold."""


def route_map(source: MapSource, num_shards: int) -> torch.Tensor:
    """Shard of each id of a map under ``hash`` routing, INT64 [K]."""
    if num_shards == 1:
        return torch.zeros_like(source.ids_K)
    return torch.from_numpy(hash_shard(source.ids_K.numpy().view(np.uint64), num_shards).astype(np.int64))


def cut_mch(table: PlacedTable, shard: int, num_shards: int, first_local: int) -> MchTable:
    """What a shard holds of a table; its local rows are numbered from ``first_local``."""
    source = table.source.map
    assert source is not None  # only managed tables come here
    (piece,) = table.pieces_on(shard)
    ids_K, rows_K = source.ids_K, source.rows_K
    if table.routing is Routing.HASH:
        mine = route_map(source, num_shards) == shard
        ids_K, rows_K = ids_K[mine], rows_K[mine]
    elif table.routing is Routing.TRAINING:
        mine = (rows_K >= piece.row_start) & (rows_K < piece.row_stop)
        ids_K, rows_K = ids_K[mine], rows_K[mine]
    # Local rows in the trainer's row order: the rows are then read from front to back.
    order = torch.argsort(rows_K, stable=True)
    ids_K, rows_K = ids_K[order], rows_K[order]
    num_ids = int(ids_K.shape[0])
    training, defaults = _defaults(table, source.training, piece.row_start, piece.row_stop)
    places = {row: first_local + num_ids + at for at, row in enumerate(dict.fromkeys(defaults))}
    return MchTable(
        entry=ShardTable(
            table=table.source.name,
            rows=num_ids + len(places),
            width=table.source.dim,
            zch_rows=num_ids,
            zch_open_slots=_open_slots(table, source, shard, num_shards),
        ),
        numbers=table.source.numbers,
        row_ids=torch.cat([rows_K, torch.tensor(list(places), dtype=torch.int64)]),
        ids_K=ids_K,
        locals_K=torch.arange(first_local, first_local + num_ids),
        training=training,
        unknown_B=torch.tensor([places[row] for row in defaults], dtype=torch.int64),
    )


def _defaults(
    table: PlacedTable, training: TrainingBuckets, row_start: int, row_stop: int
) -> tuple[TrainingBuckets, list[int]]:
    """The row of unknown ids of each bucket; buckets of other shards, which are never asked here, share the first."""
    if table.unknown is Unknown.ZERO:
        return ONE_BUCKET, [NO_ROW]
    if training.buckets == 1:
        return ONE_BUCKET, [training.row_edges[-1] - 1]
    edges = itertools.pairwise(training.row_edges)
    own = [stop - 1 if row_start <= start and stop <= row_stop else None for start, stop in edges]
    anyone = next((row for row in own if row is not None), NO_ROW)
    return training, [anyone if row is None else row for row in own]


def _open_slots(table: PlacedTable, source: MapSource, shard: int, num_shards: int) -> int:
    """This shard's share; the shares add up to the table's number."""
    if table.routing is Routing.HASH:
        each, more = divmod(source.open_slots, num_shards)
        return each + (shard < more)
    (piece,) = table.pieces_on(shard)
    return source.open_slots_in(piece)


def build_mch_tensors(tables: Sequence[MchTable | None], row_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """State of ``MchRemap``, or ``BucketedMchRemap`` if a table has several default rows.

    Args:
        tables: The shard's tables in order; None where one is of another kind.
        row_ids: Trainer's row of every local row of the shard.
    """
    empty = torch.empty(0, dtype=torch.int64)
    keyed = [(empty, empty) if table is None else (table.ids_K, table.locals_K) for table in tables]
    hash_table, offsets = build_hash_table(keyed)
    rules = [ONE_BUCKET if table is None else table.training for table in tables]
    unknown = [torch.zeros(1, dtype=torch.int64) if table is None else table.unknown_B for table in tables]
    tensors = {
        "hash_table_offsets": offsets,
        "unknown_rows": torch.cat([*unknown, torch.empty(0, dtype=torch.int64)]),
        "row_ids": row_ids,
        "hash_table": hash_table,
    }
    return tensors if all(rule.buckets == 1 for rule in rules) else bucket_rule(rules) | tensors
