"""Owns which shard each unique id goes to and where its row will lie; pure functions, no I/O.

The rows of a batch live in one buffer, shard by shard, each shard's block in the very order of its reply: so merging is
writing each reply to its own block, and undoing the dedup is one gather.

Shape suffixes: see ``service.types``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from export.contract import Routing, hash_shard
from service.catalog import ServedTable, ServedVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Where the unique ids of a batch go."""

    offsets_S1: NDArray[np.int64]
    """[S+1]: shard ``s`` owns the rows [offsets[s], offsets[s+1]) of the batch's buffer."""
    ids_S: tuple[NDArray[np.int64], ...]
    """Per shard: its ids, grouped by the shard's table order."""
    table_lengths_S: tuple[NDArray[np.int64], ...]
    """Per shard: [T] ids of each of the shard's tables."""
    rows_T: tuple[NDArray[np.int64], ...]
    """Per table of the version: [U] row in the buffer of each unique id."""


def shard_ids(table: ServedTable, unique_U: NDArray[np.int64], num_shards: int) -> NDArray[np.uint16]:
    """Shard of each id: UINT16 [U].

    Ids outside a plain table's rows go to the nearest end; the shard there answers them by the table's rule.
    """
    if table.routing is Routing.HASH:
        return hash_shard(unique_U.view(np.uint64), num_shards).astype(np.uint16)
    if table.routing is Routing.ROWS:
        return np.searchsorted(table.row_stops_S, unique_U, side="right").astype(np.uint16)
    return np.full(unique_U.size, table.home_shard, dtype=np.uint16)


def split_by_shard(version: ServedVersion, unique_T: Sequence[NDArray[np.int64]]) -> Route:
    """Route every table's unique ids.

    Args:
        version: The version to route by.
        unique_T: For each table of the version, its unique ids, INT64 [U].
    """
    num_shards = version.num_shards
    counts_ST = np.zeros((num_shards, len(version.tables)), dtype=np.int64)
    orders: list[NDArray[np.int64] | None] = []
    for t, (table, unique_U) in enumerate(zip(version.tables, unique_T, strict=True)):
        if table.routing is Routing.TABLE or num_shards == 1:
            counts_ST[table.home_shard, t] = unique_U.size
            orders.append(None)
            continue
        shard_U = shard_ids(table, unique_U, num_shards)
        counts_ST[:, t] = np.bincount(shard_U, minlength=num_shards)
        orders.append(np.argsort(shard_U, kind="stable"))  # 16-bit keys: numpy takes its radix sort
    return _lay_out(version, unique_T, orders, counts_ST)


def _lay_out(
    version: ServedVersion,
    unique_T: Sequence[NDArray[np.int64]],
    orders: Sequence[NDArray[np.int64] | None],
    counts_ST: NDArray[np.int64],
) -> Route:
    """Give every id its row in the buffer: by shard, then by the shard's table order, then by the table's id order."""
    offsets_S1 = np.concatenate([[0], np.cumsum(counts_ST.sum(axis=1))]).astype(np.int64)
    sorted_T = [unique if order is None else unique[order] for unique, order in zip(unique_T, orders, strict=True)]
    starts_TS = np.cumsum(counts_ST, axis=0).T - counts_ST.T
    positions_T = [np.empty(unique.size, dtype=np.int64) for unique in unique_T]
    ids_S: list[NDArray[np.int64]] = []
    table_lengths_S: list[NDArray[np.int64]] = []
    for s in range(version.num_shards):
        parts, row = [], int(offsets_S1[s])
        for t in version.tables_S[s]:
            start, count = int(starts_TS[t, s]), int(counts_ST[s, t])
            parts.append(sorted_T[t][start : start + count])
            positions_T[t][start : start + count] = np.arange(row, row + count)
            row += count
        ids_S.append(parts[0] if len(parts) == 1 else np.concatenate([*parts, np.empty(0, dtype=np.int64)]))
        table_lengths_S.append(np.array([part.size for part in parts], dtype=np.int64))
    return Route(
        offsets_S1=offsets_S1,
        ids_S=tuple(ids_S),
        table_lengths_S=tuple(table_lengths_S),
        rows_T=tuple(_unsort(rows, order) for rows, order in zip(positions_T, orders, strict=True)),
    )


def _unsort(sorted_U: NDArray[np.int64], order_U: NDArray[np.int64] | None) -> NDArray[np.int64]:
    if order_U is None:
        return sorted_U
    rows_U = np.empty_like(sorted_U)
    rows_U[order_U] = sorted_U
    return rows_U
