"""Owns what the front tier knows of a version: the manifest, read into the tables that the hot path indexes.

Must not talk to a shard. A ``ServedVersion`` is immutable: a switch of versions is a switch of objects.
"""

import functools
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import structlog
import torch
from numpy.typing import NDArray

from export.contract import (
    Manifest,
    OutOfRange,
    RepositoryError,
    Routing,
    Runtime,
    Table,
    TrainingBuckets,
    check_size,
    read_manifest,
    version_dir,
)

log = structlog.get_logger(__name__)

InputHash = Callable[[torch.Tensor], torch.Tensor]
"""INT64 [N] → INT64 [N], element by element."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One embedding name of a feature: a block of rows in a reply."""

    table: int
    """Index into ``ServedVersion.tables``."""
    embedding_name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedTable:
    """One table, as routing needs it."""

    name: str
    rows: int
    routing: Routing
    holders: tuple[int, ...]
    """Shards that hold rows of it, each once, in the order of its placements."""
    row_stops_P: NDArray[np.int64]
    """``rows`` routing: one past the last row of each piece that has rows, but the last, ascending."""
    row_shards_P: NDArray[np.uint16]
    """``rows`` routing: the shard of each piece that has rows."""
    training: TrainingBuckets | None
    bucket_shards_B: NDArray[np.uint16]
    """``training`` routing: the shard of each bucket."""
    rejects_out_of_range: bool
    input_hash: InputHash | None
    evictions: int
    """Ids that lost their row from version to version, over all versions up to this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTable:
    """What one shard holds of a table."""

    table: int
    """Index into ``ServedVersion.tables``."""
    width: int
    """Numbers that an id has in the shard's reply."""
    pieces: tuple[tuple[slice, slice], ...]
    """Where they belong: (which of those numbers, which columns of the table)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedVersion:
    """One version of one collection, ready to be routed to."""

    collection: str
    version: int
    base: int
    runtime: Runtime
    """What of Triton its shards need."""
    dim: int
    managed: bool
    """Whether its tables remap raw ids; TorchRec has all or none of a collection do so."""
    need_indices: bool
    """Whether replies may carry the looked-up indices."""
    features: tuple[str, ...]
    blocks: Mapping[str, tuple[Block, ...]]
    """By feature, in embedding-name order."""
    tables: tuple[ServedTable, ...]
    models_S: tuple[str, ...]
    widths_S: tuple[int, ...]
    """Numbers in a row of each shard's reply; see ``export.contract.Shard.width``."""
    tables_S: tuple[tuple[HeldTable, ...], ...]
    """Per shard: the tables that it holds, in the order of its ``table_lengths``."""
    created_s: float
    overlay_bytes: int
    """Of a delta, over all shards; 0 for a base."""

    @property
    def num_shards(self) -> int:
        """How many shards the version is spread over."""
        return len(self.models_S)


def load_version(repo: Path, collection: str, version: int) -> ServedVersion:
    """Read one published version's manifest and input hashes.

    Raises:
        RepositoryError: The manifest is missing or breaks the schema, or an input hash does not load.
    """
    manifest = read_manifest(repo, collection, version)
    directory = version_dir(repo, collection, version)
    files = {table.input_hash for table in manifest.tables if table.input_hash}
    hashes = {file: _load_input_hash(check_size(directory, manifest, file)) for file in sorted(files)}
    return compile_version(manifest, hashes)


def compile_version(manifest: Manifest, hashes: Mapping[str, InputHash]) -> ServedVersion:
    """Turn a manifest into what the hot path indexes; ``hashes`` by file name, as the manifest's tables name them."""
    blocks: dict[str, list[Block]] = {feature: [] for feature in manifest.features}
    index = {table.name: i for i, table in enumerate(manifest.tables)}
    for feature, table, embedding_name in manifest.embeddings:
        blocks[feature].append(Block(table=index[table.name], embedding_name=embedding_name))
    return ServedVersion(
        collection=manifest.collection,
        version=manifest.version,
        base=manifest.base,
        runtime=manifest.runtime,
        dim=manifest.dim,
        managed=any(table.managed for table in manifest.tables),
        need_indices=manifest.need_indices,
        features=manifest.features,
        blocks={feature: tuple(entries) for feature, entries in blocks.items()},
        tables=tuple(_compile_table(table, hashes) for table in manifest.tables),
        models_S=tuple(shard.model for shard in manifest.shards),
        widths_S=tuple(shard.width for shard in manifest.shards),
        tables_S=tuple(
            tuple(_hold(manifest.tables[index[entry.table]], index[entry.table], shard.index) for entry in shard.tables)
            for shard in manifest.shards
        ),
        created_s=manifest.created_s,
        overlay_bytes=sum(shard.overlay_bytes for shard in manifest.shards),
    )


def _compile_table(table: Table, hashes: Mapping[str, InputHash]) -> ServedTable:
    pieces = [piece for piece in table.placements if piece.row_start < piece.row_stop]
    bucket_shards = table.bucket_shards if table.routing is Routing.TRAINING else ()
    return ServedTable(
        name=table.name,
        rows=table.rows,
        routing=table.routing,
        holders=tuple(dict.fromkeys(piece.shard for piece in pieces)),
        row_stops_P=np.array([piece.row_stop for piece in pieces[:-1]], dtype=np.int64),
        row_shards_P=np.array([piece.shard for piece in pieces], dtype=np.uint16),
        training=table.training,
        bucket_shards_B=np.array(bucket_shards, dtype=np.uint16),
        rejects_out_of_range=not table.managed and table.out_of_range is OutOfRange.REJECT,
        input_hash=hashes[table.input_hash] if table.input_hash else None,
        evictions=0 if table.zch is None else table.zch.evictions,
    )


def _hold(table: Table, index: int, shard: int) -> HeldTable:
    pieces: list[tuple[slice, slice]] = []
    at = 0
    for piece in table.pieces_on(shard):
        first, last = piece.columns(table.dim)
        pieces.append((slice(at, at + last - first), slice(first, last)))
        at += last - first
    return HeldTable(table=index, width=at, pieces=tuple(pieces))


def _load_input_hash(path: Path) -> InputHash:
    try:
        program = _load_program(path.read_bytes())
    except Exception as exc:
        raise RepositoryError(
            f"{path}: the exported input hash does not load with torch {torch.__version__}: {exc}; "
            "install the versions that the manifest's toolchain names, or export again"
        ) from exc
    log.info("input_hash_loaded", path=str(path))
    return program


@functools.lru_cache(maxsize=16)
def _load_program(content: bytes) -> InputHash:
    """A delta has its base's input hashes, byte for byte, and loading one takes a second beside the requests."""
    return torch.export.load(io.BytesIO(content)).module()
