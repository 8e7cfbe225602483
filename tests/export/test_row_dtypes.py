import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from export.contract import RowDtype
from export.errors import ExportError
from export.programs import Int8Rows
from export.row_dtypes import LEVELS, dequantize, store_rows

ROWS = st.lists(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False), min_size=5, max_size=5),
    min_size=1,
    max_size=6,
).map(lambda rows: torch.tensor(rows, dtype=torch.float32))


def name(at):
    return f"table t: row {at}"


@given(ROWS)
def test_int8_is_within_a_step_of_the_rows_own_range(rows):
    stored = store_rows(rows, RowDtype.INT8, None, name)
    error = (dequantize(stored.rows_NC, stored.scales_N2) - rows).abs()
    span = rows.max(dim=1).values.double() - rows.min(dim=1).values.double()
    assert bool((error.double() <= span[:, None] / LEVELS * (1 + 1e-5) + rows.abs().max() * 1e-6).all())
    assert float(error.max()) <= stored.max_error <= float(error.max()) * (1 + 1e-6)


@pytest.mark.parametrize("dim", [3, 4, 6, 20, 64, 128])
def test_every_dimension_is_stored_in_a_quarter_of_the_bytes_within_the_stated_bound(dim):
    rows = torch.randn(50, dim)
    rows[3], rows[4], rows[5] = 0.0, 1.5, -7.25  # constant rows are exact
    rows[6, 0] = 1e4  # an outlier costs its own row only
    stored = store_rows(rows, RowDtype.INT8, None, name)
    assert stored.rows_NC.nbytes * 4 == rows.nbytes
    answer = Int8Rows()(torch.arange(50), [stored.scales_N2, stored.rows_NC])
    error = (answer - rows).abs()
    assert bool((error[3:6] == 0).all())
    span = rows.max(dim=1).values - rows.min(dim=1).values
    assert bool((error <= span[:, None] / LEVELS).all())
    assert float(error.max()) <= stored.max_error <= float(error.max()) * (1 + 1e-6)
    half = store_rows(rows, RowDtype.FP16, None, name)
    assert half.rows_NC.nbytes * 2 == rows.nbytes
    assert torch.equal(half.rows_NC, rows.half())
    lost = float((rows.half().float() - rows).abs().max())
    assert lost <= half.max_error <= lost * (1 + 1e-6)


def test_a_column_is_stored_alike_whichever_columns_lie_beside_it():
    rows = torch.randn(9, 6)
    whole = store_rows(rows, RowDtype.INT8, None, name)
    for columns in ([0, 1], [5], [4, 2, 0]):
        part = store_rows(rows, RowDtype.INT8, torch.tensor(columns), name)
        assert torch.equal(part.rows_NC, whole.rows_NC[:, columns])
        assert torch.equal(part.scales_N2, whole.scales_N2)


def test_fp32_is_stored_as_it_is():
    rows = torch.tensor([[float("nan"), float("inf"), -0.0]])
    stored = store_rows(rows, RowDtype.FP32, None, name)
    assert stored.rows_NC is rows
    assert (stored.scales_N2, stored.max_error) == (None, 0.0)


@pytest.mark.parametrize(
    ("row_dtype", "number", "message"),
    [
        (RowDtype.INT8, float("nan"), "row 1 holds numbers that int8 cannot span"),
        (RowDtype.INT8, float("inf"), "row 1 holds numbers that int8 cannot span"),
        (RowDtype.FP16, 70_000.0, "row 1 holds a number beyond FP16's 65504; use fp32"),
    ],
)
def test_a_number_that_a_format_cannot_hold_is_refused_with_its_row(row_dtype, number, message):
    rows = torch.ones(3, 2)
    rows[1, 1] = number
    with pytest.raises(ExportError, match=f"table t: {message}"):
        store_rows(rows, row_dtype, None, name)


def test_fp16_keeps_nan_and_infinity():
    rows = torch.tensor([[float("nan"), float("inf"), 1.0]])
    stored = store_rows(rows, RowDtype.FP16, None, name)
    assert torch.equal(stored.rows_NC.isnan(), rows.isnan())
    assert stored.max_error == 0.0
