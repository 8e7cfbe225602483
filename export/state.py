"""Owns the state of a shard: which numbers it holds, and the safetensors file that they are streamed into.

Rows go from the module to the file in pieces, so an export needs little memory beside the module itself. Must not
decide where a table lies (``export.placement``) or trace a program.

Shape suffixes: K ids of a table on this shard, T tables, R local rows, S slots of the hash table, D dimension.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from export.contract import NO_ROW, Placement, Routing, ShardTable, StateFile, Unknown, hash_shard
from export.progress import Progress
from export.rows import TableRows
from export.source import MapSource, TableSource

CHUNK_BYTES = 32 << 20
_MIN_SLOTS = 8
_ROW_ALIGNMENT = 64
_DTYPES = {torch.int64: "I64", torch.float32: "F32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTensor:
    """One tensor of a state file; its numbers are made when they are written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[torch.Tensor]]
    """Contiguous CPU tensors whose elements, one after the other, are the tensor."""

    @property
    def nbytes(self) -> int:
        """Size in the file, bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardState:
    """What one shard holds."""

    tables: tuple[ShardTable, ...]
    tensors: tuple[StateTensor, ...]
    """In the order of the file: the rows last."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedTable:
    """A table with its routing, as the exporter hands it on."""

    source: TableSource
    routing: Routing
    placements: tuple[Placement, ...]
    unknown: Unknown

    def on(self, shard: int) -> Placement | None:
        """The piece on one shard, if there is one."""
        return next((piece for piece in self.placements if piece.shard == shard), None)


