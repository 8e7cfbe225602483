"""TorchRec's own sharding plans, made by its helpers and by hand, become ours or are refused by name."""

import logging
from dataclasses import replace

import pytest
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    grid_shard,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ParameterSharding,
    ShardingPlan,
    ShardMetadata,
)

from export.contract import Remap, Routing, TrainingBuckets, even_row_ranges
from export.errors import ExportError
from export.placement import choose_plan, place_tables
from export.reading import read_collection
from export.sharding_plan import check_same_cuts, describe_cuts
from tests.modules import managed_collection, plain_collection

MODULE = plain_collection({"user": 10, "item": 23, "one": 1}, dim=8)
SOURCE = read_collection(MODULE)
MC_MODULE = managed_collection({"user": 12, "item": 20})
MC_SOURCE = read_collection(MC_MODULE)


def torchrecs_plan(ways, *, ranks, local=None, device="cpu", module=MODULE):
    sharder = EmbeddingCollectionSharder() if module is MODULE else ManagedCollisionEmbeddingCollectionSharder()
    return construct_module_sharding_plan(
        module, ways, sharder=sharder, local_size=local or ranks, world_size=ranks, device_type=device
    )


def placed(plan, table, source=SOURCE):
    """Routing, and (shard, row_start, row_stop, col_start, col_stop) of each piece."""
    routing, pieces = place_tables(source, choose_plan(source, plan=plan))[table]
    return routing, [(p.shard, p.row_start, p.row_stop, p.col_start, p.col_stop) for p in pieces]


def by_hand(kind, *shards, ranks=None):
    """A plan for MODULE: user as given, by (row, col, rows, cols, placement); item and one on rank 0."""
    spec = [ShardMetadata(shard_offsets=[r, c], shard_sizes=[rs, cs], placement=at) for r, c, rs, cs, at in shards]
    plan = torchrecs_plan(dict.fromkeys(("user", "item", "one"), table_wise(rank=0)), ranks=1)
    plan["user"] = ParameterSharding(
        sharding_type=kind, compute_kernel="dense", ranks=ranks, sharding_spec=EnumerableShardingSpec(spec)
    )
    return plan


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_way_to_cut_a_table_is_taken_over_from_every_number_of_ranks(ranks):
    plan = torchrecs_plan({"user": row_wise(), "item": data_parallel(), "one": table_wise(rank=ranks - 1)}, ranks=ranks)
    assert choose_plan(SOURCE, plan=plan).shards == ranks
    rows = even_row_ranges(10, ranks)
    assert placed(plan, "user") == (Routing.ROWS, [(s, a, b, 0, None) for s, (a, b) in enumerate(rows)])
    assert placed(plan, "item") == (Routing.REPLICATED, [(s, 0, 23, 0, None) for s in range(ranks)])
    assert placed(plan, "one") == (Routing.TABLE, [(ranks - 1, 0, 1, 0, None)])


@pytest.mark.parametrize("order", [[0], [1, 0], [2, 2], [3, 0, 1, 3]])
def test_columns_keep_the_ranks_they_were_given_in_any_order(order):
    # TorchRec's helper never makes blocks under 4 columns of its own accord, so 4 pieces need wider rows.
    module = plain_collection({"user": 10}, dim=4 * len(order))
    plan = construct_module_sharding_plan(
        module,
        {"user": column_wise(ranks=order)},
        sharder=EmbeddingCollectionSharder(),
        local_size=4,
        world_size=4,
        device_type="cpu",
    )
    expected = [(rank, 0, 10, 4 * i, 4 * i + 4) for i, rank in enumerate(order)]
    assert placed(plan, "user", read_collection(module)) == (Routing.COLUMNS, expected)


def test_uneven_columns_are_taken_over():
    plan = torchrecs_plan(
        {"user": column_wise(size_per_rank=[5, 1, 2]), "item": row_wise(), "one": data_parallel()}, ranks=3
    )
    assert placed(plan, "user") == (Routing.COLUMNS, [(0, 0, 10, 0, 5), (1, 0, 10, 5, 6), (2, 0, 10, 6, 8)])


