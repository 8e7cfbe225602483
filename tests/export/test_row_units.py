"""A plan that leaves shards with short units of rows is told so, and int8 never takes more bytes than fp32."""

import logging

import pytest
import torch

from export import export_collection
from export.contract import RowDtype, Unknown
from export.errors import ExportError
from export.placement import place_tables
from export.plans import Plan
from export.reading import read_collection
from export.row_units import check_units
from export.state import PlacedTable
from tests.modules import plain_collection


def placed(plan, dim=64):
    source = read_collection(plain_collection({"user": 10, "item": 23}, dim=dim))
    places = place_tables(source, plan)
    return [
        PlacedTable(
            source=table, routing=places[table.name][0], placements=places[table.name][1], unknown=Unknown.TRAINING
        )
        for table in source.tables
    ]


def warnings_of(caplog, plan, dim=64):
    with caplog.at_level(logging.WARNING, logger="export"):
        check_units(placed(plan, dim), RowDtype.FP32)
    return [record.getMessage() for record in caplog.records]


def cut(*columns):
    return Plan(shards=2, tables={"user": {"columns": list(columns)}})


def test_short_units_are_warned_about_by_shard_and_table(caplog):
    assert warnings_of(caplog, cut(33, 31)) == [
        f"shard {shard}: rows lie in units of 1 number, the common divisor of its tables' columns: user ({width}), item (64); "
        "lookups are slow and int8 is large, so cut columns in multiples of 16, or all in one width"
        for shard, width in ((0, 33), (1, 31))
    ]


def test_shards_that_are_alike_share_a_warning(caplog):
    plan = Plan(shards=4, tables={"user": {"columns": [16, 16, 16, 16]}, "item": {"columns": [12, 20, 12, 20]}})
    warnings = warnings_of(caplog, plan)
    assert [text.partition(":")[0] for text in warnings] == ["shard 0, 2", "shard 1, 3"]
    assert "units of 4 numbers" in warnings[0]


@pytest.mark.parametrize(
    ("plan", "dim"),
    [
        (cut(48, 16), 64),
        (Plan(shards=2), 64),
        (Plan(shards=2), 3),
        (Plan(shards=2, tables={"user": {"columns": [33, 31]}, "item": {"columns": [33, 31]}}), 64),
        (Plan(shards=2, tables={"user": {"columns": [33, 31]}, "item": {"columns": [[1, 31], [0, 33]]}}), 64),
    ],
)
def test_wide_units_and_tables_of_one_width_are_not(caplog, plan, dim):
    assert warnings_of(caplog, plan, dim) == []


@pytest.mark.parametrize(
    ("dim", "plan", "message"),
    [
        (
            64,
            cut(33, 31),
            r"shard 0 holds .* units of 1 number, .*: user \(33\), item \(64\); .* takes 9 bytes, as fp32 4; cut columns in",
        ),
        (64, cut(62, 2), "shard 0 holds rows in units of 2 numbers, .* takes 10 bytes, as fp32 8"),
        (2, Plan(shards=2), "shard 0 holds rows in units of 2 numbers, .*, as fp32 8; use fp16$"),
    ],
)
def test_int8_that_would_be_larger_than_fp32_is_refused(tmp_path, dim, plan, message):
    module = plain_collection({"user": 10, "item": 23}, dim=dim)
    with pytest.raises(ExportError, match=message):
        export_collection(module, tmp_path / "repo", name="c", plan=plan, row_dtype="int8")
    assert not (tmp_path / "repo").exists()


@pytest.mark.parametrize("plan", [cut(3, 61), cut(61, 3), cut(32, 32)])
def test_int8_that_is_not_refused_is_smaller_than_fp32(tmp_path, plan):
    rows = 4000
    module = plain_collection({"user": rows}, dim=64)
    with torch.no_grad():
        sizes = [
            sum(
                shard.state_bytes
                for shard in export_collection(module, tmp_path, name="c", plan=plan, row_dtype=kind).shards
            )
            for kind in ("int8", "fp32")
        ]
    assert sizes[0] < sizes[1]
