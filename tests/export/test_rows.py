import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from export.contract import NO_ROW
from export.errors import ExportError
from export.rows import RowPiece, TableRows
from tests.modules import whole_table


def cut(table, row_edges, col_edges, dtype=torch.float32):
    """The table as rectangles between the edges, in an order that is not theirs."""
    pieces = [
        RowPiece(row_start=a, row_stop=b, col_start=c, col_stop=d, numbers=table[a:b, c:d].to(dtype))
        for a, b in zip([0, *row_edges], [*row_edges, table.shape[0]], strict=True)
        for c, d in zip([0, *col_edges], [*col_edges, table.shape[1]], strict=True)
    ]
    return TableRows(table="t", rows=table.shape[0], dim=table.shape[1], pieces=pieces[::-1])


@given(
    edges=st.lists(st.integers(0, 9), max_size=3).map(sorted),
    columns=st.lists(st.integers(0, 4), max_size=2).map(sorted),
    wanted=st.lists(st.integers(-1, 8), max_size=12),
    span=st.tuples(st.integers(0, 9), st.integers(0, 9)).map(sorted),
    across=st.tuples(st.integers(0, 4), st.integers(0, 4)).map(sorted),
)
def test_any_cut_reads_as_the_whole_table(edges, columns, wanted, span, across):
    table = torch.randn(9, 4)
    cols = slice(*across)
    asked = torch.tensor(wanted, dtype=torch.int64)
    expected = table[asked.clamp(min=0)][:, cols] * (asked != NO_ROW)[:, None]
    for rows in (cut(table, edges, columns), whole_table("t", table)):
        assert torch.equal(rows.read(*span, columns=cols), table[slice(*span), cols])
        assert torch.equal(rows.gather(asked, columns=cols), expected)


def test_half_precision_reads_as_fp32():
    table = torch.randn(5, 2).half()
    rows = whole_table("t", table)
    assert rows.dtype is torch.float16
    assert torch.equal(rows.read(1, 4), table[1:4].float())
    assert torch.equal(rows.gather(torch.tensor([4, 0])), table[[4, 0]].float())


def test_zeroed_rows_read_as_zeros_and_leave_the_table_alone():
    table = torch.randn(5, 2)
    rows = whole_table("t", table, zeroed=torch.tensor([3, 1, 3]))
    expected = table.clone()
    expected[[1, 3]] = 0
    assert torch.equal(rows.read(0, 5), expected)
    assert torch.equal(rows.read(2, 4), expected[2:4])
    assert torch.equal(rows.gather(torch.tensor([3, 4, 1])), expected[[3, 4, 1]])
    assert bool((table != 0).all())


def test_rows_that_are_not_here_are_an_error_that_names_the_table():
    table = torch.randn(5, 2)
    part = RowPiece(row_start=0, row_stop=3, col_start=0, col_stop=2, numbers=table[:3])
    rows = TableRows(table="user", rows=5, dim=2, pieces=[part])
    assert torch.equal(rows.read(0, 3), table[:3])
    with pytest.raises(ExportError, match="table user: 4 of 6 numbers"):
        rows.read(2, 5)
    with pytest.raises(ExportError, match="table user: 2 of 4 numbers"):
        rows.gather(torch.tensor([0, 4]))
