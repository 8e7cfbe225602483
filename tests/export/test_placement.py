"""Where tables, rows, columns and training buckets go, and how a plan that does not fit is refused."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from export.contract import Remap, Routing, TrainingBuckets
from export.errors import ExportError
from export.placement import choose_plan, place_tables
from export.plans import Plan
from export.reading import read_collection
from tests.modules import managed_collection, plain_collection

PLAIN = read_collection(plain_collection())
MANAGED = read_collection(managed_collection({"user": 12, "item": 20}))


def bucketed(*edges, remap=Remap.MCH):
    """MANAGED, its table user trained in buckets with these row edges."""
    user, item = MANAGED.tables
    training = TrainingBuckets(input_hash_size=0, row_edges=edges)
    return replace(MANAGED, tables=(replace(user, map=replace(user.map, training=training, remap=remap)), item))


def rows_on(source, plan, table="user"):
    return [(piece.shard, piece.row_start, piece.row_stop) for piece in place_tables(source, plan)[table][1]]


def test_each_table_goes_its_own_way_and_those_left_out_the_default_one():
    plan = Plan(shards=3, tables={"user": {"rows": [4, 0, 6]}, "one": {"shard": 1}})
    assert rows_on(PLAIN, plan) == [(0, 0, 4), (1, 4, 4), (2, 4, 10)]
    assert rows_on(PLAIN, plan, "one") == [(1, 0, 1)]
    assert rows_on(PLAIN, plan, "item") == [(0, 0, 8), (1, 8, 16), (2, 16, 23)]


@pytest.mark.parametrize(
    ("shards", "sizes"), [(4, [3, 3, 3, 1]), (6, [2, 2, 2, 2, 2, 0]), (1, [10]), (11, [1] * 10 + [0])]
)
def test_rows_are_cut_as_torchrecs_row_wise_sharding_cuts_them(shards, sizes):
    cut = rows_on(PLAIN, Plan(shards=shards))
    assert [stop - start for _, start, stop in cut] == sizes


def test_rows_may_lie_on_shards_in_any_order_and_leave_some_out():
    plan = Plan(shards=4, tables={"user": {"rows": [[3, 4], [0, 0], [1, 6]]}})
    assert rows_on(PLAIN, plan) == [(3, 0, 4), (0, 4, 4), (1, 4, 10)]


def test_columns_lie_in_any_order_and_twice_on_a_shard():
    plan = Plan(shards=3, tables={"user": {"columns": [[2, 1], [0, 2], [2, 1]]}})
    routing, pieces = place_tables(PLAIN, plan)["user"]
    assert routing is Routing.COLUMNS
    assert [(piece.shard, piece.col_start, piece.col_stop) for piece in pieces] == [(2, 0, 1), (0, 1, 3), (2, 3, 4)]
    assert {(piece.row_start, piece.row_stop) for piece in pieces} == {(0, 10)}


@pytest.mark.parametrize(
    ("table", "shards"),
    [({"routing": "replicated"}, [0, 1, 2]), ({"shards": "all"}, [0, 1, 2]), ({"shards": [2, 0]}, [2, 0])],
)
def test_copies_lie_on_all_shards_or_on_those_that_are_named(table, shards):
    routing, pieces = place_tables(PLAIN, Plan(shards=3, tables={"user": table}))["user"]
    assert routing is Routing.REPLICATED
    assert [piece.shard for piece in pieces] == shards


def test_managed_tables_are_hashed_over_every_shard_by_default():
    routing, pieces = place_tables(MANAGED, Plan(shards=2))["item"]
    assert routing is Routing.HASH
    assert [(piece.shard, piece.row_start, piece.row_stop) for piece in pieces] == [(0, 0, 20), (1, 0, 20)]


def test_mpzch_tables_keep_their_training_buckets_by_default():
    source = bucketed(0, 3, 6, 9, 12, remap=Remap.MPZCH)
    assert place_tables(source, Plan(shards=2))["user"][0] is Routing.TRAINING
    assert rows_on(source, Plan(shards=3)) == [(0, 0, 6), (1, 6, 9), (2, 9, 12)]


@given(sizes=st.lists(st.integers(0, 5), min_size=1, max_size=9).filter(sum), shards=st.integers(1, 12))
def test_whole_buckets_are_spread_evenly_over_any_number_of_shards(sizes, shards):
    edges = [sum(sizes[:bucket]) for bucket in range(len(sizes) + 1)]
    user = MANAGED.tables[0]
    training = TrainingBuckets(input_hash_size=0, row_edges=tuple(edges))
    table = replace(user, map=replace(user.map, training=training))
    pieces = rows_on(replace(MANAGED, tables=(table,)), Plan(shards=shards, tables={"user": {"routing": "training"}}))
    assert [shard for shard, _, _ in pieces] == list(range(shards))
    assert [start for _, start, _ in pieces] + [edges[-1]] == [0] + [stop for _, _, stop in pieces]
    assert {start for _, start, _ in pieces} <= set(edges)
    if min(sizes) > 0:
        held = [sum(start <= edge < stop for edge in edges[:-1]) for _, start, stop in pieces]
        assert max(held) - min(held) <= 1


def test_training_buckets_may_be_dealt_out_by_hand():
    plan = Plan(shards=3, tables={"user": {"routing": "training", "rows": [[2, 9], [0, 3]]}})
    assert rows_on(bucketed(0, 3, 6, 9, 12), plan) == [(2, 0, 9), (0, 9, 12)]


@pytest.mark.parametrize(
    ("source", "tables", "message"),
    [
        (PLAIN, {"usr": {"routing": "rows"}}, "table 'usr' is not in the module; its tables are"),
        (PLAIN, {"user": {"shard": 2}}, r"table user: shard 2 is out of range, shards are 0\.\.1"),
        (PLAIN, {"user": {"rows": [[2, 10]]}}, "table user: shard 2 is out of range"),
        (PLAIN, {"user": {"rows": [4, 5]}}, "table user: rows add up to 9, the table has 10"),
        (PLAIN, {"user": {"rows": [4, 3, 3]}}, "table user: rows names 3 shards, the plan has 2"),
        (PLAIN, {"user": {"rows": [[0, 4], [1, 3], [0, 3]]}}, "table user: shard 0 is named twice; routing 'rows'"),
        (PLAIN, {"user": {"columns": [2, 3]}}, "table user: columns add up to 5, the table has 4"),
        (PLAIN, {"user": {"columns": [4]}}, "table user: columns names 1 shards, the plan has 2"),
        (PLAIN, {"user": {"columns": [4, 0]}}, "table user: columns names a piece of no columns"),
        (PLAIN, {"user": {"shards": [1, 1]}}, "table user: shard 1 is named twice; routing 'replicated'"),
        (PLAIN, {"user": {"shards": []}}, "table user: shards names none"),
        (PLAIN, {"user": {"shards": [0, 2]}}, "table user: shard 2 is out of range"),
        (
            PLAIN,
            {"user": {"routing": "hash"}},
            "table user: routing 'hash' is not for plain tables; use 'table', 'rows', 'columns', 'replicated'",
        ),
        (
            MANAGED,
            {"user": {"routing": "rows"}},
            "routing 'rows' is not for MCH tables; use 'hash', 'table', 'training'",
        ),
        (MANAGED, {"user": {"rows": [6, 6]}}, "table user: routing 'rows' is not for MCH tables"),
        (MANAGED, {"user": {"columns": [2, 2]}}, "table user: routing 'columns' is not for MCH tables"),
        (MANAGED, {"user": {"shards": "all"}}, "table user: routing 'replicated' is not for MCH tables"),
        (
            MANAGED,
            {"user": {"routing": "training", "rows": [6, 6]}},
            r"table user: rows are cut at 6, inside the training bucket of rows 0\.\.12",
        ),
        (
            bucketed(0, 4, 8, 12, remap=Remap.MPZCH),
            {"user": {"routing": "hash"}},
            "table user: routing 'hash' is not for MPZCH tables; use 'training', 'table'",
        ),
        (
            bucketed(0, 4, 8, 12),
            {"user": {"routing": "training", "rows": [7, 5]}},
            r"table user: rows are cut at 7, inside the training bucket of rows 4\.\.8; cut between buckets",
        ),
    ],
)
def test_a_plan_that_does_not_fit_the_module_is_refused_naming_the_table(source, tables, message):
    with pytest.raises(ExportError, match=message):
        place_tables(source, Plan(shards=2, tables=tables))


def test_without_a_plan_every_table_is_spread_over_the_shards_asked_for(tmp_path):
    assert choose_plan(PLAIN) == Plan(shards=1)
    assert choose_plan(PLAIN, num_shards=3) == Plan(shards=3)
    (tmp_path / "plan.yaml").write_text("shards: 4")
    for plan in (tmp_path / "plan.yaml", str(tmp_path / "plan.yaml"), Plan(shards=4)):
        assert choose_plan(PLAIN, plan=plan) == Plan(shards=4)


def test_a_device_overrides_the_plans_own():
    plan = Plan(shards=2, devices=("cuda:0", "cuda:1"), tables={"user": {"rows": [4, 6]}})
    assert choose_plan(PLAIN, plan=plan, device="cpu") == plan.model_copy(update={"devices": ("cpu", "cpu")})
    assert choose_plan(PLAIN, num_shards=2, device="cuda:1").devices == ("cuda:1", "cuda:1")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_shards": 0}, "num_shards 0: use a whole number from 1 to "),
        ({"num_shards": "2"}, "num_shards '2': use a whole number"),
        ({"num_shards": 2.0}, r"num_shards 2\.0: use a whole number"),
        ({"num_shards": True}, "num_shards True: use a whole number"),
        ({"num_shards": 2, "plan": Plan(shards=2)}, "num_shards and plan were both given"),
        ({"plan": 3}, "plan: int is not read; give the path of a plan.yaml or an EmbeddingModuleShardingPlan"),
        ({"num_shards": 2, "device": "gpu"}, "device 'gpu': use cpu or cuda:N"),
        ({"device": "cuda:10000"}, "device 'cuda:10000': use cpu or cuda:N, N from 0 to 9999"),
    ],
)
def test_options_that_make_no_plan_are_refused(options, message):
    with pytest.raises(ExportError, match=message):
        choose_plan(PLAIN, **options)
