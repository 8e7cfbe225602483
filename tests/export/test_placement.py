"""Plans: what they may say, how they are refused, and where rows go without one."""

import pytest

from export.contract import Routing
from export.errors import ExportError
from export.placement import Plan, place_tables, read_plan
from export.source import read_collection
from tests.modules import managed_collection, plain_collection

PLAIN = read_collection(plain_collection())
MANAGED = read_collection(managed_collection())


def write(tmp_path, text):
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    return path


def ranges(source, plan, table):
    return [(piece.shard, piece.row_start, piece.row_stop) for piece in place_tables(source, plan)[table][1]]


def test_a_plan_is_read_and_tables_it_leaves_out_get_the_default(tmp_path):
    plan = read_plan(
        write(
            tmp_path,
            "shards: 3\ntables:\n  user: {routing: rows, rows: [4, 0, 6]}\n  one: {routing: table, shard: 1}\n",
        )
    )
    assert ranges(PLAIN, plan, "user") == [(0, 0, 4), (1, 4, 4), (2, 4, 10)]
    assert ranges(PLAIN, plan, "one") == [(1, 0, 1)]
    assert ranges(PLAIN, plan, "item") == [(0, 0, 8), (1, 8, 16), (2, 16, 23)]


@pytest.mark.parametrize(
    ("shards", "sizes"), [(4, [3, 3, 3, 1]), (6, [2, 2, 2, 2, 2, 0]), (1, [10]), (11, [1] * 10 + [0])]
)
def test_rows_are_cut_as_torchrecs_row_wise_sharding_cuts_them(shards, sizes):
    cut = ranges(PLAIN, Plan(shards=shards), "user")
    assert [stop - start for _, start, stop in cut] == sizes


def test_managed_tables_are_hashed_over_every_shard_by_default():
    routing, pieces = place_tables(MANAGED, Plan(shards=2))["item"]
    assert routing is Routing.HASH
    assert [(piece.shard, piece.row_start, piece.row_stop) for piece in pieces] == [(0, 0, 20), (1, 0, 20)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("shards: 0", "shards: .*greater than or equal to 1"),
        ("tables: {}", "shards: Field required"),
        ("[1, 2]", "plan: .*"),
        ("shards: [", "not YAML"),
        ("shards: 2\nshard: 3", "shard: Extra inputs"),
        ("shards: 2\ntables: {user: {routing: table}}", "tables.user: .*needs it"),
        ("shards: 2\ntables: {user: {shard: 1}}", "tables.user: .*belongs to routing 'table'"),
        ("shards: 2\ntables: {user: {routing: hash, rows: [1, 2]}}", "tables.user: .*belongs to routing 'rows'"),
        (
            "shards: 2\ntables: {user: {routing: random}}",
            "tables.user.routing: .*'table', 'rows', 'columns', 'replicated', 'training' or 'hash'",
        ),
        ("shards: 2\ntables: {user: {rows: [-1, 11]}}", "tables.user.rows.0: "),
    ],
)
def test_a_plan_that_breaks_a_rule_is_refused_naming_the_field(tmp_path, text, message):
    with pytest.raises(ExportError, match=message) as raised:
        read_plan(write(tmp_path, text))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("source", "tables", "message"),
    [
        (PLAIN, {"usr": {"routing": "rows"}}, "table 'usr' is not in the module; its tables are"),
        (PLAIN, {"user": {"routing": "table", "shard": 2}}, "table user: shard 2 is out of range, shards are 0..1"),
        (PLAIN, {"user": {"rows": [4, 5]}}, "table user: rows add up to 9, the table has 10"),
        (PLAIN, {"user": {"rows": [4, 3, 3]}}, "table user: rows names 3 shards, the plan has 2"),
        (PLAIN, {"user": {"routing": "hash"}}, "table user: routing 'hash' is for managed-collision tables"),
        (MANAGED, {"user": {"routing": "rows"}}, "table user: routing 'rows' is for plain tables"),
        (MANAGED, {"user": {"rows": [6, 6]}}, "table user: routing 'rows' is for plain tables"),
    ],
)
def test_a_plan_that_does_not_fit_the_module_is_refused_naming_the_table(source, tables, message):
    with pytest.raises(ExportError, match=message):
        place_tables(source, Plan(shards=2, tables=tables))


def test_a_plan_that_is_not_there_is_refused_with_its_path(tmp_path):
    with pytest.raises(ExportError, match=r"nowhere\.yaml: No such file"):
        read_plan(tmp_path / "nowhere.yaml")
