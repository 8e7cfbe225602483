"""Manifests built by hand, and shards that answer by a rule: what the front tier's tests stand on."""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from export.contract import (
    Manifest,
    OutOfRange,
    Placement,
    Remap,
    Routing,
    RowDtype,
    Shard,
    ShardTable,
    StateFile,
    Table,
    Toolchain,
    TrainingBuckets,
    Zch,
    as_unsigned,
    even_row_ranges,
    hash_shard,
    shard_model_name,
    training_bucket,
)
from service.catalog import ServedVersion, compile_version
from service.shards import ShardFailed, ShardReply, ShardRequest

DIM = 3


def make_table(
    name: str,
    features: Sequence[str],
    *,
    routing: Routing,
    num_shards: int,
    rows: int = 100,
    dim: int = DIM,
    home: int = 0,
    shared: Sequence[str] = (),
    row_counts: Sequence[int] | None = None,
    placements: Sequence[Placement] | None = None,
    training: TrainingBuckets | None = None,
    out_of_range: OutOfRange = OutOfRange.REJECT,
    input_hash: str | None = None,
) -> Table:
    """A table; where it lies is ``placements``, or what the other arguments make of the routing."""
    if placements is None:
        placements = place(routing, num_shards=num_shards, rows=rows, home=home, row_counts=row_counts)
    managed = routing in {Routing.HASH, Routing.TRAINING}
    return Table(
        name=name,
        rows=rows,
        dim=dim,
        row_dtype=RowDtype.FP32,
        features=tuple(features),
        embedding_names=tuple(f"{feature}@{name}" if feature in shared else feature for feature in features),
        remap=Remap.MCH if managed else Remap.NONE,
        out_of_range=out_of_range,
        routing=routing,
        placements=tuple(placements),
        input_hash=input_hash,
        zch=Zch(policy="LFU_EvictionPolicy", size=rows, occupied=0, open_slots=rows - 1) if managed else None,
        training=(training or TrainingBuckets(input_hash_size=0, row_edges=(0, rows))) if managed else None,
    )


def place(
    routing: Routing, *, num_shards: int, rows: int, home: int = 0, row_counts: Sequence[int] | None = None
) -> list[Placement]:
    """The plainest placements of a routing: in shard order, on every shard that the routing can use."""
    if routing is Routing.ROWS:
        ranges = even_row_ranges(rows, num_shards)
        if row_counts is not None:
            stops = np.cumsum(row_counts).tolist()
            ranges = [(stop - count, stop) for stop, count in zip(stops, row_counts, strict=True)]
        return [Placement(shard=s, row_start=a, row_stop=b) for s, (a, b) in enumerate(ranges)]
    shards = range(num_shards) if routing in {Routing.HASH, Routing.REPLICATED} else [home]
    return [Placement(shard=s, row_start=0, row_stop=rows) for s in shards]


def make_manifest(
    tables: Sequence[Table], num_shards: int, *, collection: str = "clicks", version: int = 1
) -> Manifest:
    shards = []
    for s in range(num_shards):
        # Reversed, so that a shard's table order is never the manifest's by luck.
        held = [table for table in reversed(tables) if table.pieces_on(s)]
        shards.append(
            Shard(
                index=s,
                model=shard_model_name(collection, s),
                tables=tuple(ShardTable(table=table.name, rows=1, width=table.width_on(s)) for table in held),
                width=math.gcd(*(table.width_on(s) for table in held)) or tables[0].dim,
                state=(),
                state_bytes=0,
            )
        )
    return Manifest(
        collection=collection,
        version=version,
        base=version,
        created_s=1.0,
        num_shards=num_shards,
        dim=tables[0].dim,
        tables=tuple(tables),
        shards=tuple(shards),
        files=tuple(
            StateFile(path=path, size_bytes=1, sha256="0" * 64)
            for path in sorted({table.input_hash for table in tables if table.input_hash})
        ),
        toolchain=Toolchain(kjtserve="0", torch="0", fbgemm_gpu="0", torchrec="0"),
    )


def make_version(
    tables: Sequence[Table],
    num_shards: int,
    *,
    hashes: Mapping[str, Callable[..., object]] | None = None,
    collection: str = "clicks",
    version: int = 1,
    need_indices: bool = False,
) -> tuple[Manifest, ServedVersion]:
    manifest = make_manifest(tables, num_shards, collection=collection, version=version)
    manifest = manifest.model_copy(update={"need_indices": need_indices})
    return manifest, compile_version(manifest, hashes or {})  # type: ignore[arg-type]


