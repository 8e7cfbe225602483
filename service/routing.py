"""Owns which shard each unique id goes to and where its row will lie; pure functions, no I/O.

The rows of a batch lie in one buffer: a block for each shard, with the whole rows that it answers, in the very order of
its reply; then a block for each table that is cut into columns, which all of the table's shards fill, each its own columns.
So merging is writing each reply to its places, every number once, and undoing the dedup is one gather.

Shape suffixes: see ``service.types``; K counts the buffer's blocks.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from export.contract import Routing, hash_shard, training_bucket
from service.catalog import ServedTable, ServedVersion
from service.spreading import spread_ids

_NONE = slice(0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Landing:
    """Where a run of a shard's ids has its rows in the buffer."""

    ids: slice
    """Which of the shard's ids."""
    rows: slice
    """Which rows of the buffer."""
    width: int
    """Numbers that each id has in the shard's reply."""
    pieces: tuple[tuple[slice, slice], ...]
    """(Which of those numbers, which columns of the buffer.)"""
    leads: bool
    """Whether this shard's row ids and hits are taken: of the shards that fill a row, one's are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Where the unique ids of a batch go."""

    offsets_K1: NDArray[np.int64]
    """[K+1]: block ``k`` has the rows [offsets[k], offsets[k+1]) of the buffer."""
    shards_K: tuple[frozenset[int], ...]
    """The shards that fill each block: its rows are there when all of them have answered."""
    ids_S: tuple[NDArray[np.int64], ...]
    """Per shard: its ids, grouped by the shard's table order."""
    table_lengths_S: tuple[NDArray[np.int64], ...]
    """Per shard: [T] ids of each of the shard's tables."""
    landings_S: tuple[tuple[Landing, ...], ...]
    """Per shard: where its reply goes; in the order of its ids, all of which they cover."""
    rows_T: tuple[NDArray[np.int64], ...]
    """Per table of the version: [U] row in the buffer of each unique id."""

    def blocks_of(self, rows_M: NDArray[np.int64]) -> NDArray[np.int64]:
        """Block of each row of the buffer, INT64 [M]."""
        return np.searchsorted(self.offsets_K1, rows_M, side="right") - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Split:
    """One table's ids, cut by shard."""

    ids_U: NDArray[np.int64]
    """Brought into an order in which each shard's ids lie together."""
    order_U: NDArray[np.int64] | None
    """That order; None: as they came."""
    parts: Mapping[int, slice]
    """By shard: its ids. Those of a table that is cut into columns overlap, those of any other cover all ids once."""


def shard_ids(table: ServedTable, unique_U: NDArray[np.int64], num_shards: int) -> NDArray[np.uint16]:
    """Shard of each id, where the id alone decides it: UINT16 [U].

    Ids outside a plain table's rows go to the nearest end; the shard there answers them by the table's rule.
    """
    if table.routing is Routing.HASH:
        return hash_shard(unique_U.view(np.uint64), num_shards).astype(np.uint16)
    if table.routing is Routing.TRAINING:
        training = table.training
        assert training is not None
        ids_U = unique_U if training.floor_modulo else unique_U.view(np.uint64)
        buckets_U = training_bucket(ids_U, input_hash_size=training.input_hash_size, buckets=training.buckets)
        return table.bucket_shards_B[buckets_U]
    assert table.routing is Routing.ROWS, table.routing
    return table.row_shards_P[np.searchsorted(table.row_stops_P, unique_U, side="right")]


def split_by_shard(
    version: ServedVersion, unique_T: Sequence[NDArray[np.int64]], *, avoid: frozenset[int] = frozenset()
) -> Route:
    """Route every table's unique ids.

    Args:
        version: The version to route by.
        unique_T: For each table of the version, its unique ids, INT64 [U], in any order.
        avoid: Shards not to be asked for what another one holds too.
    """
    load_S = [0] * version.num_shards
    splits: dict[int, _Split] = {}
    # Replicated tables come last: they go where the others leave room.
    for t in sorted(range(len(unique_T)), key=lambda t: version.tables[t].routing is Routing.REPLICATED):
        splits[t] = _split(version.tables[t], unique_T[t], load_S, avoid)
        for shard, part in splits[t].parts.items():
            load_S[shard] += part.stop - part.start
    return _lay_out(version, [splits[t] for t in range(len(unique_T))])


