"""Owns the forecast of uneven shards, before anything is written: from a map's own ids, and from the sizes of tables.

Must not decide where a table lies. Shape suffixes: S shards.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from export.contract import Remap, Routing
from export.report import human_bytes
from export.source import MapSource
from export.state import PlacedTable

_log = logging.getLogger(__name__)

_TIMES = 1.5
_DEVIATIONS = 4
_NOISE_BYTES = 1 << 20
"""Shards that differ by less are not worth a plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Skew:
    """A shard that has more than its share."""

    table: str | None
    """The table whose ids are uneven; None: all tables, by bytes."""
    shard: int
    held: int
    """Ids, or bytes of rows."""
    total: int
    times: float
    """The shard's share over the even share."""
    reason: str

    def __str__(self) -> str:
        if self.table is None:
            held, total = human_bytes(self.held), human_bytes(self.total)
            return (
                f"shard {self.shard} holds {held} of {total} of rows, {self.times:.1f} times its share; {self.reason}"
            )
        return (
            f"table {self.table}: shard {self.shard} holds {self.held:,} of {self.total:,} ids, {self.times:.1f} times its "
            f"share, so it will be the slowest; {self.reason}"
        )


def warn_of_skew(tables: Sequence[PlacedTable], num_shards: int) -> None:
    """Log one warning for each table whose ids, and one if the bytes of all tables, lie on few of the shards."""
    for skew in find_skew(tables, num_shards):
        _log.warning("%s", skew)


def find_skew(tables: Sequence[PlacedTable], num_shards: int) -> Iterator[Skew]:
    """What ``warn_of_skew`` says, as data.

    ``hash`` and ``replicated`` are even by construction, and how often an id is asked for is not known here. Of a live
    sharded module a rank sees its own ids alone, which say nothing about the others'.
    """
    bytes_S = [0] * num_shards
    for table in tables:
        ids_S = _ids_by_shard(table, num_shards)
        if table.routing is Routing.TRAINING and table.source.map is not None and (worst := _worst(ids_S)):
            shard, times = worst
            if ids_S[shard] - sum(ids_S) / num_shards > _DEVIATIONS * math.sqrt(sum(ids_S) / num_shards):
                reason = _reason(table.source.map, num_shards)
                yield _skew(table.source.name, shard, ids_S, times, reason)
        for shard, size in enumerate(_bytes_by_shard(table, ids_S)):
            bytes_S[shard] += size
    if (worst := _worst(bytes_S)) and max(bytes_S) - sum(bytes_S) / num_shards > _NOISE_BYTES:
        yield _skew(None, worst[0], bytes_S, worst[1], "cut its largest table over more shards, or use fewer")


def _skew(table: str | None, shard: int, held_S: Sequence[int], times: float, reason: str) -> Skew:
    return Skew(table=table, shard=shard, held=held_S[shard], total=sum(held_S), times=times, reason=reason)


def _worst(held_S: Sequence[int]) -> tuple[int, float] | None:
    """The fullest shard and how many times its share it has, if that is too much."""
    if len(held_S) < 2 or not sum(held_S):
        return None
    most = max(held_S)
    times = most * len(held_S) / sum(held_S)
    return (held_S.index(most), times) if times > _TIMES else None


def _reason(source: MapSource, num_shards: int) -> str:
    training = source.training
    if training.buckets < num_shards:
        reason = f"training had {training.buckets} bucket(s) and there are {num_shards} shards"
    elif training.input_hash_size:
        reason = f"training cut the ids into even blocks below input_hash_size {training.input_hash_size}"
    else:
        reason = "training dealt the ids out by modulo"
    return f"{reason}: routing 'hash' is even" if source.remap is Remap.MCH else reason


def _ids_by_shard(table: PlacedTable, num_shards: int) -> list[int]:
    """Ids of a managed table on each shard; ``hash`` as it is on average."""
    ids_S = [0] * num_shards
    if table.source.map is None or not _is_whole(table):
        return ids_S
    rows_K = table.source.map.rows_K
    for piece in table.placements:
        if table.routing is Routing.HASH:
            ids_S[piece.shard] = int(rows_K.shape[0]) // num_shards
        else:
            ids_S[piece.shard] = int(((rows_K >= piece.row_start) & (rows_K < piece.row_stop)).sum())
    return ids_S


def _is_whole(table: PlacedTable) -> bool:
    """Whether this process sees all of a managed table's map."""
    assert table.source.map is not None
    return sum(piece.row_stop - piece.row_start for piece in table.source.map.pieces) == table.source.rows


def _bytes_by_shard(table: PlacedTable, ids_S: Sequence[int]) -> list[int]:
    """FP32 bytes of a table's rows on each shard; the row dtype changes all of them alike."""
    if table.source.map is not None and table.source.map.remap is Remap.MCH and _is_whole(table):
        return [ids * table.source.dim * 4 for ids in ids_S]
    bytes_S = [0] * len(ids_S)
    for piece in table.placements:
        first, last = piece.columns(table.source.dim)
        bytes_S[piece.shard] += (piece.row_stop - piece.row_start) * (last - first) * 4
    return bytes_S