def homes_of(table: Table, one: int, num_shards: int) -> set[int]:
    """The shards that an id may be sent to, by the contract's words, one id at a time."""
    shards = {piece.shard for piece in table.placements}
    if table.routing is Routing.HASH:
        return {hash_shard(as_unsigned(one), num_shards)}
    if table.routing is Routing.TRAINING:
        training = table.training
        read = one if training.floor_modulo else as_unsigned(one)
        bucket = training_bucket(read, input_hash_size=training.input_hash_size, buckets=training.buckets)
        # A bucket without rows at the end goes to whoever has the last row.
        return shards_of_row(table, min(training.row_edges[bucket], table.rows - 1))
    if table.routing is Routing.ROWS:
        # No row: whichever end is nearer, to be answered by the table's rule.
        return shards_of_row(table, min(max(one, 0), table.rows - 1))
    return shards


def shards_of_row(table: Table, row: int) -> set[int]:
    return {piece.shard for piece in table.placements if piece.row_start <= row < piece.row_stop}


def row_of(table: str, ids: np.ndarray, dim: int = DIM) -> np.ndarray:
    """The rows that the rule gives, FP32 [N, dim]: no two ids below 997, and no two columns of an id, are alike."""
    seed = float(sum(table.encode()))
    low = (ids.astype(np.uint64) % np.uint64(997)).astype(np.float32)
    return np.stack([low * (column + 1) + seed * (column + 2) for column in range(dim)], axis=1).astype(np.float32)


def row_id_of(ids: np.ndarray) -> np.ndarray:
    return (ids.astype(np.uint64) % np.uint64(1009)).astype(np.int64)


def hit_of(ids: np.ndarray) -> np.ndarray:
    return ids % 3 != 0


@dataclass
class RuleShard:
    """A shard that answers by the rule, and by what it was told to do instead."""

    manifest: Manifest
    index: int
    delay_s: float = 0.0
    failure: Exception | None = None
    on_probe: Callable[[], None] | None = None
    hang: bool = False
    requests: list[ShardRequest] = field(default_factory=list)
    timeouts_s: list[float] = field(default_factory=list)
    cancelled: int = 0
    closed: bool = False

    async def lookup(self, request: ShardRequest, *, timeout_s: float) -> ShardReply:
        probe = request.ids_N.size == 0
        if not probe:
            self.requests.append(request)
            self.timeouts_s.append(timeout_s)
        elif self.on_probe is not None:
            self.on_probe()
        try:
            if self.hang:
                await asyncio.sleep(timeout_s)
                raise ShardFailed("no answer in time")
            await asyncio.sleep(self.delay_s)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.failure is not None:
            raise self.failure
        return self.answer(request)

    def answer(self, request: ShardRequest) -> ShardReply:
        shard = self.manifest.shards[self.index]
        tables = [self.manifest.table(entry.table) for entry in shard.tables]
        assert len(tables) == request.table_lengths_T.size
        assert int(request.table_lengths_T.sum()) == request.ids_N.size
        parts = np.split(request.ids_N, np.cumsum(request.table_lengths_T)[:-1]) if tables else []
        for table, ids in zip(tables, parts, strict=True):
            for one in ids.tolist():
                assert self.index in homes_of(table, one, self.manifest.num_shards)
        numbers = [self.numbers(table, ids).reshape(-1) for table, ids in zip(tables, parts, strict=True)]
        embeddings = np.concatenate([*numbers, np.empty(0, dtype=np.float32)]).reshape(-1, shard.width)
        assert embeddings.shape == (request.num_rows, request.width)
        return ShardReply(
            embeddings_RW=embeddings,
            row_ids_N=row_id_of(request.ids_N) if request.want_row_ids else None,
            hits_N=hit_of(request.ids_N) if request.want_hits else None,
        )

    def numbers(self, table: Table, ids: np.ndarray) -> np.ndarray:
        """What the shard has of the ids' rows: its pieces, one after the other."""
        rows = row_of(table.name, ids, table.dim)
        pieces = table.pieces_on(self.index)
        return np.concatenate([rows[:, piece.col_start : piece.col_stop] for piece in pieces], axis=1)

    async def close(self, *, grace_s: float = 0.0) -> None:
        self.closed = True
