"""Owns an MPZCH table's part of a shard: whole training buckets of its identity table, and where a miss goes.

Shape suffixes: R local rows of the table, B training buckets.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from export.bucket_state import ONE_BUCKET, bucket_rule
from export.contract import NO_ROW, Mpzch, ShardTable, TrainingBuckets, Unknown
from export.rows import TableRows
from export.state import PlacedTable

FALLBACK = -1
"""``miss_rows`` of a table whose misses answer as the slot that they hash to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MpzchTable:
    """One MPZCH table on one shard; its last local row is in no bucket, and takes what has no slot here."""

    entry: ShardTable
    numbers: TableRows
    row_ids: torch.Tensor
    """[R] trainer's row of each local row, INT64; ``NO_ROW``: a row of zeros."""
    identities_R: torch.Tensor
    training: TrainingBuckets
    mpzch: Mpzch
    slots: tuple[tuple[int, int, int, int], ...]
    """By bucket: slots that are probed, where they start, slots that a miss hashes into, where those start."""
    miss_row: int


def cut_mpzch(table: PlacedTable, shard: int, first_local: int) -> MpzchTable:
    """What a shard holds of a table; its local rows are numbered from ``first_local``."""
    source = table.source.map
    assert source is not None and source.mpzch is not None and source.identities_R is not None  # noqa: PT018  invariant
    (piece,) = table.pieces_on(shard)
    identities_R = source.identities_R[piece.row_start : piece.row_stop]
    last = first_local + piece.row_stop - piece.row_start
    reserved = max(source.mpzch.num_reserved_slots, 0)
    slots: list[tuple[int, int, int, int]] = []
    for start, stop in itertools.pairwise(source.training.row_edges):
        at = first_local + start - piece.row_start
        if not (piece.row_start <= start < stop <= piece.row_stop):
            slots.append((1, last, 1, last))  # of another shard: never asked here
        elif reserved:
            slots.append((stop - start - reserved, at, reserved, at + stop - start - reserved))
        else:
            slots.append((stop - start, at, stop - start, at))
    zero = table.unknown is Unknown.ZERO
    extra = NO_ROW if zero or not source.mpzch.disable_fallback else source.mpzch.default_row
    return MpzchTable(
        entry=ShardTable(
            table=table.source.name,
            rows=int(identities_R.shape[0]) + 1,
            width=table.source.dim,
            zch_rows=int((identities_R != -1).sum()),
            zch_open_slots=source.open_slots_in(piece),
        ),
        numbers=table.source.numbers,
        row_ids=torch.cat([torch.arange(piece.row_start, piece.row_stop), torch.tensor([extra])]),
        identities_R=torch.cat([identities_R, torch.tensor([-1])]),
        training=source.training,
        mpzch=source.mpzch,
        slots=tuple(slots),
        miss_row=last if zero or source.mpzch.disable_fallback else FALLBACK,
    )


def build_mpzch_tensors(
    tables: Sequence[MpzchTable | None], row_ids: torch.Tensor, max_probes: Sequence[int]
) -> dict[str, torch.Tensor]:
    """State of ``MpzchRemap``.

    Args:
        tables: The shard's tables in order; None where one is of another kind.
        row_ids: Trainer's row of every local row of the shard, those of MPZCH tables first.
        max_probes: Those of the program.
    """
    held = [table for table in tables if table is not None]
    slots = [quad for table in tables for quad in (((1, 0, 1, 0),) if table is None else table.slots)]
    columns = list(zip(*slots, strict=True)) or [()] * 4
    names = ("slot_counts", "slot_offsets", "miss_counts", "miss_offsets")
    missed = [FALLBACK if table is None else table.miss_row for table in tables]
    kinds = [0 if table is None else max_probes.index(table.mpzch.max_probe) for table in tables]
    return {
        **bucket_rule([ONE_BUCKET if table is None else table.training for table in tables]),
        **{name: torch.tensor(values, dtype=torch.int64) for name, values in zip(names, columns, strict=True)},
        "miss_rows": torch.tensor(missed, dtype=torch.int64),
        "probe_kinds": torch.tensor(kinds, dtype=torch.int64),
        "row_ids": row_ids,
        "identities": torch.cat([table.identities_R for table in held])[:, None],
    }
