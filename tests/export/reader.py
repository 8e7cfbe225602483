"""An independent reader of a published version: the specification in plain Python, ids one by one."""

import functools
import io
import struct
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from export.contract import (
    SENTINEL_IDS,
    Manifest,
    Routing,
    Table,
    Unknown,
    as_unsigned,
    hash_shard,
    shard_dir,
    version_dir,
)
from tests.modules import map_of

Row = tuple[bytes, int, bool]
"""Bytes of the embedding, row id, hit."""


def shard_of(table: Table, id_: int, num_shards: int) -> int | None:
    """Shard of an id by the contract; None: no shard holds it."""
    if table.routing is Routing.HASH:
        return hash_shard(as_unsigned(id_), num_shards)
    if table.routing is Routing.TABLE:
        return table.placements[0].shard
    return next((piece.shard for piece in table.placements if piece.row_start <= id_ < piece.row_stop), None)


def served(
    repo: Path, manifest: Manifest, ids: Mapping[str, Sequence[int]], program: str = "shard.pt2"
) -> dict[str, list[Row]]:
    """What the shards answer to ids of each table (after the input hash), merged in the order of the ids."""
    answers: dict[str, list[Row | None]] = {table: [None] * len(values) for table, values in ids.items()}
    directory = version_dir(repo, manifest.collection, manifest.version)
    for shard in manifest.shards:
        place = shard_dir(directory, shard.index)
        held = [manifest.table(entry.table) for entry in shard.tables]
        chosen = [
            [at for at, id_ in enumerate(ids.get(t.name, ())) if shard_of(t, id_, manifest.num_shards) == shard.index]
            for t in held
        ]
        asked = [ids[table.name][at] for table, places in zip(held, chosen, strict=True) for at in places]
        state = load_file(place / "state.safetensors")
        rows, row_ids, hits = _program((place / program).read_bytes())(
            torch.tensor(asked, dtype=torch.int64),
            torch.tensor([len(places) for places in chosen], dtype=torch.int64),
            [state[name] for name in shard.state],
        )
        assert rows.dtype == torch.float32
        assert rows.shape == (len(asked), manifest.dim)
        flat = zip(rows, row_ids.tolist(), hits.tolist(), strict=True)
        for table, places in zip(held, chosen, strict=True):
            for at in places:
                row, row_id, hit = next(flat)
                assert answers[table.name][at] is None
                answers[table.name][at] = (row_bytes(row), row_id, hit)
    zeros = (bytes(4 * manifest.dim), -1, False)
    for name, rows_of_table in answers.items():
        for at, row in enumerate(rows_of_table):
            if row is None:
                assert shard_of(manifest.table(name), ids[name][at], manifest.num_shards) is None
                rows_of_table[at] = zeros
    return answers


def expected(module, table: str, ids: Sequence[int], unknown: str = Unknown.TRAINING) -> list[Row]:
    """The table's rule by name, from the module's own numbers."""
    collection = getattr(module, "_embedding_module", module)
    weight = collection.embeddings[table].weight.detach().float()
    if collection is module:
        rows = [id_ if 0 <= id_ < weight.shape[0] else None for id_ in ids]
        default = None
    else:
        known = map_of(module, table)
        rows = [None if id_ in SENTINEL_IDS else known.get(id_) for id_ in ids]
        default = weight.shape[0] - 1 if unknown == Unknown.TRAINING else None
    answers = []
    for row in rows:
        at = default if row is None else row
        numbers = bytes(4 * weight.shape[1]) if at is None else row_bytes(weight[at])
        answers.append((numbers, -1 if at is None else at, row is not None))
    return answers


def row_bytes(row: torch.Tensor) -> bytes:
    return struct.pack(f"{row.numel()}I", *(value & 0xFFFFFFFF for value in row.view(torch.int32).tolist()))


@functools.cache
def _program(content: bytes):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if content[:2] == b"PK" and b"/archive_format" not in content and b"/constants.pkl" in content:
            return torch.jit.load(io.BytesIO(content))
        return torch.export.load(io.BytesIO(content)).module()
