"""Owns a batch's way from requests to shards and into its buffer; pure functions on arrays, no I/O, no event loop.

    validated requests ─prepare_batch─► PreparedBatch ─(shards)─► place_reply … ─► service.reply

A batch's rows live in one buffer of blocks (see ``service.routing``). Hot rows will be one more source beside
the shards: a block that the front tier fills itself.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from service.catalog import ServedVersion
from service.dedup import dedup_ids
from service.routing import Route, split_by_shard
from service.shards import ShardReply, ShardRequest
from service.types import Output
from service.validate import ValidRequest


@dataclass(slots=True, kw_only=True)
class PreparedBatch:
    """A routed batch and the buffers that its shards' answers go to."""

    version: ServedVersion
    requests: tuple[ValidRequest, ...]
    route: Route
    rows_R: tuple[NDArray[np.int64], ...]
    """Per request: [M] row in the buffer of each row of its reply."""
    shards_R: tuple[frozenset[int], ...]
    """Per request: the shards it needs."""
    ids_T: tuple[int, ...]
    """Per table: ids before dedup."""
    unique_T: tuple[int, ...]
    """Per table: ids after dedup."""
    embeddings_UD: NDArray[np.float32]
    row_ids_U: NDArray[np.int64] | None
    hits_U: NDArray[np.bool_] | None

    def shard_request(self, shard: int) -> ShardRequest:
        """What to ask one shard."""
        numbers = sum(
            (landing.ids.stop - landing.ids.start) * landing.width for landing in self.route.landings_S[shard]
        )
        return ShardRequest(
            model=self.version.models_S[shard],
            base=self.version.base,
            version=self.version.version,
            ids_N=self.route.ids_S[shard],
            table_lengths_T=self.route.table_lengths_S[shard],
            width=self.version.widths_S[shard],
            num_rows=numbers // self.version.widths_S[shard],
            want_row_ids=self.row_ids_U is not None,
            want_hits=self.hits_U is not None,
        )


def prepare_batch(
    version: ServedVersion, requests: Sequence[ValidRequest], *, avoid: frozenset[int] = frozenset()
) -> PreparedBatch:
    """Group ids by table, run the input hashes, dedup and route.

    Args:
        version: What answers; every request was validated against it.
        requests: At least one.
        avoid: Shards that are known not to answer: not asked for what another one holds too.
    """
    grouped_T: list[list[NDArray[np.int64]]] = [[] for _ in version.tables]
    for request in requests:
        for segment in request.segments_E:
            grouped_T[segment.table].append(segment.values_N)
    ids_T = [np.concatenate([*parts, np.empty(0, dtype=np.int64)]) for parts in grouped_T]
    for t, table in enumerate(version.tables):
        if table.input_hash is not None:
            ids_T[t] = table.input_hash(torch.from_numpy(ids_T[t])).numpy()
    deduped = [dedup_ids(ids_N) for ids_N in ids_T]
    route = split_by_shard(version, [unique_U for unique_U, _ in deduped], avoid=avoid)
    rows_T = [rows_U[inverse_N] for rows_U, (_, inverse_N) in zip(route.rows_T, deduped, strict=True)]
    rows_R = _rows_by_request(requests, rows_T)
    size = int(route.offsets_K1[-1])
    outputs = frozenset[Output]().union(*(request.outputs for request in requests))
    names_rows = Output.ROW_IDS in outputs or (Output.INDICES in outputs and version.managed)
    return PreparedBatch(
        version=version,
        requests=tuple(requests),
        route=route,
        rows_R=rows_R,
        shards_R=tuple(_needed_shards(route, rows_M, alone=len(requests) == 1) for rows_M in rows_R),
        ids_T=tuple(ids_N.size for ids_N in ids_T),
        unique_T=tuple(unique_U.size for unique_U, _ in deduped),
        embeddings_UD=np.empty((size, version.dim), dtype=np.float32),
        row_ids_U=np.empty(size, dtype=np.int64) if names_rows else None,
        hits_U=np.empty(size, dtype=np.bool_) if Output.HITS in outputs else None,
    )


def place_reply(batch: PreparedBatch, shard: int, reply: ShardReply) -> None:
    """Write a shard's answer to its places in the buffer."""
    numbers = reply.embeddings_RW.reshape(-1)
    at = 0
    for landing in batch.route.landings_S[shard]:
        size = landing.ids.stop - landing.ids.start
        rows = numbers[at : at + size * landing.width].reshape(size, landing.width)
        at += rows.size
        for given, columns in landing.pieces:
            batch.embeddings_UD[landing.rows, columns] = rows[:, given]
        if batch.row_ids_U is not None and reply.row_ids_N is not None and landing.leads:
            batch.row_ids_U[landing.rows] = reply.row_ids_N[landing.ids]
        if batch.hits_U is not None and reply.hits_N is not None and landing.leads:
            batch.hits_U[landing.rows] = reply.hits_N[landing.ids]


def missing_rows(
    batch: PreparedBatch, rows_M: NDArray[np.int64], missing: AbstractSet[int]
) -> NDArray[np.bool_] | None:
    """Which rows of the buffer lack what a shard in ``missing`` should have filled: BOOL [M]; None: no shard is missing."""
    if not missing:
        return None
    return np.array([bool(shards & missing) for shards in batch.route.shards_K])[batch.route.blocks_of(rows_M)]


def _rows_by_request(
    requests: Sequence[ValidRequest], rows_T: Sequence[NDArray[np.int64]]
) -> tuple[NDArray[np.int64], ...]:
    """Cut each table's rows back into requests: the reverse of grouping by table."""
    taken_T = [0] * len(rows_T)
    result: list[NDArray[np.int64]] = []
    for request in requests:
        parts: list[NDArray[np.int64]] = [np.empty(0, dtype=np.int64)]
        for segment in request.segments_E:
            start = taken_T[segment.table]
            taken_T[segment.table] = start + segment.values_N.size
            parts.append(rows_T[segment.table][start : taken_T[segment.table]])
        result.append(np.concatenate(parts))
    return tuple(result)


def _needed_shards(route: Route, rows_M: NDArray[np.int64], *, alone: bool) -> frozenset[int]:
    if not rows_M.size:
        return frozenset()
    if alone:
        sizes_K = np.diff(route.offsets_K1)
    else:
        sizes_K = np.bincount(route.blocks_of(rows_M), minlength=len(route.shards_K))
    return frozenset[int]().union(*(route.shards_K[block] for block in np.flatnonzero(sizes_K)))