def _split(table: ServedTable, ids_U: NDArray[np.int64], load_S: Sequence[int], avoid: frozenset[int]) -> _Split:
    if table.routing is Routing.REPLICATED:
        return _Split(ids_U=ids_U, order_U=None, parts=spread_ids(ids_U, table.holders, load_S, avoid))
    if table.routing is Routing.COLUMNS or len(table.holders) == 1:
        return _Split(ids_U=ids_U, order_U=None, parts=dict.fromkeys(table.holders, slice(0, ids_U.size)))
    shard_U = shard_ids(table, ids_U, len(load_S))
    order_U = np.argsort(shard_U, kind="stable")  # 16-bit keys: numpy takes its radix sort
    edges = itertools.accumulate(np.bincount(shard_U, minlength=len(load_S)).tolist(), initial=0)
    parts = {shard: slice(*edge) for shard, edge in enumerate(itertools.pairwise(edges))}
    return _Split(ids_U=ids_U[order_U], order_U=order_U, parts=parts)


def _lay_out(version: ServedVersion, splits_T: Sequence[_Split]) -> Route:
    """Give every id its row in the buffer: by block, in a shard's by its table order, in a table by the split's order."""
    cut = [t for t, table in enumerate(version.tables) if table.routing is Routing.COLUMNS]
    sizes_T = [split.ids_U.size for split in splits_T]
    edges = list(itertools.accumulate((sizes_T[t] for t in cut), initial=sum(sizes_T) - sum(sizes_T[t] for t in cut)))
    starts = dict(zip(cut, edges, strict=False))
    positions_T = [np.arange(starts.get(t, 0), starts.get(t, 0) + size) for t, size in enumerate(sizes_T)]
    offsets, ids_S, table_lengths_S = [0], list[NDArray[np.int64]](), list[NDArray[np.int64]]()
    for s, tables in enumerate(version.tables_S):
        ids, row = list[NDArray[np.int64]](), offsets[-1]
        for held in tables:
            part = splits_T[held.table].parts.get(s, _NONE)
            ids.append(splits_T[held.table].ids_U[part])
            if held.table not in starts:
                positions_T[held.table][part] = np.arange(row, row + ids[-1].size)
                row += ids[-1].size
        offsets.append(row)
        ids_S.append(ids[0] if len(ids) == 1 else np.concatenate([*ids, np.empty(0, dtype=np.int64)]))
        table_lengths_S.append(np.array([part.size for part in ids], dtype=np.int64))
    return Route(
        offsets_K1=np.array([*offsets, *edges[1:]], dtype=np.int64),
        shards_K=(
            *(frozenset({s}) for s in range(version.num_shards)),
            *(frozenset(version.tables[t].holders) for t in cut),
        ),
        ids_S=tuple(ids_S),
        table_lengths_S=tuple(table_lengths_S),
        landings_S=tuple(_land(version, s, table_lengths_S[s], offsets[s], starts) for s in range(version.num_shards)),
        rows_T=tuple(_unsort(rows, split.order_U) for rows, split in zip(positions_T, splits_T, strict=True)),
    )


def _land(
    version: ServedVersion, shard: int, lengths_T: NDArray[np.int64], row: int, starts: Mapping[int, int]
) -> tuple[Landing, ...]:
    """Where a shard's reply goes: its whole rows from ``row`` on, columns of table ``t`` from ``starts[t]`` on."""
    tables = version.tables_S[shard]
    if not any(held.table in starts for held in tables):
        size = int(lengths_T.sum())
        everything = slice(0, version.dim)
        return (_landing(0, row, size, width=version.dim, pieces=((everything, everything),), leads=True),)
    landings: list[Landing] = []
    at = 0
    for held, size in zip(tables, lengths_T.tolist(), strict=True):
        whole = held.table not in starts
        leads = whole or version.tables[held.table].holders[0] == shard
        start = row if whole else starts[held.table]
        landings.append(_landing(at, start, size, width=held.width, pieces=held.pieces, leads=leads))
        at += size
        row += size if whole else 0
    return tuple(landings)


def _landing(
    at: int, row: int, size: int, *, width: int, pieces: tuple[tuple[slice, slice], ...], leads: bool
) -> Landing:
    return Landing(ids=slice(at, at + size), rows=slice(row, row + size), width=width, pieces=pieces, leads=leads)


def _unsort(sorted_U: NDArray[np.int64], order_U: NDArray[np.int64] | None) -> NDArray[np.int64]:
    if order_U is None:
        return sorted_U
    rows_U = np.empty_like(sorted_U)
    rows_U[order_U] = sorted_U
    return rows_U
