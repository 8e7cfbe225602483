"""Owns the rows of a shard's state: which rows of which tables, read, cut, stored and streamed; must not know ids.

Shape suffixes: R rows of the reply's width that the shard holds.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from export.contract import RowDtype
from export.row_dtypes import DTYPES, StoredRows, store_rows
from export.rows import TableRows
from export.state import StateTensor, ready

CHUNK_BYTES = 32 << 20
_ROW_MULTIPLE = 16
"""Rows are filled up to a multiple of so many, so that what follows UINT8 rows of any width is aligned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBlock:
    """Rows of one table that follow each other in a shard's state."""

    numbers: TableRows
    rows: torch.Tensor | slice
    """INT64, ``NO_ROW`` for zeros; or a range."""
    columns: tuple[tuple[int, int], ...]
    """The pieces of each row that are here, [start, stop), in their order."""

    @property
    def num_rows(self) -> int:
        """Rows of the table."""
        return self.rows.stop - self.rows.start if isinstance(self.rows, slice) else int(self.rows.shape[0])

    @property
    def width(self) -> int:
        """Numbers of each that are here."""
        return sum(stop - start for start, stop in self.columns)


def row_tensors(
    blocks: Sequence[RowBlock], *, zero_rows: int, width: int, row_dtype: RowDtype, errors: dict[str, float]
) -> tuple[StateTensor, ...]:
    """The state tensors of rows: ``zero_rows`` rows of zeros, then the blocks, in rows of ``width`` numbers.

    Args:
        blocks: Their widths are multiples of ``width``.
        zero_rows: Rows of zeros in front.
        width: Numbers in a row of the reply.
        row_dtype: The stored format.
        errors: Filled with each table's error bound as the rows are written.
    """
    held = zero_rows + sum(block.num_rows * (block.width // width) for block in blocks)
    total = max(held, 1) + -max(held, 1) % _ROW_MULTIPLE
    scales_R2 = torch.zeros(total if row_dtype is RowDtype.INT8 else 0, 2)

    def chunks() -> Iterator[torch.Tensor]:
        yield torch.zeros(zero_rows, width, dtype=DTYPES[row_dtype])
        at = zero_rows
        for block in blocks:
            for stored in stored_chunks(block, row_dtype):
                units = block.width // width
                if stored.scales_N2 is not None:
                    scales_R2[at : at + stored.rows_NC.shape[0] * units] = stored.scales_N2.repeat_interleave(units, 0)
                at += stored.rows_NC.shape[0] * units
                errors[block.numbers.table] = max(errors.get(block.numbers.table, 0.0), stored.max_error)
                yield stored.rows_NC.contiguous()
        yield torch.zeros(total - at, width, dtype=DTYPES[row_dtype])

    rows = StateTensor(name="rows", dtype=DTYPES[row_dtype], shape=(total, width), chunks=chunks)
    return (rows, ready("row_scales", scales_R2)) if row_dtype is RowDtype.INT8 else (rows,)


def stored_chunks(block: RowBlock, row_dtype: RowDtype) -> Iterator[StoredRows]:
    """The rows of a block in their stored format, ``CHUNK_BYTES`` of FP32 at a time."""
    numbers = block.numbers
    # int8 needs the whole row. The other formats need no more than is stored here, and a rank may have no more.
    whole = row_dtype is RowDtype.INT8
    kept = torch.cat([torch.arange(start, stop) for start, stop in block.columns])
    columns = kept if whole and block.columns != ((0, numbers.dim),) else None
    step = max(1, CHUNK_BYTES // (4 * numbers.dim))
    for first in range(0, block.num_rows, step):
        row_ids = _row_ids(block.rows, first, min(first + step, block.num_rows))
        parts = [_read(numbers, row_ids, slice(*span)) for span in (((0, numbers.dim),) if whole else block.columns)]
        rows = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        yield store_rows(rows, row_dtype, columns, functools.partial(_name, numbers.table, row_ids))


def _name(table: str, row_ids: torch.Tensor | range, at: int) -> str:
    return f"table {table}: row {int(row_ids[at])}"


def _row_ids(rows: torch.Tensor | slice, start: int, stop: int) -> torch.Tensor | range:
    return range(rows.start + start, rows.start + stop) if isinstance(rows, slice) else rows[start:stop]


def _read(numbers: TableRows, row_ids: torch.Tensor | range, columns: slice) -> torch.Tensor:
    if isinstance(row_ids, range):
        return numbers.read(row_ids.start, row_ids.stop, columns=columns)
    return numbers.gather(row_ids, columns=columns)
