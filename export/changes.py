"""Owns finding what a shard answers otherwise than its base: rows with other numbers, ids with another row or none.

What an id answers now is the module's word (``export.oracle``), not read off its map. Must not write files.

Shape suffixes: K ids in a table's map, E of them that changed, L local rows of the base, C of them that changed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from export.contract import Manifest, RowDtype, ShardTable
from export.mch_state import cut_mch
from export.mpzch_state import cut_mpzch
from export.oracle import find_rows
from export.overlay_state import MapChanges, overlay_tensors
from export.rows import TableRows
from export.state import PlacedTable, StoredState
from export.stored import StoredMap, StoredShard
from export.stored_rows import RowBlock, row_tensors, stored_chunks

Touched = Mapping[str, torch.Tensor]
"""By table: every row INT64 whose numbers may differ from the base's, ascending."""

_EMPTY = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class _TableChanges:
    """What changed of one table on one shard."""

    entry: ShardTable
    numbers: TableRows
    columns: tuple[tuple[int, int], ...]
    units: int
    changed_C: torch.Tensor
    """First local row of each row of the base that has other numbers."""
    changed_rows_C: torch.Tensor
    """The trainer's rows of those."""
    new_rows: torch.Tensor
    """The trainer's rows that the base's shard does not hold."""
    map: MapChanges
    """Local rows from the base's number of rows on: into ``new_rows``, counted from there."""


def build_overlay(
    stored: StoredShard,
    manifest: Manifest,
    tables: Sequence[PlacedTable],
    *,
    row_dtype: RowDtype,
    touched: Touched | None,
) -> StoredState:
    """The overlay of one shard.

    Args:
        stored: The shard of the base.
        manifest: The base's manifest.
        tables: All tables of the collection as they are now, placed as in the base; call it inside ``eval_mode``.
        row_dtype: The base's stored format of rows.
        touched: Where numbers may have changed; None: every row is compared.
    """
    by_name = {table.source.name: table for table in tables}
    rules = _Rules(num_shards=manifest.num_shards, row_dtype=row_dtype, touched=touched)
    changes = [_find(stored, at, by_name[entry.table], rules) for at, entry in enumerate(stored.shard.tables)]
    changed, maps, first_new = _number(changes, stored.num_rows)
    blocks = [_block(change, change.changed_rows_C) for change in changes]
    blocks += [_block(change, change.new_rows) for change in changes]
    errors: dict[str, float] = {entry.table: entry.max_error for entry in stored.shard.tables}
    rows = row_tensors(
        [block for block in blocks if block.num_rows],
        zero_rows=0,
        width=stored.shard.width,
        row_dtype=row_dtype,
        errors=errors,
    )
    assert first_new <= rows[0].shape[0]
    managed = any(table.managed for table in stored.tables)
    return StoredState(
        entries=tuple(change.entry for change in changes),
        errors=errors,
        tensors=overlay_tensors(maps, changed, rows, managed=managed),
    )


def _number(
    changes: Sequence[_TableChanges], base_rows: int
) -> tuple[tuple[torch.Tensor, torch.Tensor], list[MapChanges], int]:
    """Give the overlay's rows their numbers: those that replace rows of the base, table by table, then the new ones."""
    keys, values, maps = [_EMPTY], [_EMPTY], []
    row = 0
    for change in changes:
        keys.append(change.changed_C)
        values.append(row + torch.arange(change.changed_C.shape[0]) * change.units)
        row += int(change.changed_C.shape[0]) * change.units
    for change in changes:
        locals_E = change.map.locals_E
        maps.append(
            MapChanges(
                ids_E=change.map.ids_E,
                locals_E=torch.where(locals_E >= base_rows, locals_E + row, locals_E),
                row_ids_E=change.map.row_ids_E,
                hits_E=change.map.hits_E,
                minus_one=change.map.minus_one,
            )
        )
        row += int(change.new_rows.shape[0])
    return (torch.cat(keys), torch.cat(values)), maps, row


