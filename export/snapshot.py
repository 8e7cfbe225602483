"""Owns rows as they were at one moment, while the module trains on: those that may have changed, over a published base.

Must not decide which rows those are. Shape suffixes: N rows asked for, C columns asked for, R rows of a table.
"""

from pathlib import Path

import torch

from export.contract import NO_ROW, Manifest, Routing, RowDtype
from export.errors import ExportError
from export.rows import TableRows
from export.stored import StoredShard

NOT_NOTED = (
    "answers an id, and was neither looked up nor named by evict() since the base; pass what evict() gives to step(), or "
    "publish with rows='all' if the optimizer changes rows that were not looked up"
)


class SnapshotRows(TableRows):
    """Some rows of a table, copied; what else is asked for comes from a base, or is an error.

    Args:
        table: The table's name.
        rows: ``num_embeddings`` of the whole table.
        dim: Its embedding dimension.
        held: Rows that were copied, INT64 ascending.
        numbers: Their numbers, FP32 [len(held), dim].
        base: Where the others are read; None: nobody asks for others.
    """

    def __init__(
        self,
        *,
        table: str,
        rows: int,
        dim: int,
        held: torch.Tensor,
        numbers: torch.Tensor,
        base: "BaseRows | None" = None,
    ) -> None:
        super().__init__(table=table, rows=rows, dim=dim, pieces=())
        self._held_rows, self._numbers, self._base = held, numbers, base

    def read(self, start: int, stop: int, *, columns: slice = slice(None)) -> torch.Tensor:
        """See ``TableRows.read``."""
        return self.gather(torch.arange(start, stop), columns=columns)

    def gather(self, rows_N: torch.Tensor, *, columns: slice = slice(None)) -> torch.Tensor:
        """See ``TableRows.gather``."""
        out = torch.zeros(rows_N.shape[0], self.dim)
        at_N = torch.searchsorted(self._held_rows, rows_N.contiguous()).clamp(max=max(len(self._held_rows) - 1, 0))
        here_N = self._held_rows[at_N] == rows_N if len(self._held_rows) else torch.zeros_like(rows_N, dtype=torch.bool)
        out[here_N] = self._numbers[at_N[here_N]]
        other_N = ~here_N & (rows_N != NO_ROW)
        if bool(other_N.any()):
            if self._base is None:
                raise ExportError(f"table {self.table}: row {int(rows_N[other_N][0])} {NOT_NOTED}")
            out[other_N] = self._base.gather(rows_N[other_N])
        return out[:, columns].contiguous()


class BaseRows:
    """Rows of a published base, as FP32, by the trainer's numbers.

    Args:
        directory: The base's directory.
        manifest: Its manifest; no table is stored as int8, whose rows are not what was trained.
        table: Which table.
    """

    def __init__(self, directory: Path, manifest: Manifest, table: str) -> None:
        entry = manifest.table(table)
        assert entry.row_dtype is not RowDtype.INT8
        self._table, self._dim = table, entry.dim
        self._stored: list[tuple[StoredShard, int]] = []
        self._shard_R = torch.full((entry.rows,), -1, dtype=torch.int16)
        self._local_R = torch.zeros(entry.rows, dtype=torch.int64)
        self._columns: list[list[tuple[int, int]]] = []
        self._cut = entry.routing is Routing.COLUMNS
        for index in dict.fromkeys(piece.shard for piece in entry.placements):
            stored = StoredShard(directory, manifest, index)
            at = [held.name for held in stored.tables].index(table)
            if entry.managed:
                first, rows = stored.row_ids(at)
                known = (rows != NO_ROW).nonzero()[:, 0]
                rows, locals_ = rows[known], known + first
            else:
                piece = entry.pieces_on(index)[0]
                rows = torch.arange(piece.row_start, piece.row_stop)
                locals_ = stored.plain_locals(at, rows)
            self._shard_R[rows] = len(self._stored)
            self._local_R[rows] = locals_
            self._stored.append((stored, at))
            self._columns.append([piece.columns(entry.dim) for piece in entry.pieces_on(index)])

    def holds(self, rows_N: torch.Tensor) -> torch.Tensor:
        """Which rows the base holds, BOOL [N]."""
        return self._shard_R[rows_N] >= 0

    def gather(self, rows_N: torch.Tensor) -> torch.Tensor:
        """Rows FP32 [N, D].

        Raises:
            ExportError: The base does not hold one: no id of it could be answered with that row.
        """
        out = torch.zeros(rows_N.shape[0], self._dim)
        shards_N = self._shard_R[rows_N]
        if bool((shards_N < 0).any()):
            raise ExportError(f"table {self._table}: row {int(rows_N[shards_N < 0][0])} {NOT_NOTED}")
        for number, (stored, at) in enumerate(self._stored):
            mine = torch.ones_like(rows_N, dtype=torch.bool) if self._cut else shards_N == number
            locals_N = stored.plain_locals(at, rows_N) if self._cut else self._local_R[rows_N[mine]]
            numbers = stored.numbers(at, locals_N)
            done = 0
            for start, stop in self._columns[number]:
                out[mine, start:stop] = numbers[:, done : done + stop - start]
                done += stop - start
            stored.release()
        return out