def test_uneven_and_empty_row_shards_stay_shards_of_their_own():
    """TorchRec's helper places all of them on rank:0/cpu and names the ranks beside."""
    ways = {"user": row_wise(([4, 0, 5, 1], "cpu")), "item": row_wise(), "one": row_wise()}
    plan = torchrecs_plan(ways, ranks=4)
    assert placed(plan, "user")[1] == [(0, 0, 4, 0, None), (1, 4, 4, 0, None), (2, 4, 9, 0, None), (3, 9, 10, 0, None)]
    assert placed(plan, "one")[1] == [(0, 0, 1, 0, None), (1, 1, 1, 0, None), (2, 1, 1, 0, None), (3, 1, 1, 0, None)]


def test_rows_within_one_host_are_rows_on_its_ranks():
    ways = {"user": table_row_wise(host_index=1), "item": row_wise(), "one": table_wise(rank=0)}
    plan = torchrecs_plan(ways, ranks=4, local=2)
    assert placed(plan, "user") == (Routing.ROWS, [(2, 0, 5, 0, None), (3, 5, 10, 0, None)])


def test_a_grid_of_one_column_block_is_rows():
    ways = {"user": grid_shard(host_indexes=[0]), "item": row_wise(), "one": row_wise()}
    assert placed(torchrecs_plan(ways, ranks=2), "user")[0] is Routing.ROWS


def test_columns_on_one_host_are_columns():
    plan = by_hand("table_column_wise", (0, 4, 10, 4, "rank:0/cpu"), (0, 0, 10, 4, "rank:3/cpu"))
    assert placed(plan, "user") == (Routing.COLUMNS, [(3, 0, 10, 0, 4), (0, 0, 10, 4, 8)])


def test_row_shards_are_read_by_offset_and_those_of_one_rank_are_joined():
    plan = by_hand(
        "row_wise",
        (6, 0, 4, 8, "rank:1/cpu"),
        (0, 0, 4, 8, "rank:2/cpu"),
        (4, 0, 2, 8, "rank:2/cpu"),
        (6, 0, 0, 8, "rank:0/cpu"),
        (10, 0, 0, 8, "rank:1/cpu"),
    )
    assert placed(plan, "user")[1] == [(2, 0, 6, 0, None), (0, 6, 6, 0, None), (1, 6, 10, 0, None)]


def test_devices_come_from_the_placements_and_can_be_overridden():
    ways = {"user": row_wise(), "item": row_wise(), "one": table_wise(rank=0)}
    plan = torchrecs_plan(ways, ranks=4, local=2, device="cuda")
    assert choose_plan(SOURCE, plan=plan).devices == ("cuda:0", "cuda:1", "cuda:0", "cuda:1")
    assert choose_plan(SOURCE, plan=plan, device="cpu").devices == ("cpu",) * 4
    mixed = torchrecs_plan({**ways, "one": table_wise(rank=1, device="cpu")}, ranks=2, device="cuda")
    with pytest.raises(ExportError, match="table one: rank 1 is on cpu, for another table on cuda:1"):
        choose_plan(SOURCE, plan=mixed)
    assert choose_plan(SOURCE, plan=mixed, device="cuda:0").devices == ("cuda:0", "cuda:0")


def test_ranks_that_only_hold_copies_are_on_the_cpu_unless_told():
    plan = torchrecs_plan(dict.fromkeys(("user", "item", "one"), data_parallel()), ranks=2, device="cuda")
    assert choose_plan(SOURCE, plan=plan).devices == ("cpu", "cpu")


def test_a_plain_dict_of_one_modules_entry_is_a_plan():
    plan = torchrecs_plan(dict.fromkeys(("user", "item", "one"), row_wise()), ranks=2)
    assert choose_plan(SOURCE, plan=dict(plan)) == choose_plan(SOURCE, plan=ShardingPlan({"ec": plan}).plan["ec"])