def _block(change: _TableChanges, rows: torch.Tensor) -> RowBlock:
    return RowBlock(numbers=change.numbers, rows=rows, columns=change.columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rules:
    """What goes for all tables of a shard."""

    num_shards: int
    row_dtype: RowDtype
    touched: Touched | None


def _find(stored: StoredShard, at: int, table: PlacedTable, rules: _Rules) -> _TableChanges:
    touched = None if rules.touched is None else rules.touched.get(table.source.name, _EMPTY)
    pieces = table.pieces_on(stored.shard.index)
    if table.source.map is None:
        first, stop = pieces[0].row_start, pieces[0].row_stop
        rows_L = torch.arange(first, stop) if touched is None else touched[(touched >= first) & (touched < stop)]
        found = _FoundIds(
            map=MapChanges(),
            new_rows=_EMPTY,
            locals_L=stored.plain_locals(at, rows_L),
            rows_L=rows_L,
            entry=stored.shard.tables[at],
        )
    else:
        found = _find_ids(stored, at, table, rules.num_shards)
    locals_L, rows_L = found.locals_L, found.rows_L
    if touched is not None:
        kept = torch.isin(rows_L, touched)
        locals_L, rows_L = locals_L[kept], rows_L[kept]
    columns = tuple(piece.columns(table.source.dim) for piece in pieces)
    block = RowBlock(numbers=table.source.numbers, rows=rows_L, columns=columns)
    differs = _compare(stored, at, block, locals_L, rules.row_dtype)
    return _TableChanges(
        entry=found.entry.model_copy(update={"overlay_rows": int(differs.sum()) + int(found.new_rows.shape[0])}),
        numbers=table.source.numbers,
        columns=columns,
        units=stored.units(at),
        changed_C=locals_L[differs],
        changed_rows_C=rows_L[differs],
        new_rows=found.new_rows,
        map=found.map,
    )


def _compare(
    stored: StoredShard, at: int, block: RowBlock, locals_L: torch.Tensor, row_dtype: RowDtype
) -> torch.Tensor:
    """Which rows the module has in other bytes than the base: BOOL [L]."""
    parts = [torch.empty(0, dtype=torch.bool)]
    done = 0
    for chunk in stored_chunks(block, row_dtype):
        size = int(chunk.rows_NC.shape[0])
        parts.append(stored.differs(at, locals_L[done : done + size], chunk))
        done += size
        stored.release()
    return torch.cat(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _FoundIds:
    """How a table's map differs from the base's, on one shard."""

    map: MapChanges
    new_rows: torch.Tensor
    """See ``_TableChanges``."""
    locals_L: torch.Tensor
    """The base's local rows that an id can still be answered with."""
    rows_L: torch.Tensor
    """The trainer's rows of those."""
    entry: ShardTable


def _find_ids(stored: StoredShard, at: int, table: PlacedTable, num_shards: int) -> _FoundIds:
    source = table.source
    assert source.map is not None
    first, row_ids = stored.row_ids(at)
    base = stored.map_of(at)
    if source.map.mpzch is None:
        mch = cut_mch(table, stored.shard.index, num_shards, first)
        entry, ids_K = mch.entry, mch.ids_K
        rows_K = mch.row_ids[: ids_K.shape[0]]
        # Rows of ids come first, then those of unknown ids.
        defaults = torch.arange(first + base.ids_K.shape[0], first + row_ids.shape[0])
    else:
        mpzch = cut_mpzch(table, stored.shard.index, first)
        held = mpzch.identities_R != -1
        entry, ids_K, rows_K = mpzch.entry, mpzch.identities_R[held], mpzch.row_ids[held]
        # Every slot answers ids that hash to it, and the last local row those that have none.
        defaults = torch.arange(first, first + row_ids.shape[0])
    places = _Places(row_ids, first)
    ids_E, kept_K = _other_ids(base, row_ids[base.locals_K - first], ids_K, rows_K)
    rows_E, hits_E = find_rows(source, ids_E, table.unknown)
    locals_E, here_E = places.find(rows_E)
    new_rows, new_at = torch.unique(rows_E[~here_E], return_inverse=True)
    locals_E[~here_E] = stored.num_rows + new_at
    reached = torch.unique(torch.cat([kept_K, locals_E[here_E], defaults]))
    minus_one = None
    if source.map.mpzch is not None:
        row, _ = find_rows(source, torch.tensor([-1]), table.unknown)
        local, here = places.find(row)
        # Where this shard is not asked for it, the row may be another shard's.
        minus_one = (int(local), int(row)) if bool(here.all()) else None
    changes = MapChanges(
        ids_E=ids_E, locals_E=locals_E, row_ids_E=rows_E, hits_E=hits_E.to(torch.int64), minus_one=minus_one
    )
    return _FoundIds(
        map=changes,
        new_rows=new_rows,
        locals_L=reached,
        rows_L=row_ids[reached - first],
        entry=stored.shard.tables[at].model_copy(
            update={
                "zch_rows": entry.zch_rows,
                "zch_open_slots": entry.zch_open_slots,
                "overlay_ids": int(hits_E.sum()),
                "overlay_tombstones": changes.num_tombstones,
            }
        ),
    )


class _Places:
    """Local rows of the base by the trainer's row."""

    def __init__(self, row_ids: torch.Tensor, first: int) -> None:
        self._sorted, self._order = torch.sort(row_ids)
        self._first = first

    def find(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Local row of each row, and which of them the base holds at all."""
        at = torch.searchsorted(self._sorted, rows).clamp(max=self._sorted.shape[0] - 1)
        return self._order[at] + self._first, self._sorted[at] == rows


def _other_ids(
    base: StoredMap, base_rows_K: torch.Tensor, ids_K: torch.Tensor, rows_K: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids of either map whose row differs between them, each once, and the local rows of all others.

    An id that lies in several slots of an MPZCH table counts as differing: which of them answers is the kernel's matter.
    """
    if not base.ids_K.numel() or not ids_K.numel():
        return torch.unique(torch.cat([base.ids_K, ids_K])), _EMPTY
    sorted_ids, order = torch.sort(ids_K)
    at = torch.searchsorted(sorted_ids, base.ids_K).clamp(max=sorted_ids.shape[0] - 1)
    in_both = sorted_ids[at] == base.ids_K
    several = torch.cat([_several(base.ids_K), _several(ids_K)])
    same = in_both & (rows_K[order[at]] == base_rows_K) & ~torch.isin(base.ids_K, several)
    new = ids_K[~torch.isin(ids_K, base.ids_K[same])]
    gone = base.ids_K[~in_both]
    return torch.unique(torch.cat([new, gone, several])), base.locals_K[same]


def _several(ids_K: torch.Tensor) -> torch.Tensor:
    """Ids that occur more than once."""
    ids: torch.Tensor
    ids, counts = torch.unique(ids_K, return_counts=True)
    return ids[counts > 1]
