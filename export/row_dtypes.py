"""Owns the formats in which a shard stores rows: FP32, FP16, int8 row-wise, and what they lose; must not know a file.

Shape suffixes: N rows, D numbers of a whole row, C those of them that are stored.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from export.contract import RowDtype
from export.errors import ExportError

LEVELS = 255
"""Steps between a row's smallest and largest number under int8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRows:
    """Rows in their stored format."""

    rows_NC: torch.Tensor
    scales_N2: torch.Tensor | None
    """FP32 (scale, bias) of each row; None unless int8."""
    max_error: float
    """Largest absolute difference from the rows that were given, 0 for none."""


DTYPES: Mapping[RowDtype, torch.dtype] = {
    RowDtype.FP32: torch.float32,
    RowDtype.FP16: torch.float16,
    RowDtype.INT8: torch.uint8,
}


def store_rows(
    rows_ND: torch.Tensor, row_dtype: RowDtype, columns: torch.Tensor | None, name: Callable[[int], str]
) -> StoredRows:
    """Rows FP32 in a stored format.

    Args:
        rows_ND: Whole rows: int8's scale is the row's, so that an answer does not depend on where columns lie.
        row_dtype: The format.
        columns: Which columns to keep, INT64; None: all.
        name: Says which row it is, for messages.

    Raises:
        ExportError: The format has no number near one of a row's.
    """
    kept_NC = rows_ND if columns is None else rows_ND.index_select(1, columns)
    if row_dtype is RowDtype.FP32:
        return StoredRows(rows_NC=kept_NC, scales_N2=None, max_error=0.0)
    if row_dtype is RowDtype.FP16:
        half_NC = kept_NC.half()
        _refuse(half_NC.isinf() & kept_NC.isfinite(), name, "a number beyond FP16's 65504", "use fp32")
        return StoredRows(rows_NC=half_NC, scales_N2=None, max_error=_error(half_NC.float(), kept_NC))
    scales_N2 = int8_scales(rows_ND)
    _refuse(~scales_N2.isfinite(), name, "numbers that int8 cannot span (NaN, infinity, or too far apart)", "use fp32")
    bytes_NC = quantize(kept_NC, scales_N2)
    return StoredRows(rows_NC=bytes_NC, scales_N2=scales_N2, max_error=_error(dequantize(bytes_NC, scales_N2), kept_NC))


def int8_scales(rows_ND: torch.Tensor) -> torch.Tensor:
    """FP32 (scale, bias) of each row, [N, 2]; the scale of a constant row is 0."""
    if not rows_ND.numel():
        return torch.zeros(rows_ND.shape[0], 2)
    low_N, high_N = torch.aminmax(rows_ND, dim=1)
    return torch.stack([(high_N - low_N) / LEVELS, low_N], dim=1)


def quantize(rows_NC: torch.Tensor, scales_N2: torch.Tensor) -> torch.Tensor:
    """UINT8 [N, C], to the nearest step."""
    steps_N1 = torch.where(scales_N2[:, :1] > 0, scales_N2[:, :1], 1.0)
    return ((rows_NC - scales_N2[:, 1:]) / steps_N1).round().clamp(0, LEVELS).to(torch.uint8)


def dequantize(bytes_NC: torch.Tensor, scales_N2: torch.Tensor) -> torch.Tensor:
    """FP32 [N, C], as ``export.programs.Int8Rows`` does it."""
    return bytes_NC.float() * scales_N2[:, :1] + scales_N2[:, 1:]


def _error(stored_NC: torch.Tensor, rows_NC: torch.Tensor) -> float:
    difference = (stored_NC - rows_NC).abs().nan_to_num(0.0, 0.0, 0.0)  # NaN and infinity are stored as they are
    largest = difference.max() if difference.numel() else torch.zeros(())
    # A difference of FP32 numbers is rounded, maybe down, and a bound has to hold.
    return float(torch.nextafter(largest, torch.tensor(torch.inf))) if largest > 0 else 0.0


def _refuse(bad: torch.Tensor, name: Callable[[int], str], what: str, advice: str) -> None:
    if bool(bad.any()):
        raise ExportError(f"{name(int(bad.nonzero()[0, 0]))} holds {what}; {advice}")