def trained_in(*edges, remap=Remap.MCH):
    training = TrainingBuckets(input_hash_size=0, row_edges=edges)
    tables = [
        replace(table, map=replace(table.map, training=training, remap=remap)) if table.name == "user" else table
        for table in MC_SOURCE.tables
    ]
    return replace(MC_SOURCE, tables=tuple(tables))


@pytest.mark.parametrize(
    ("edges", "remap", "starts"),
    [
        ((0, 12), Remap.MCH, [0]),
        ((0, 6, 12), Remap.MCH, [0, 6]),
        ((0, 3, 6, 9, 12), Remap.MCH, [0, 6]),
        ((0, 3, 6, 9, 12), Remap.MPZCH, [0, 3, 6, 9]),
    ],
)
def test_row_wise_managed_tables_stay_in_training_routing_where_whole_buckets_lie_on_a_rank(
    caplog, edges, remap, starts
):
    plan = torchrecs_plan({"user": row_wise(), "item": row_wise()}, ranks=len(starts), module=MC_MODULE)
    routing, pieces = placed(plan, "user", trained_in(*edges, remap=remap))
    assert (routing, [start for _, start, *_ in pieces]) == (Routing.TRAINING, starts)
    assert not [record for record in caplog.records if "table user" in record.getMessage()]


@pytest.mark.parametrize(
    ("edges", "remap", "routing"),
    [((0, 12), Remap.MCH, Routing.HASH), ((0, 4, 8, 12), Remap.MPZCH, Routing.TRAINING)],
)
def test_a_cut_through_training_buckets_is_served_another_way_and_said(caplog, edges, remap, routing):
    plan = torchrecs_plan({"user": row_wise(), "item": row_wise()}, ranks=2, module=MC_MODULE)
    with caplog.at_level(logging.WARNING):
        found, pieces = placed(plan, "user", trained_in(*edges, remap=remap))
    assert found is routing
    assert [shard for shard, *_ in pieces] == [0, 1]
    assert f"table user: the plan cuts rows inside its {len(edges) - 1} training bucket(s)" in caplog.text
    assert f"served by {routing.value} over all shards" in caplog.text


def wise(kind, *shards, **options):
    return lambda: by_hand(kind, *shards, **options)


def without(table):
    plan = torchrecs_plan(dict.fromkeys(("user", "item", "one"), row_wise()), ranks=2)
    del plan[table]
    return plan


def with_another():
    plan = torchrecs_plan(dict.fromkeys(("user", "item", "one"), row_wise()), ranks=2)
    plan["t_user"] = plan["user"]
    return plan


def of_no_rank():
    sharding = ParameterSharding(sharding_type="data_parallel", compute_kernel="dense")
    return dict.fromkeys(("user", "item", "one"), sharding)


