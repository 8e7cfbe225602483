"""Owns what one shard holds: which program its tables need, and the state that the program reads.

Must not read rows (``export.stored_rows``) or decide where a table lies (``export.placement``).
"""

from collections.abc import Mapping, Sequence

import torch

from export.contract import NO_ROW, Remap, RowDtype, ShardTable
from export.mch_state import MchTable, build_mch_tensors, cut_mch
from export.mpzch_state import MpzchTable, build_mpzch_tensors, cut_mpzch
from export.overlay_state import no_overlay
from export.programs import ProgramKind, RemapKind
from export.remaps import BUCKET_STATE
from export.row_units import unit_of
from export.state import PlacedTable, ShardState, ready
from export.stored_rows import RowBlock, row_tensors


def build_state(
    shard: int, num_shards: int, tables: Sequence[PlacedTable], *, dim: int, row_dtype: RowDtype
) -> ShardState:
    """The state of one shard.

    Args:
        shard: Which one.
        num_shards: How many there are.
        tables: All tables of the collection, in config order; all of them managed, or none.
        dim: Embedding dimension.
        row_dtype: The stored format of rows.
    """
    held = [table for table in tables if table.pieces_on(shard)]
    if any(table.source.map is not None for table in tables):
        return _build_managed(shard, num_shards, held, dim, row_dtype)
    return _build_plain(shard, held, dim, row_dtype)


def _build_plain(shard: int, tables: Sequence[PlacedTable], dim: int, row_dtype: RowDtype) -> ShardState:
    """Row ranges of tables, one or several units wide; an id that has no row gets the zeros in front."""
    blocks = [_plain_block(table, shard) for table in tables]
    width = unit_of((block.width for block in blocks), dim)
    units = [block.width // width for block in blocks]
    zero_rows = max(units, default=1)
    starts = [table.pieces_on(shard)[0].row_start for table in tables]
    offsets, local = [], zero_rows
    for start, block, unit in zip(starts, blocks, units, strict=True):
        offsets.append(local - start * unit)
        local += block.num_rows * unit
    stops = [start + block.num_rows for start, block in zip(starts, blocks, strict=True)]
    wide = zero_rows > 1
    errors: dict[str, float] = {}
    named = {"row_starts": starts, "row_stops": stops, "row_offsets": offsets} | ({"row_units": units} if wide else {})
    return ShardState(
        kind=ProgramKind(remap=RemapKind.WIDE if wide else RemapKind.PLAIN, row_dtype=row_dtype, width=width),
        entries=tuple(
            ShardTable(table=table.source.name, rows=block.num_rows, width=block.width)
            for table, block in zip(tables, blocks, strict=True)
        ),
        errors=errors,
        tensors=(
            *no_overlay(num_tables=len(tables), managed=False, width=width, row_dtype=row_dtype),
            *(ready(name, torch.tensor(values, dtype=torch.int64)) for name, values in named.items()),
            *row_tensors(blocks, zero_rows=zero_rows, width=width, row_dtype=row_dtype, errors=errors),
        ),
    )


def _plain_block(table: PlacedTable, shard: int) -> RowBlock:
    pieces = table.pieces_on(shard)
    return RowBlock(
        numbers=table.source.numbers,
        rows=slice(pieces[0].row_start, pieces[0].row_stop),
        columns=tuple(piece.columns(table.source.dim) for piece in pieces),
    )


def _build_managed(
    shard: int, num_shards: int, tables: Sequence[PlacedTable], dim: int, row_dtype: RowDtype
) -> ShardState:
    """Rows of MPZCH tables first, whose slots are local rows, then those of MCH tables."""
    local = 0
    probed: dict[str, MpzchTable] = {}
    looked_up: dict[str, MchTable] = {}
    for table in tables:
        if _remap(table) is Remap.MPZCH:
            probed[table.source.name] = cut_mpzch(table, shard, local)
            local += int(probed[table.source.name].row_ids.shape[0])
    for table in tables:
        if _remap(table) is Remap.MCH:
            looked_up[table.source.name] = cut_mch(table, shard, num_shards, local)
            local += int(looked_up[table.source.name].row_ids.shape[0])
    pieces: list[MpzchTable | MchTable] = [*probed.values(), *looked_up.values()]
    row_ids = torch.cat([piece.row_ids for piece in pieces]) if pieces else torch.full((1,), NO_ROW)
    names = [table.source.name for table in tables]
    max_probes = tuple(sorted({table.mpzch.max_probe for table in probed.values()})) or (1,)
    mch = build_mch_tensors([looked_up.get(name) for name in names], row_ids) if looked_up or not probed else {}
    mpzch = build_mpzch_tensors([probed.get(name) for name in names], row_ids, max_probes) if probed else {}
    remap, tensors = _combine(mch, mpzch, [int(name in probed) for name in names])
    errors: dict[str, float] = {}
    blocks = [RowBlock(numbers=piece.numbers, rows=piece.row_ids, columns=((0, dim),)) for piece in pieces]
    return ShardState(
        kind=ProgramKind(
            remap=remap,
            row_dtype=row_dtype,
            width=dim,
            max_probes=max_probes,
            opt_in=any(table.mpzch.num_reserved_slots > 0 for table in probed.values()),
        ),
        entries=tuple((probed.get(name) or looked_up[name]).entry for name in names),
        errors=errors,
        tensors=(
            *no_overlay(num_tables=len(tables), managed=True, width=dim, row_dtype=row_dtype),
            *(ready(name, tensor) for name, tensor in tensors.items()),
            *row_tensors(blocks, zero_rows=0, width=dim, row_dtype=row_dtype, errors=errors),
        ),
    )


def _combine(
    mch: Mapping[str, torch.Tensor], mpzch: Mapping[str, torch.Tensor], mpzch_tables: Sequence[int]
) -> tuple[RemapKind, Mapping[str, torch.Tensor]]:
    """The remap that reads one kind's tensors, or both kinds' under names of their own; ``mpzch_tables`` marks each table."""
    bucketed = BUCKET_STATE[0] in mch
    if not mpzch:
        return RemapKind.BUCKETED_MCH if bucketed else RemapKind.MCH, mch
    if not mch:
        return RemapKind.MPZCH, mpzch
    return RemapKind.BUCKETED_MIXED if bucketed else RemapKind.MIXED, {
        "mpzch_tables": torch.tensor(mpzch_tables),
        **{f"mch_{name}": tensor for name, tensor in mch.items()},
        **{f"mpzch_{name}": tensor for name, tensor in mpzch.items()},
    }


def _remap(table: PlacedTable) -> Remap:
    return Remap.NONE if table.source.map is None else table.source.map.remap
