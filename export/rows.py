"""Owns the reading of a table's trained rows, wherever they lie: a parameter, a rank's shards, a checkpoint's files.

Must not know how a table got its rows, nor what is done with them. Nothing is copied but what is asked for.

Shape suffixes: N rows asked for, C columns asked for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from export.contract import NO_ROW
from export.errors import ExportError


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPiece:
    """A rectangle of a table."""

    row_start: int
    row_stop: int
    col_start: int
    col_stop: int
    numbers: torch.Tensor
    """[row_stop - row_start, col_stop - col_start], floating point, on any device; may be mapped from a file."""
    release: Callable[[], None] | None = None
    """Gives back the pages of a mapped piece, which would otherwise pile up to the size of the table."""


def piece_at(offsets: tuple[int, ...], numbers: torch.Tensor, *, release: Callable[[], None] | None = None) -> RowPiece:
    """The rectangle of a [R, D] tensor that begins at ``offsets``."""
    row, column = offsets
    rows, columns = numbers.shape
    return RowPiece(
        row_start=row,
        row_stop=row + rows,
        col_start=column,
        col_stop=column + columns,
        numbers=numbers,
        release=release,
    )


class TableRows:
    """The rows of one table, or what of them this process can read.

    Args:
        table: The table's name, for messages.
        rows: ``num_embeddings`` of the whole table.
        dim: Its embedding dimension.
        pieces: Rectangles that do not overlap; together the table, or this rank's part of it.
        zeroed: Rows INT64 that read as zeros, whatever the pieces hold: evicted ones that nobody has reset yet.

    Raises:
        ExportError: FP32, in which rows are read, does not hold every number of a piece.
    """

    def __init__(
        self, *, table: str, rows: int, dim: int, pieces: Sequence[RowPiece], zeroed: torch.Tensor | None = None
    ) -> None:
        for piece in pieces:
            if piece.numbers.dtype == torch.float64:
                raise ExportError(
                    f"table {table}: its rows are of {piece.numbers.dtype}, which FP32 would round; serve FP32, FP16 or "
                    "BF16 rows: convert the module to float32 first"
                )
        self.table = table
        self.rows = rows
        self.dim = dim
        self.pieces = tuple(sorted(pieces, key=lambda piece: (piece.row_start, piece.col_start)))
        self._zeroed = torch.empty(0, dtype=torch.int64) if zeroed is None else torch.unique(zeroed)

    @property
    def dtype(self) -> torch.dtype:
        """Number format of the trained rows; FP32 where this process holds none of them."""
        return self.pieces[0].numbers.dtype if self.pieces else torch.float32

    def read(self, start: int, stop: int, *, columns: slice = slice(None)) -> torch.Tensor:
        """Rows [start, stop) as FP32 [N, C], contiguous, on the CPU.

        Raises:
            ExportError: A number of them is not in this process's pieces.
        """
        first, last, _ = columns.indices(self.dim)
        if len(self.pieces) == 1 and not self._zeroed.numel():
            piece = self.pieces[0]
            self._check(self._held(piece, start, stop, first, last), (stop - start) * (last - first))
            rows = slice(start - piece.row_start, stop - piece.row_start)
            cols = slice(first - piece.col_start, last - piece.col_start)
            if piece.release is not None:
                piece.release()  # what was read before; a view of what is read now comes back as it is looked at
            return piece.numbers[rows, cols].float().cpu().contiguous()
        out = torch.zeros(stop - start, last - first)
        held = 0
        for piece in self.pieces:
            if count := self._held(piece, start, stop, first, last):
                held += count
                a, b = max(start, piece.row_start), min(stop, piece.row_stop)
                c, d = max(first, piece.col_start), min(last, piece.col_stop)
                part = piece.numbers[
                    a - piece.row_start : b - piece.row_start, c - piece.col_start : d - piece.col_start
                ]
                out[a - start : b - start, c - first : d - first] = part
                if piece.release is not None:
                    piece.release()
        self._check(held, out.numel())
        zeroed = self._zeroed[(self._zeroed >= start) & (self._zeroed < stop)]
        out[zeroed - start] = 0.0
        return out

    def gather(self, rows_N: torch.Tensor, *, columns: slice = slice(None)) -> torch.Tensor:
        """The given rows INT64 as FP32 [N, C] on the CPU; zeros for ``NO_ROW``.

        Raises:
            ExportError: A number of them is not in this process's pieces.
        """
        first, last, _ = columns.indices(self.dim)
        out = torch.zeros(rows_N.shape[0], last - first)
        held = 0
        for piece in self.pieces:
            c, d = max(first, piece.col_start), min(last, piece.col_stop)
            if c >= d:
                continue
            inside = (rows_N >= piece.row_start) & (rows_N < piece.row_stop)
            chosen = slice(None) if bool(inside.all()) else inside.nonzero()[:, 0]
            local = (rows_N[chosen] - piece.row_start).to(piece.numbers.device)
            cols = slice(c - piece.col_start, d - piece.col_start)
            numbers = piece.numbers if cols == slice(0, piece.numbers.shape[1]) else piece.numbers[:, cols]
            out[chosen, c - first : d - first] = numbers.index_select(0, local).float().cpu()
            held += int(local.shape[0]) * (d - c)
            if piece.release is not None:
                piece.release()
        self._check(held, int((rows_N != NO_ROW).sum()) * (last - first))
        if self._zeroed.numel():
            out[torch.isin(rows_N, self._zeroed)] = 0.0
        return out

    @staticmethod
    def _held(piece: RowPiece, start: int, stop: int, first: int, last: int) -> int:
        rows = min(stop, piece.row_stop) - max(start, piece.row_start)
        cols = min(last, piece.col_stop) - max(first, piece.col_start)
        return max(rows, 0) * max(cols, 0)

    def _check(self, held: int, wanted: int) -> None:
        if held != wanted:
            raise ExportError(
                f"table {self.table}: {wanted - held} of {wanted} numbers of its rows are not here; pass the whole state"
            )