def of_no_spec():
    plan = by_hand("table_wise", (0, 0, 10, 8, "rank:0/cpu"))
    plan["user"] = ParameterSharding(sharding_type="row_wise", compute_kernel="dense", ranks=[0])
    return plan


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: without("item"), "table item is missing; a TorchRec plan names every table"),
        (with_another, "table 't_user' is not in the module; its tables are"),
        (of_no_rank, "no table names a rank"),
        (of_no_spec, "table user: sharding_spec is NoneType; row_wise needs an EnumerableShardingSpec"),
        (
            lambda: ShardingPlan({"model.ec": EmbeddingModuleShardingPlan()}),
            r"a ShardingPlan is for a whole model; pass one module's entry, plan.plan\[PATH\], of \['model.ec'\]",
        ),
        (lambda: {"user": {"routing": "rows"}}, "dict is not read; give the path of a plan.yaml or an Embedding"),
        (
            wise("row_wise", (0, 0, 4, 8, "rank:0/cpu"), (4, 0, 6, 8, "cuda:0")),
            "table user: its shard 1 is on no rank",
        ),
        (
            wise("row_wise", (0, 0, 10, 8, "trainer0/cuda:0")),
            "table user: its shard 0 is on no rank",
        ),
        (wise("row_wise", (0, 0, 4, 8, "rank:0/cpu")), "table user: rows add up to 4, the table has 10"),
        (
            wise("row_wise", (0, 0, 4, 8, "rank:0/cpu"), (5, 0, 5, 8, "rank:1/cpu")),
            r"table user: rows 4\.\.5 are on no rank",
        ),
        (
            wise("column_wise", (0, 0, 10, 4, "rank:0/cpu"), (0, 6, 10, 2, "rank:1/cpu")),
            r"table user: columns 4\.\.6 are on no rank",
        ),
        (
            wise("row_wise", (0, 0, 2, 8, "rank:0/cpu"), (2, 0, 2, 8, "rank:1/cpu"), (4, 0, 6, 8, "rank:0/cpu")),
            "table user: shard 0 is named twice; routing 'rows' names it once",
        ),
        (
            wise("row_wise", (0, 0, 10, 4, "rank:0/cpu"), (0, 4, 10, 4, "rank:1/cpu")),
            r"table user: shards of sizes \[\(10, 4\), \(10, 4\)\] are not row_wise of 10 x 8",
        ),
        (wise("table_wise", (0, 0, 5, 8, "rank:0/cpu")), r"sizes \[\(5, 8\)\] are not table_wise of 10 x 8"),
        (
            wise("grid_shard", *[(r, c, 5, 4, f"rank:{r // 5}/cpu") for r in (0, 5) for c in (0, 4)]),
            "table user: grid_shard cuts rows and columns at once, which is not served",
        ),
        (wise("diagonal", (0, 0, 10, 8, "rank:0/cpu")), "table user: sharding_type 'diagonal' is not one of"),
        (wise("row_wise", (0, 0, 10, 8, "rank:1/mtia:0")), "devices.1: 'mtia:0': use cpu or cuda:N"),
    ],
)
def test_a_plan_that_is_not_served_is_refused_by_name(make, message):
    with pytest.raises(ExportError, match=message) as raised:
        place_tables(SOURCE, choose_plan(SOURCE, plan=make()))
    assert "\n" not in str(raised.value)


def test_managed_tables_are_not_cut_by_columns():
    plan = torchrecs_plan({"user": row_wise(), "item": row_wise()}, ranks=1, module=MC_MODULE)
    halves = [ShardMetadata(shard_offsets=[0, c], shard_sizes=[12, 2], placement=f"rank:{c // 2}/cpu") for c in (0, 2)]
    plan["user"] = ParameterSharding(
        sharding_type="column_wise", compute_kernel="dense", sharding_spec=EnumerableShardingSpec(halves)
    )
    with pytest.raises(ExportError, match="table user: routing 'columns' is not for MCH tables"):
        placed(plan, "user", MC_SOURCE)


@pytest.mark.parametrize(
    ("ways", "message"),
    [
        (
            {"user": table_wise(rank=1), "item": table_wise(rank=0)},
            r"table user: rank 1's .* says table_wise, rank 0's row_wise; all ranks need one plan",
        ),
        (
            {"user": row_wise(), "item": table_wise(rank=1)},
            r"table item: rank 1's .* 23 x 8 at \[0, 0\] on rank 1, rank 0's 23 x 8 at \[0, 0\] on rank 0; all",
        ),
        ({"user": row_wise()}, "table item: rank 1's sharding plan says nothing, rank 0's table_wise; all"),
    ],
)
def test_the_first_difference_between_the_ranks_plans_is_named(ways, message):
    usual = {"user": row_wise(), "item": table_wise(rank=0), "one": data_parallel()}
    first = describe_cuts(torchrecs_plan(usual, ranks=2))
    plan = torchrecs_plan({**usual, **ways}, ranks=2)
    own = describe_cuts({table: plan[table] for table in ways})
    check_same_cuts([first, dict(first)])
    with pytest.raises(ExportError, match=message):
        check_same_cuts([first, {"one": first["one"], **own}])
