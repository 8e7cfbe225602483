"""Uneven shards are foretold from a map's own ids and from the sizes of tables, and even ones are not."""

import logging
from dataclasses import replace

import pytest
import torch

from export.contract import Remap, TrainingBuckets, Unknown, even_row_ranges, training_bucket
from export.placement import place_tables
from export.plans import Plan
from export.reading import read_collection
from export.skew import find_skew, warn_of_skew
from export.state import PlacedTable
from tests.modules import managed_collection, plain_collection, whole_table

MANAGED = read_collection(managed_collection({"user": 12}))


def placed(source, plan):
    places = place_tables(source, plan)
    return [
        PlacedTable(
            source=table, routing=places[table.name][0], placements=places[table.name][1], unknown=Unknown.TRAINING
        )
        for table in source.tables
    ]


def trained_on(ids, *, buckets, input_hash_size, remap=Remap.MCH):
    """A collection of one table that training on ``ids`` filled, each bucket from its first row on."""
    rows = 2 * len(ids)
    edges = [start for start, _ in even_row_ranges(rows, buckets)] + [rows]
    taken = [0] * buckets
    rows_K = []
    for id_ in ids:
        bucket = training_bucket(id_ % 2**64, input_hash_size=input_hash_size, buckets=buckets)
        if taken[bucket] < edges[bucket + 1] - edges[bucket] - 1:
            rows_K.append(edges[bucket] + taken[bucket])
            taken[bucket] += 1
    table = MANAGED.tables[0]
    source = replace(
        table.map,
        remap=remap,
        training=TrainingBuckets(input_hash_size=input_hash_size, row_edges=tuple(edges)),
        ids_K=torch.tensor(ids[: len(rows_K)]),
        rows_K=torch.tensor(rows_K),
        pieces=(replace(table.map.pieces[0], row_stop=rows),),
    )
    table = replace(table, numbers=whole_table("user", torch.zeros(rows, 4)), map=source)
    return replace(MANAGED, tables=(table,))


def skews(source, shards, **table):
    return list(find_skew(placed(source, Plan(shards=shards, tables={"user": table})), shards))


SMALL = range(1, 1001)
LARGE = [id_ * 0x9E3779B97F4A7C15 % 2**63 for id_ in SMALL]


def test_small_ids_below_the_default_hash_size_all_go_to_shard_0_and_hash_is_advised():
    source = trained_on(SMALL, buckets=4, input_hash_size=2**63 - 1)
    (skew,) = skews(source, 4, routing="training")
    assert (skew.table, skew.shard, skew.held, skew.total, skew.times) == ("user", 0, 499, 499, 4.0)
    assert str(skew) == (
        "table user: shard 0 holds 499 of 499 ids, 4.0 times its share, so it will be the slowest; training cut the ids "
        "into even blocks below input_hash_size 9223372036854775807: routing 'hash' is even"
    )


@pytest.mark.parametrize(("ids", "size"), [(LARGE, 2**63 - 1), (SMALL, 1001), (SMALL, 0)])
def test_ids_that_fill_their_blocks_or_go_by_modulo_are_even(ids, size):
    assert skews(trained_on(ids, buckets=4, input_hash_size=size), 4, routing="training") == []


def test_a_rank_of_a_live_module_says_nothing_of_ids_that_it_cannot_see():
    source = trained_on(SMALL, buckets=4, input_hash_size=2**63 - 1)
    (table,) = source.tables
    quarter = replace(table.map.pieces[0], row_stop=table.rows // 4)
    mine = replace(source, tables=(replace(table, map=replace(table.map, pieces=(quarter,))),))
    assert len(skews(source, 4, routing="training")) == 1
    assert skews(mine, 4, routing="training") == []


def test_hash_routing_is_even_whatever_training_did():
    assert skews(trained_on(SMALL, buckets=4, input_hash_size=2**63 - 1), 4, routing="hash") == []


def test_more_shards_than_buckets_leave_some_empty():
    (skew,) = skews(trained_on(SMALL, buckets=1, input_hash_size=0), 3, routing="training")
    assert (skew.shard, skew.times) == (0, 3.0)
    assert "training had 1 bucket(s) and there are 3 shards: routing 'hash' is even" in str(skew)


def test_hash_is_not_advised_where_it_is_not_offered():
    source = trained_on(range(0, 4000, 4), buckets=4, input_hash_size=0, remap=Remap.MPZCH)
    (skew,) = skews(source, 4, routing="training")
    assert str(skew).endswith("training dealt the ids out by modulo")


def test_few_ids_lie_unevenly_by_chance():
    assert skews(trained_on([1, 2, 3], buckets=2, input_hash_size=2**63 - 1), 2, routing="training") == []


BIG = read_collection(plain_collection({"user": 80_000, "item": 40_000}, dim=8))


@pytest.mark.parametrize(
    ("tables", "shard", "times"),
    [
        ({"user": {"shard": 1}, "item": {"shard": 1}}, 1, 2.0),
        ({"user": {"rows": [78_000, 2_000]}}, 0, 1.63),
        ({"user": {"columns": [[1, 4], [0, 1], [1, 3]]}, "item": {"shard": 1}}, 1, 1.83),
    ],
)
def test_a_plan_that_puts_most_bytes_on_one_shard_is_foretold(tables, shard, times):
    (skew,) = find_skew(placed(BIG, Plan(shards=2, tables=tables)), 2)
    assert (skew.table, skew.shard, skew.total) == (None, shard, 120_000 * 8 * 4)
    assert skew.times == pytest.approx(times, abs=0.01)
    assert f"shard {shard} holds {skew.held / 2**20:.1f} MiB of 3.7 MiB of rows, {times:.1f} times its share" in str(
        skew
    )


@pytest.mark.parametrize(
    "tables",
    [{}, {"user": {"shards": "all"}, "item": {"shards": [0]}}, {"user": {"columns": [[1, 4], [0, 4]]}}],
)
def test_a_plan_that_is_balanced_is_not_remarked_on(tables):
    assert list(find_skew(placed(BIG, Plan(shards=2, tables=tables)), 2)) == []


def test_small_tables_are_not_worth_a_plan():
    source = read_collection(plain_collection())
    plan = Plan(shards=2, tables={"user": {"shard": 0}, "item": {"shard": 0}, "one": {"shard": 0}})
    assert list(find_skew(placed(source, plan), 2)) == []


def test_the_warnings_are_logged(caplog):
    tables = placed(
        trained_on(SMALL, buckets=1, input_hash_size=0), Plan(shards=2, tables={"user": {"routing": "training"}})
    )
    with caplog.at_level(logging.WARNING):
        warn_of_skew(tables, 2)
    (record,) = caplog.records
    assert (record.name, record.getMessage()) == ("export.skew", str(next(find_skew(tables, 2))))
