"""Owns the tensors of a shard's overlay (``export.overlays``); must not know how changes were found.

Shape suffixes: E ids of a table that changed, C rows that changed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from export.contract import RowDtype
from export.hash_table import build_hash_table
from export.overlays import CHANGED_STATE, MAP_STATE, OVERLAY
from export.row_dtypes import DTYPES
from export.state import StateTensor, ready

_SLOTS_PER_KEY = 4
"""Most ids are in no overlay, and pay for finding that out."""


def _none() -> torch.Tensor:
    return torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class MapChanges:
    """Ids of one table that answer otherwise than in the base; all INT64 [E]."""

    ids_E: torch.Tensor = field(default_factory=_none)
    locals_E: torch.Tensor = field(default_factory=_none)
    """Local row that answers; from the number of the base's rows on, a row of the overlay."""
    row_ids_E: torch.Tensor = field(default_factory=_none)
    """Trainer's row of it; ``NO_ROW``: zeros."""
    hits_E: torch.Tensor = field(default_factory=_none)
    """1: a row of the id's own; 0: it was evicted, and answers as an unknown id."""
    minus_one: tuple[int, int] | None = None
    """Local row and trainer's row of the id −1, which MPZCH answers with an empty slot; None: as in the base."""

    @property
    def num_tombstones(self) -> int:
        """Ids that were evicted."""
        return int((self.hits_E == 0).sum())


def overlay_tensors(
    maps: Sequence[MapChanges],
    changed: tuple[torch.Tensor, torch.Tensor],
    rows: Sequence[StateTensor],
    *,
    managed: bool,
) -> tuple[StateTensor, ...]:
    """All tensors of an overlay.

    Args:
        maps: Of each table of the shard, in order.
        changed: (local rows INT64 [C] of the base, rows INT64 [C] of the overlay that replace them); of a row that takes
            several local rows, the first ones.
        rows: The overlay's rows as ``export.stored_rows`` gives them.
        managed: Whether the tables have maps.
    """
    named = dict(zip(CHANGED_STATE, build_hash_table([changed], slots_per_key=_SLOTS_PER_KEY), strict=True))
    if managed:
        named |= _map_tensors(maps)
    stored = [
        StateTensor(name=OVERLAY + part.name, dtype=part.dtype, shape=part.shape, chunks=part.chunks) for part in rows
    ]
    return (*(ready(name, tensor) for name, tensor in named.items()), *stored)


def no_overlay(*, num_tables: int, managed: bool, width: int, row_dtype: RowDtype) -> tuple[StateTensor, ...]:
    """What a base has: nothing of anything."""
    rows = [ready("rows", torch.zeros(0, width, dtype=DTYPES[row_dtype]))]
    if row_dtype is RowDtype.INT8:
        rows.append(ready("row_scales", torch.zeros(0, 2)))
    return overlay_tensors([MapChanges()] * num_tables, (_none(), _none()), rows, managed=managed)


def _map_tensors(maps: Sequence[MapChanges]) -> dict[str, torch.Tensor]:
    firsts = torch.tensor([0, *(table.ids_E.shape[0] for table in maps)]).cumsum(0)
    unkeyed = [table.minus_one for table in maps]
    keyed = [
        (table.ids_E, torch.arange(first, first + table.ids_E.shape[0]))
        for table, first in zip(maps, firsts.tolist(), strict=False)
    ]
    hash_table, offsets = build_hash_table(keyed, slots_per_key=_SLOTS_PER_KEY)
    last = int(firsts[-1])
    minus_one = [-1 if each is None else last + at for at, each in enumerate(unkeyed)]
    # An entry for each table's −1, and one that no id leads to: where none is found the program looks at the first.
    extra = torch.tensor([*((0, 0) if each is None else each for each in unkeyed), (0, 0)], dtype=torch.int64)
    tails = (extra[:, 0], extra[:, 1], torch.zeros(extra.shape[0], dtype=torch.int64))
    columns = (
        torch.cat([*(getattr(table, name) for table in maps), tail])
        for name, tail in zip(("locals_E", "row_ids_E", "hits_E"), tails, strict=True)
    )
    return dict(
        zip(MAP_STATE, (hash_table, offsets, torch.tensor(minus_one, dtype=torch.int64), *columns), strict=True)
    )