def route_map(table: MapSource, num_shards: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Shard of each id of a map under ``hash`` routing, INT64 [K]."""
    if num_shards == 1:
        return np.zeros(table.ids_K.shape[0], dtype=np.int64)
    return hash_shard(table.ids_K.numpy().view(np.uint64), num_shards).astype(np.int64)


def build_mch_state(shard: int, num_shards: int, tables: Iterable[PlacedTable], dim: int) -> ShardState:
    """State of ``MchShard``: the ids that this shard serves, their rows and each table's default row."""
    entries: list[ShardTable] = []
    pieces: list[_MchPiece] = []
    local = 0
    for table in tables:
        if table.on(shard) is None:
            continue
        piece = _cut_map(table, shard, num_shards, local)
        pieces.append(piece)
        local += piece.num_rows
        entries.append(piece.entry)
    hash_table, hash_table_offsets = _build_hash_table(pieces)
    row_ids = [piece.row_ids for piece in pieces]
    tensors = (
        _ready("hash_table_offsets", hash_table_offsets),
        _ready("unknown_rows", torch.tensor([piece.unknown_row for piece in pieces], dtype=torch.int64)),
        _ready("row_ids", torch.cat(row_ids) if row_ids else torch.full((1,), NO_ROW)),
        _ready("hash_table", hash_table),
        _rows([(piece.numbers, piece.row_ids) for piece in pieces], max(local, 1), dim),
    )
    return ShardState(tables=tuple(entries), tensors=tensors)


def build_plain_state(shard: int, tables: Iterable[PlacedTable], dim: int) -> ShardState:
    """State of ``PlainShard``: the rows of each table's range, and one row of zeros after them all."""
    entries: list[ShardTable] = []
    starts: list[int] = []
    stops: list[int] = []
    offsets: list[int] = []
    pieces: list[tuple[TableRows, torch.Tensor | slice]] = []
    local = 0
    for table in tables:
        piece = table.on(shard)
        if piece is None:
            continue
        starts.append(piece.row_start)
        stops.append(piece.row_stop)
        offsets.append(local - piece.row_start)
        pieces.append((table.source.numbers, slice(piece.row_start, piece.row_stop)))
        local += piece.row_stop - piece.row_start
        rows = piece.row_stop - piece.row_start
        entries.append(ShardTable(table=table.source.name, rows=rows, width=dim))
    tensors = (
        _ready("row_starts", torch.tensor(starts, dtype=torch.int64)),
        _ready("row_stops", torch.tensor(stops, dtype=torch.int64)),
        _ready("row_offsets", torch.tensor(offsets, dtype=torch.int64)),
        _rows(pieces, local + 1, dim),
    )
    return ShardState(tables=tuple(entries), tensors=tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class _MchPiece:
    entry: ShardTable
    numbers: TableRows
    ids_K: torch.Tensor
    locals_K: torch.Tensor
    row_ids: torch.Tensor
    """Trainer's row of each local row; −1: a row of zeros."""
    unknown_row: int

    @property
    def num_rows(self) -> int:
        return int(self.row_ids.shape[0])


def _cut_map(table: PlacedTable, shard: int, num_shards: int, first_local: int) -> _MchPiece:
    source = table.source
    assert source.map is not None  # only managed collections come here
    ids_K, rows_K = source.map.ids_K, source.map.rows_K
    holders, place = 1, 0
    if table.routing is Routing.HASH:
        mine = torch.from_numpy(route_map(source.map, num_shards) == shard)
        ids_K, rows_K = ids_K[mine], rows_K[mine]
        holders, place = num_shards, shard
    # Local rows in the trainer's row order: the rows are then read from front to back.
    order = torch.argsort(rows_K, stable=True)
    ids_K, rows_K = ids_K[order], rows_K[order]
    default = source.rows - 1 if table.unknown is Unknown.TRAINING else NO_ROW
    num_ids = int(ids_K.shape[0])
    open_slots = source.map.open_slots
    return _MchPiece(
        entry=ShardTable(
            table=source.name,
            rows=num_ids + 1,
            width=source.dim,
            zch_rows=num_ids,
            zch_open_slots=open_slots // holders + (place < open_slots % holders),
        ),
        numbers=source.numbers,
        ids_K=ids_K,
        locals_K=torch.arange(first_local, first_local + num_ids),
        row_ids=torch.cat([rows_K, torch.tensor([default])]),
        unknown_row=first_local + num_ids,
    )


def _build_hash_table(pieces: list[_MchPiece]) -> tuple[torch.Tensor, torch.Tensor]:
    """One hash table for all tables of the shard, half full, and after them the always empty one."""
    slots = [max(_MIN_SLOTS, 2 * int(piece.ids_K.shape[0])) for piece in pieces]
    # Whole cache lines of 4 slots: what follows in the file, the rows, and the slots themselves start on one.
    slots.append(_MIN_SLOTS + -sum(slots) % 4)
    sizes = [int(piece.ids_K.shape[0]) for piece in pieces] + [0]
    table = torch.full((sum(slots), 2), -1, dtype=torch.int64)
    table_offsets = torch.tensor([0, *slots]).cumsum(0)
    empty = torch.empty(0, dtype=torch.int64)
    torch.ops.fbgemm.pruned_hashmap_insert(
        torch.cat([piece.ids_K for piece in pieces] + [empty]),
        torch.cat([piece.locals_K for piece in pieces] + [empty]),
        torch.tensor([0, *sizes]).cumsum(0),
        table,
        table_offsets,
    )
    return table, table_offsets


def _ready(name: str, tensor: torch.Tensor) -> StateTensor:
    return StateTensor(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape), chunks=lambda: [tensor])


def _rows(pieces: list[tuple[TableRows, torch.Tensor | slice]], num_rows: int, dim: int) -> StateTensor:
    """FP32 rows [R, D] of the given rows of each table; rows of zeros where it says −1, and up to ``num_rows``."""
    chunk_rows = max(1, CHUNK_BYTES // (4 * dim))

    def chunks() -> Iterator[torch.Tensor]:
        written = 0
        for numbers, wanted in pieces:
            start, stop = (wanted.start, wanted.stop) if isinstance(wanted, slice) else (0, wanted.shape[0])
            for first in range(start, stop, chunk_rows):
                part = slice(first, min(first + chunk_rows, stop))
                yield numbers.read(part.start, part.stop) if isinstance(wanted, slice) else numbers.gather(wanted[part])
            written += stop - start
        yield torch.zeros(num_rows - written, dim)

    return StateTensor(name="rows", dtype=torch.float32, shape=(num_rows, dim), chunks=chunks)


def write_state(path: Path, state: ShardState, on_progress: Progress) -> StateFile:
    """Stream a state into a new safetensors file and onto the disk; the path in the answer is the file's name only."""
    step = f"writing {path.parent.name}"
    offset = 0
    entries: dict[str, object] = {}
    for tensor in state.tensors:
        span = [offset, offset + tensor.nbytes]
        entries[tensor.name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
        offset += tensor.nbytes
    header = json.dumps(entries, separators=(",", ":")).encode()
    # The rows come last, so padding the header puts them on a cache line, and the INT64 tensors on 8 bytes.
    before_rows = 8 + len(header) + state.nbytes - state.tensors[-1].nbytes
    header += b" " * (-before_rows % _ROW_ALIGNMENT)
    digest = hashlib.sha256()
    size = 0
    with path.open("xb") as file:
        for part in _serialised(header, state):
            file.write(part)
            digest.update(part)
            size += part.nbytes
            on_progress(step, size, 8 + len(header) + state.nbytes)
        file.flush()
        os.fsync(file.fileno())
    return StateFile(path=path.name, size_bytes=size, sha256=digest.hexdigest())


def _serialised(header: bytes, state: ShardState) -> Iterator[memoryview]:
    yield memoryview(len(header).to_bytes(8, "little"))
    yield memoryview(header)
    for tensor in state.tensors:
        size = 0
        for chunk in tensor.chunks():
            if chunk.numel():
                part = memoryview(np.ascontiguousarray(chunk.numpy()).view(np.uint8).data)
                size += part.nbytes
                yield part
        assert size == tensor.nbytes, tensor.name


def map_state(path: Path, names: Iterable[str]) -> tuple[torch.Tensor, ...]:
    """Tensors of a state file in the given order, memory-mapped."""
    with safe_open(path, framework="pt") as file:
        return tuple(file.get_tensor(name) for name in names)
