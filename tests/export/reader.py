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
    training_bucket,
    version_dir,
)
from tests.modules import map_of

Row = tuple[bytes, int, bool]
"""Bytes of the embedding, row id, hit."""


def shards_of(table: Table, id_: int, num_shards: int) -> list[int]:
    """Shards that are asked an id, by the contract; none: no shard holds it."""
    if table.routing is Routing.HASH:
        return [hash_shard(as_unsigned(id_), num_shards)]
    if table.routing is Routing.ROWS:
        return [piece.shard for piece in table.placements if piece.row_start <= id_ < piece.row_stop]
    if table.routing is Routing.TRAINING:
        row = table.training.row_edges[bucket_of(table, id_)]
        return [piece.shard for piece in table.placements if piece.row_start <= row < piece.row_stop]
    return sorted({piece.shard for piece in table.placements})


def bucket_of(table: Table, id_: int) -> int:
    rule = table.training
    number = id_ if rule.floor_modulo else as_unsigned(id_)
    return training_bucket(number, input_hash_size=rule.input_hash_size, buckets=rule.buckets)


def served(
    repo: Path, manifest: Manifest, ids: Mapping[str, Sequence[int]], program: str = "shard.pt2"
) -> dict[str, list[Row]]:
    """What the shards answer to ids of each table (after the input hash), merged in the order of the ids."""
    answers: dict[str, list[dict[int, Row]]] = {table: [{} for _ in values] for table, values in ids.items()}
    directory = version_dir(repo, manifest.collection, manifest.version)
    for shard in manifest.shards:
        place = shard_dir(directory, shard.index)
        held = [manifest.table(entry.table) for entry in shard.tables]
        chosen = [
            [
                at
                for at, id_ in enumerate(ids.get(table.name, ()))
                if shard.index in shards_of(table, id_, manifest.num_shards)
            ]
            for table in held
        ]
        asked = [ids[table.name][at] for table, places in zip(held, chosen, strict=True) for at in places]
        base = shard_dir(version_dir(repo, manifest.collection, manifest.base), shard.index)
        state = load_file(base / "state.safetensors")
        if manifest.base != manifest.version:
            state |= load_file(place / "overlay.safetensors")
        rows, row_ids, hits, overlaid = _program((base / program).read_bytes())(
            torch.tensor(asked, dtype=torch.int64),
            torch.tensor([len(places) for places in chosen], dtype=torch.int64),
            [state[name] for name in shard.state],
        )
        assert rows.dtype == torch.float32
        assert manifest.base != manifest.version or not overlaid.any()
        assert rows.shape[1] == shard.width
        numbers = iter(rows)
        flat = zip(row_ids.tolist(), hits.tolist(), strict=True)
        for table, places in zip(held, chosen, strict=True):
            for at in places:
                units = table.width_on(shard.index) // shard.width
                row = torch.cat([next(numbers) for _ in range(units)])
                answers[table.name][at][shard.index] = (row_bytes(row), *next(flat))
        assert next(numbers, None) is None
    return {
        name: [_join(manifest.table(name), parts) for parts in rows_of_table] for name, rows_of_table in answers.items()
    }


def _join(table: Table, parts: dict[int, Row]) -> Row:
    """One answer from those of all shards that were asked."""
    if not parts:
        return bytes(4 * table.dim), -1, False
    assert len({(row_id, hit) for _, row_id, hit in parts.values()}) == 1
    if table.routing is not Routing.COLUMNS:
        assert len({row for row, _, _ in parts.values()}) == 1
        return next(iter(parts.values()))
    taken = dict.fromkeys(parts, 0)
    joined = b""
    for piece in table.placements:
        size = 4 * (piece.col_stop - piece.col_start)
        start = taken[piece.shard]
        joined += parts[piece.shard][0][start : start + size]
        taken[piece.shard] = start + size
    return joined, *next(iter(parts.values()))[1:]


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
